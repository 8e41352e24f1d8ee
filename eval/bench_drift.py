"""A stream of answers that turns to another domain: what `drafttrain adapt` recovers, and after how many answers.

    python eval/bench_drift.py --drafter runs/quickstart/drafter --data runs/quickstart/data --folder runs/drift

The drafter was trained on domain A (English, `--data`). From then on every answer is of domain B (adapt_prompts.json),
`--every` at a time. Accepted lengths are exact replays of greedy answers to prompts whose subjects occur in no
training, as chains:

    old        the drafter as it is
    adapted    what serves after each round; `Adapter` reads, trains, judges and swaps as the command does
    new        a drafter of the same recipe, trained on all of the stream's answers and nothing else
    n-grams    without any training

`recovered` is the first round after which `adapted` has 95 % of `new` on held-out answers of B. `kept` compares lengths on A. CPU
seconds are the adapter's, with its judging; the replays of this script are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmark import result_path, write_result

from drafttrain import adapt, cli
from drafttrain.cli import parsed
from drafttrain.data.store import load_records
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter
from drafttrain.evaluation.held_out import ReplayedRow, replayed_rows
from drafttrain.evaluation.resampling import paired_ratio
from drafttrain.files import Json
from drafttrain.states.source import TargetSource
from drafttrain.target import Target

SPEC = "chain:4"
GOAL = 0.95
DOMAINS = json.loads(Path(__file__).with_name("adapt_prompts.json").read_text())


def prompts(domain: str, subjects: slice, seed: int) -> list[str]:
    """All forms with some of the subjects, shuffled."""
    described = DOMAINS[domain]
    chosen = described["subjects"][subjects]
    made = [form.format(subject) for subject in chosen for form in described["forms"]]
    random.Random(seed).shuffle(made)
    return made


def run(*words: object) -> None:
    """Runs a command of drafttrain's; a folder that is complete already is kept."""
    print("$ drafttrain", *words, flush=True)
    if cli.main([str(word) for word in words]):
        raise SystemExit(1)


def answer(args: argparse.Namespace, name: str, texts: list[str], features: str) -> list[Json]:
    """The target's greedy answers as rows of a data set, which is made once."""
    file = args.folder / f"{name}.jsonl"
    folder = args.folder / name
    if not (folder / "summary.json").exists():
        args.folder.mkdir(parents=True, exist_ok=True)
        rows = []
        for number, text in enumerate(texts):
            rows.append({"id": str(number), "messages": [{"role": "user", "content": text}]})
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["--target", args.target, "--prompts", file, "--output", folder]
        words += ["--features", features, "--temperature", 0]
        run("generate", *words, "--max-new-tokens", args.max_new_tokens)
    found = []
    for number, record in enumerate(load_records(folder)):
        row = adapt.cut_row(record["tokens"], record["spans"], number, 1024)
        found.append(row)
    return found


class Unlimited(adapt.Adapter):
    """An adapter that may spend what it needs. began: its CPU time does not count before."""

    cost = 0.0  # of no allowance

    began = 0.0

    def account(self, work: bool = True) -> None:
        now = time.process_time()
        if work:
            self.state.spent += now - self.began
        self.began = now

    def budget(self) -> float:
        self.account()
        return 1e9


class Held:
    """Held-out answers of a domain, and the source of their states."""

    def __init__(self, rows: list[Json], target: Target, like: Drafter, most: int):
        # Indices are those of the data set, so each has its own cache.
        self.source = TargetSource(target, like.feature_layers, like.kept_ids, limit_bytes=2e9)
        self.device = target.device
        self.rows = rows
        self.most = most

    def replay(self, drafter: Drafter) -> list[ReplayedRow]:
        if not hasattr(drafter, "device"):  # n-grams
            drafter.device = self.device
        return replayed_rows(drafter, self.rows, self.source, TreeSpec.parse(SPEC), self.most)


def length(rows: list[ReplayedRow]) -> float:
    return round(ReplayedRow.figures(rows)["accepted_length"], 4)


def over(ours: list[ReplayedRow], theirs: list[ReplayedRow]) -> list[float]:
    """Ratio of accepted lengths with its interval, paired by answer."""
    ratio = paired_ratio(
        [[row.committed for row in ours], [row.passes for row in theirs]],
        [[row.passes for row in ours], [row.committed for row in theirs]],
    )
    return [round(part, 4) for part in ratio]


