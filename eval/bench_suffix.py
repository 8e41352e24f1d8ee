"""Kinds without weights on streams of requests: what each accepts at equal trees and at its best one, and its speed.

    python eval/bench_suffix.py --target smollm2-135m --suites agentic drafttrain --store runs/store.safetensors \
        --dtype bfloat16 --output eval/results/suffix_smollm2-135m_cpu.json

The target answers every turn once, plainly. Accepted lengths are then replayed exactly: what most such kinds propose depends on
committed tokens only. For those that learn from passes, turns are decoded. The prompts of a suite arrive in its order, as at a
server, so drafters with a memory may know answers to earlier ones; nothing else is carried from suite to suite. Intervals
resample conversations. `rate` is tokens per plain step: accepted tokens over the costs of the passes, by the cost of a pass of
each size, which is measured first. With --timed N, the first turns of N conversations of each suite are decoded with each
drafter's best tree, interleaved.

The headline is the rate of --drafter over that of --against on the first suite, each with its best tree.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from benchmark import alternate, result_path, write_result

from drafttrain.batch import TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter
from drafttrain.evaluation.resampling import draws, ends
from drafttrain.evaluation.suites import load_suite, take_evenly
from drafttrain.inference import Decoder
from drafttrain.target import Target
from drafttrain.tuning.replay import measure_costs

GOAL = 1.3


@dataclass
class Turn:
    """A recorded turn: conversation and category, prompt [L] and answer."""

    conversation: int
    category: str
    prompt: list[int]
    answer: list[int]


def record(target: Target, suite: str, limit: int | None, count: int) -> list[Turn]:
    """Plain greedy answers to all turns, conversation after conversation."""
    questions = take_evenly(load_suite(suite).questions, limit)
    decoder = Decoder(target, None)
    answers: list[list[str]] = [[] for _ in questions]
    turns = []
    for turn in range(max(len(question.turns) for question in questions)):
        here = [i for i, question in enumerate(questions) if turn < len(question.turns)]
        prompts = [questions[i].prompt(target.tokenizer, answers[i]) for i in here]
        for i, prompt, made in zip(
            here, prompts, decoder.generate(prompts, max_new_tokens=count), strict=True
        ):
            answers[i].append(target.tokenizer.decode(made.tokens, skip_special_tokens=True))
            turns.append((i, turn, Turn(i, questions[i].category, prompt, made.tokens)))
    return [each for _, _, each in sorted(turns, key=lambda entry: entry[:2])]


def replay(drafter: Any, turn: Turn, spec: TreeSpec, costs: dict[int, float]) -> np.ndarray:
    """Committed tokens, passes, nodes and cost in plain steps of one turn, [4]."""
    prompt = torch.tensor(turn.prompt)
    answer = turn.answer
    session = drafter.start(prompt, len(prompt) + len(answer))
    session.extend(torch.cat((prompt[1:], torch.tensor(answer[:1]))), torch.empty(len(prompt), 0))
    sums = np.zeros(4)
    at = 0
    while at + 1 < len(answer):
        left = len(answer) - at - 1
        tree = session.propose(spec).prune(left - 1) if left > 1 else TokenTree.empty()
        done = min(tree.match(answer[at + 1 :]) + 1, left)
        sums += (done, 1, len(tree), np.interp(len(tree), list(costs), list(costs.values())))
        session.extend(torch.tensor(answer[at + 1 : at + 1 + done]), torch.empty(done, 0))
        at += done
    return sums


def decode(
    target: Target, drafter: Any, turn: Turn, spec: TreeSpec, costs: dict[int, float]
) -> np.ndarray:
    """As `replay`, by decoding the turn."""
    decoder = Decoder(target, drafter, spec=spec)
    sums = np.zeros(4)

    def count(_index: int, tree: TokenTree, verdict: Any, _logits: torch.Tensor) -> None:
        sums[:] += (
            len(verdict.tokens),
            1,
            len(tree),
            np.interp(len(tree), list(costs), list(costs.values())),
        )

    decoder.observer = count
    made = decoder.generate([turn.prompt], max_new_tokens=len(turn.answer))[0]
    if made.tokens != turn.answer:
        raise SystemExit("a drafter changed an answer")
    return sums


def figures(rows: list[tuple[Turn, np.ndarray]]) -> dict[str, Any]:
    """Accepted length and rate with intervals over conversations, and nodes per pass."""
    by: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros(4))
    for turn, sums in rows:
        by[turn.conversation] += sums
    sums = np.array(list(by.values()))  # [c, 4]
    drawn = sums[draws(len(sums))].sum(1)  # [r, 4]
    total = sums.sum(0)

    def share(above: int, below: int) -> tuple[float, list[float]]:
        spread = ends(drawn[:, above] / drawn[:, below], len(sums))
        return round(float(total[above] / total[below]), 3), [round(end, 3) for end in spread]

    (length, length_ends), (rate, rate_ends) = share(0, 1), share(0, 3)
    return {"accepted_length": length, "accepted_length_interval": length_ends, "rate": rate, "rate_interval": rate_ends,
            "nodes": round(float(total[2] / total[1]), 2), "conversations": len(sums), "tokens": int(total[0])}  # fmt: skip


def compare(
    target: Target, args: argparse.Namespace, turns: list[Turn], costs: dict[int, float]
) -> dict[str, Any]:
    """Figures per drafter and tree, overall and per category."""
    sides: dict[str, Any] = {}
    for name in args.drafters:
        cells = {}
        for tree in args.trees:
            drafter = load_drafter(name, target)
            spec = TreeSpec.parse(tree)
            run = partial(decode, target) if drafter.predictions or drafter.probes else replay
            rows = [
                (turn, run(drafter, turn, spec, costs)) for turn in turns if len(turn.answer) > 1
            ]
            categories = sorted({turn.category for turn, _ in rows})
            parts = {c: figures([row for row in rows if row[0].category == c]) for c in categories}
            cells[tree] = {**figures(rows), "categories": parts}
        best = max(cells, key=lambda tree: cells[tree]["rate"])
        sides[name] = {"best": best, "trees": cells}
        print(
            f"{name}: {best}, accepted {cells[best]['accepted_length']}, rate {cells[best]['rate']}",
            flush=True,
        )
    return sides


def timed(
    target: Target, args: argparse.Namespace, turns: list[Turn], sides: dict[str, Any]
) -> dict[str, Any]:
    """Seconds of the first turns of --timed conversations, plainly and by each drafter, in turn; medians of the ratios."""
    firsts = {turn.conversation: turn for turn in reversed(turns)}
    some = [firsts[key] for key in sorted(firsts)][:: max(1, len(firsts) // args.timed)][
        : args.timed
    ]
    trees = {"none": "none"} | {name: side["best"] for name, side in sides.items()}

    def seconds(name: str) -> float:
        # Loaded again for every run: a memory would know the answers from the run before.
        decoder = Decoder(target, load_drafter(name, target), spec=TreeSpec.parse(trees[name]))
        made = [
            decoder.generate([turn.prompt], max_new_tokens=args.max_new_tokens)[0] for turn in some
        ]
        if any(each.tokens != turn.answer for each, turn in zip(made, some, strict=True)):
            raise SystemExit("a drafter changed an answer")
        return sum(each.stats.total_seconds - each.stats.prefill_seconds for each in made)

    runs = alternate({name: lambda name=name: seconds(name) for name in trees}, args.repeats)
    return {
        name: round(median(a / b for a, b in zip(runs["none"], runs[name], strict=True)), 3)
        for name in sides
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", default="smollm2-135m")
    add("--suites", nargs="+", default=["agentic", "drafttrain"], help="as for drafttrain eval")
    add(
        "--store", default="", help="file of drafttrain ngram-store: adds the drafters that read it"
    )
    add("--drafters", nargs="+", default=["ngram", "suffix", "suffix:memory=100000", "token_recycling",
                                           "token_recycling+ngram", "token_recycling:memory=200000+ngram"])  # fmt: skip
    add("--trees", nargs="+", default=["chain:3", "chain:8", "dynamic:8,4,8", "dynamic:16,4,16",
                                       "dynamic:31,4,31@stop=0.1", "dynamic:31,4,31@stop=0.2"])  # fmt: skip
    add("--limit", type=int)
    add("--max-new-tokens", type=int, default=160)
    add("--dtype", default="auto")
    add("--timed", type=int, default=0, metavar="N")
    add("--repeats", type=int, default=5)
    add("--output", type=result_path, default=None)
    args = parser.parse_args()
    if args.store:
        args.drafters += [f"suffix:{args.store}", f"suffix:{args.store},memory=100000"]
    target = Target.from_pretrained(args.target, dtype=args.dtype).pack()
    prompts = [
        question.prompt(target.tokenizer) for question in load_suite("drafttrain").questions[:3]
    ]
    model = measure_costs(
        target, load_drafter(args.drafters[0], target), prompts, Decoder(target, None).sampling, 64
    )
    costs = {nodes: seconds / model.verify[0] for nodes, seconds in model.verify.items()}
    suites: dict[str, Any] = {}
    for suite in args.suites:
        turns = record(target, suite, args.limit, args.max_new_tokens)
        print(f"{suite}: {len(turns)} turns")
        sides = compare(target, args, turns, costs)
        for name, ratio in (timed(target, args, turns, sides) if args.timed else {}).items():
            sides[name]["measured_speedup"] = ratio
        suites[suite] = sides
    first = suites[args.suites[0]]
    rates = [
        first[name]["trees"][first[name]["best"]]["rate"]
        for name in (args.drafters[-1], args.drafters[0])
    ]
    more = {
        "suites": suites,
        "costs": {str(nodes): round(cost, 3) for nodes, cost in costs.items()},
    }
    write_result(args.output, rates[0] / rates[1], GOAL, first, target.device, **more)


if __name__ == "__main__":
    main()
