"""Adaptation while serving: a stream that switches domain, and what `drafttrain adapt` recovers at which cost.

    python eval/bench_adapt.py --drafter runs/quickstart/drafter --output adapt.json

Serves general questions, then requests of another domain, greedily and one at a time with the drafter in a chain, and logs the
answers (`--stream FILE` keeps them for later runs). Text does not depend on the drafter, so each setting then gets the same log,
a part at a time: `Adapter` reads, trains, judges and swaps as the command does, and the accepted length of each coming answer is
replayed exactly with the version that would serve it. Cost is CPU seconds of the adapter over CPU seconds of serving.

    switch at answer A      recovered: first answer after which the mean of the last WINDOW reaches 95 % of the level before
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from drafttrain import adapt
from drafttrain.cli import parsed
from drafttrain.data.answer_log import AnswerLog, read_answer
from drafttrain.data.chat import prompt_ids
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter
from drafttrain.environment import describe_environment
from drafttrain.evaluation.held_out import replayed_rows
from drafttrain.files import write_json
from drafttrain.inference import Decoder
from drafttrain.states.source import TargetSource
from drafttrain.target import Target

SPEC = "chain:4"
DOMAINS = json.loads(
    Path(__file__).with_name("adapt_prompts.json").read_text()
)  # name -> forms, subjects


def prompts(domain: str, count: int, seed: int) -> list[str]:
    """The first `count` of all forms with all subjects, shuffled."""
    made = [
        form.format(subject)
        for form in DOMAINS[domain]["forms"]
        for subject in DOMAINS[domain]["subjects"]
    ]
    random.Random(seed).shuffle(made)
    return made[:count]


def serve(args: argparse.Namespace, target: Target) -> None:
    """Answers both parts of the stream into the log, and notes the CPU seconds of each answer."""
    target.pack()
    decoder = Decoder(target, load_drafter(args.drafter, target), spec=TreeSpec.parse(SPEC))
    log = AnswerLog(args.stream)
    seconds = []
    asked = prompts("general", args.before, 1) + prompts(args.domain, args.after, 2)
    for number, text in enumerate(asked):
        ids = prompt_ids(target.tokenizer, [{"role": "user", "content": text}])
        began = time.process_time()
        log.add(ids, decoder.generate([ids], max_new_tokens=args.max_new_tokens)[0])
        seconds.append(time.process_time() - began)
        if number % 50 == 49:
            print(
                f"{number + 1} of {len(asked)} answers, {statistics.mean(seconds[-50:]):.2f} CPU s each",
                flush=True,
            )
    write_json(
        args.stream.with_suffix(".seconds.json"), {"seconds": seconds, "before": args.before}
    )


class Simulated(adapt.Adapter):
    """An adapter whose allowance follows the stream: time is the CPU time of serving, work is its own CPU time.

    served: CPU seconds of serving so far.
    """

    served = 0.0
    began = 0.0  # process time at which the running call began

    def account(self, work: bool = True) -> None:
        state = self.state
        now = time.process_time()
        done = (now - self.began) * work
        self.began = now
        state.allowance += self.args.share * (self.served - state.at) - done
        state.at, state.spent = self.served, state.spent + done

    @property
    def cost(self) -> float:
        return self.state.spent / max(self.served, 1e-9)


def run_setting(
    words: list[str],
    args: argparse.Namespace,
    lines: list[str],
    seconds: list[float],
    before: int,
    source: TargetSource,
) -> dict:
    """Runs one setting over the stream; returns its figures."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        log.touch()
        ours = ["--drafter", args.drafter, "--log", str(log), "--output", f"{folder}/out"]
        flags = argparse.Namespace(**parsed(["adapt", *ours, *words])[1])
        output = Path(folder, "out")
        output.mkdir()
        adapter = Simulated(flags, output)
        adapter.state.at, adapter.state.allowance = 0.0, args.saved
        target = source.target
        serving = load_drafter(args.drafter, target)
        lengths = []
        part = 10
        for at in range(0, len(lines), part):
            rows = [
                read_answer(line.encode(), log, target, {}, 1024) for line in lines[at : at + part]
            ]
            rows = [
                adapt.cut_row(it.tokens, [[it.start, len(it.tokens)]], at + i, 1024)
                for i, it in enumerate(rows)
            ]
            made = replayed_rows(serving, rows, source, TreeSpec.parse(SPEC), args.max_new_tokens)
            lengths += [(row.committed, row.passes) for row in made]
            with log.open("a") as file:
                for line, row in zip(lines[at : at + part], made, strict=True):
                    file.write(
                        json.dumps(
                            {
                                **json.loads(line),
                                "accepted_length": row.committed / max(row.passes, 1),
                            }
                        )
                        + "\n"
                    )
            adapter.served += sum(seconds[at : at + part])
            adapter.began = time.process_time()
            adapter.read()
            if adapter.due() and (record := adapter.round()):
                adapt.show(record, flags.share)
                if record["verdict"] == "better":
                    serving = load_drafter(str(output / adapt.CURRENT), target)
            adapter.account()
        rounds = adapter.state.rounds
        spent = adapter.state.spent

    def level(start: int, end: int) -> float:
        chosen = list(lengths[max(start, 0) : end])
        return round(sum(c for c, _ in chosen) / max(sum(p for _, p in chosen), 1), 4)

    level_before = level(0, before) if args.share_before else level(before - args.window, before)
    ends = range(before + args.window, len(lines) + 1)
    recovered = next(
        (end - before for end in ends if level(end - args.window, end) >= 0.95 * level_before), None
    )
    last = len(lines)
    return {
        "flags": words, "before": level_before, "after_switch": level(before, before + args.window),
        "curve": {end: level(end - args.window, end) for end in range(args.window, last + 1, args.window)},
        "end": level(last - args.window, last), "recovered_after": recovered, "seconds": round(spent, 2),
        "served_seconds": round(sum(seconds), 1), "rounds": rounds,
        "cost": round(spent / (sum(seconds) + args.saved / flags.share), 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", required=True)
    parser.add_argument(
        "--stream", type=Path, default=Path(tempfile.gettempdir(), "adapt-stream.jsonl")
    )
    parser.add_argument(
        "--domain",
        choices=sorted({*DOMAINS} - {"general"}),
        default="code",
        help="of the second part",
    )
    parser.add_argument("--before", type=int, default=150)
    parser.add_argument("--after", type=int, default=390)
    parser.add_argument("--window", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument(
        "--saved",
        type=float,
        default=0.0,
        help="CPU seconds of allowance saved by serving before the stream begins, which counts as served",
    )
    parser.add_argument(
        "--share-before",
        action="store_true",
        help="the level before is that of all answers before the switch",
    )
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        help="flags of drafttrain adapt, as one word; repeat it",
    )
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    target = Target.load(args.target, "bfloat16", "cpu", False, "")
    if not args.stream.exists():
        serve(args, Target.load(args.target, "bfloat16", "cpu", False, ""))
    noted = json.loads(args.stream.with_suffix(".seconds.json").read_text())
    lines = args.stream.read_text().splitlines()
    drafter = load_drafter(args.drafter, target)
    source = TargetSource(
        target, drafter.feature_layers, drafter.kept_ids, limit_bytes=4e9
    )  # of the coming answers
    done = []
    for setting in args.setting or ["--every 50 --share 0.02", "--every 50 --share 1"]:
        print(f"== {setting}", flush=True)
        done.append(
            run_setting(setting.split(), args, lines, noted["seconds"], noted["before"], source)
        )
        print({key: value for key, value in done[-1].items() if key != "rounds"}, flush=True)
        write_json(args.output, {
            **describe_environment(target.device), "command": sys.argv, "saved_seconds": args.saved,
            "ratio": done[0]["end"] / done[0]["before"], "goal": 0.95, "sides": {" ".join(it["flags"]): it for it in done},
        })  # fmt: skip


if __name__ == "__main__":
    main()