def follow(
    args: argparse.Namespace, setting: list[str], stream: list[Json], held: dict[str, Held]
) -> Iterator[Json]:
    """Feeds the stream to an adapter; after each round gives the points so far, with what serves after it."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place, "log.jsonl")
        log.touch()
        output = Path(place, "out")
        output.mkdir()
        words = ["--drafter", args.drafter, "--data", args.data, "--log", log, "--output", output]
        words += ["--target", args.target, "--every", args.every, *setting]
        flags = argparse.Namespace(**parsed(["adapt", *map(str, words)])[1])
        adapter = Unlimited(flags, output)
        points = []
        served = ""
        for first in range(0, len(stream), args.every):
            with log.open("a") as file:
                for row in stream[first : first + args.every]:
                    start = row["spans"][0][0]
                    parts = {
                        "prompt_token_ids": row["tokens"][:start],
                        "token_ids": row["tokens"][start:],
                    }
                    file.write(json.dumps(parts) + "\n")
            adapter.began = time.process_time()
            adapter.read()
            record = adapter.round()
            adapt.show(record, 1.0)
            if record["version"] != served:
                served = record["version"]
                drafter = load_drafter(str(output / adapt.CURRENT), adapter.target)
                figures = {name: it.replay(drafter) for name, it in held.items()}
            point = {"answers": adapter.state.read, "seconds": round(adapter.state.spent, 1)}
            point |= {
                key: record[key] for key in ("verdict", "version", "before", "after", "interval")
            }
            for name, rows in figures.items():
                point[name] = length(rows)
            print(point, flush=True)
            points.append(point)
            yield {"flags": setting, "points": points, "rows": figures}


def recovered(points: list[Json], level: float) -> Json | None:
    """The first point at which the domain's length has GOAL of a level."""
    return next((point for point in points if point["b"] >= GOAL * level), None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", required=True, help="trained on domain A")
    parser.add_argument("--data", required=True, help="data set of that training")
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="of answers and the new drafter, kept for later runs",
    )
    parser.add_argument("--recipe", default="configs/quickstart.yaml", help="of the new drafter")
    parser.add_argument("--steps", type=int, default=450, help="of its training")
    parser.add_argument(
        "--domain", choices=sorted({*DOMAINS} - {"general"}), default="spanish", help="B"
    )
    parser.add_argument("--answers", type=int, default=300, help="in the stream")
    parser.add_argument("--held", type=int, default=45, help="held-out answers of each domain")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        help="flags of drafttrain adapt, as one word; repeat it",
    )
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()

    # The first subjects are held out.
    kept_out = slice(5)
    stream = answer(
        args, args.domain, prompts(args.domain, slice(5, None), 1)[: args.answers], "default"
    )
    held_rows = {
        "a": answer(args, "held-general", prompts("general", kept_out, 2), "none"),
        "b": answer(args, f"held-{args.domain}", prompts(args.domain, kept_out, 2), "none"),
    }
    random.Random(3).shuffle(stream)
    new = args.folder / f"new-{args.domain}-{args.steps}"
    if not (new / "training.json").exists():
        keys = {
            "target": args.target,
            "data": args.folder / args.domain,
            "output_dir": new,
            "max_steps": args.steps,
        }
        run("train", args.recipe, *(f"{key}={value}" for key, value in keys.items()))

    target = Target.load(args.target, "auto", "cpu", False, "")
    sides: Json = {}
    rows: dict[str, dict[str, list[ReplayedRow]]] = {}
    for side, name in {"old": args.drafter, "new": str(new), "n-grams": "ngram"}.items():
        drafter = load_drafter(name, target)
        if side == "old":
            held = {
                key: Held(own[: args.held], target, drafter, args.max_new_tokens)
                for key, own in held_rows.items()
            }
        rows[side] = {key: it.replay(drafter) for key, it in held.items()}
        sides[side] = {key: length(own) for key, own in rows[side].items()}
        print(side, sides[side], flush=True)

    for setting in args.setting or [""]:
        print(f"== adapt {setting}", flush=True)
        for found in follow(args, setting.split(), stream, held):
            last = found.pop("rows")
            name = f"adapted {setting}".strip()
            sides[name] = {
                **{key: length(own) for key, own in last.items()},
                "over_new": over(last["b"], rows["new"]["b"]),
                "over_old": over(last["b"], rows["old"]["b"]),
                "kept": over(last["a"], rows["old"]["a"]),
                "recovered": recovered(found["points"], sides["new"]["b"]),
                **found,
            }
            # After each round, so that a run may be ended.
            held_out = {key: len(it.rows) for key, it in held.items()}
            more = {"answers": len(stream), "held_out": held_out, "spec": SPEC}
            ratio = next(it["over_new"][0] for it in sides.values() if "over_new" in it)
            write_result(args.output, ratio, GOAL, sides, torch.device("cpu"), **more)


if __name__ == "__main__":
    main()
