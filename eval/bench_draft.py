"""Seconds of drafting in a round, by kind, on a CPU: reading two committed tokens, then a greedy tree.

    python eval/bench_draft.py --target smollm2-135m --vocabulary 8192 --output eval/results/draft_cpu.json

Sides: `kernels`, as shipped; `modules`, packed layers and linear layers called one by one, with full logits; `torch`, the
drafter as trained. Weights are random, which costs the same. Between rounds a pass over --flush MB takes the place of the
target's, which leaves nothing of the drafter in the caches. `heads` compares full logits with draft heads, by vocabulary.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from benchmark import result_path, write_result

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import kind_class, prepare
from drafttrain.ops.cpu_draft import DraftHead
from drafttrain.ops.packing import pack_panels, round_to_int8, skinny_linear
from drafttrain.ops.sampling import top_log_probs
from drafttrain.target import Target

KINDS = (
    "eagle3",
    "eagle1",
    "mtp",
    "peagle",
    "dflash",
    "dspark",
    "medusa",
    "hydra",
    "mlp_speculator",
)
# of the prompt, and committed in a round
TOKENS = 60
NEW = 2


class Side:
    """Rounds of one drafter in one of its forms. seconds: of each."""

    def __init__(self, form: str, kind: str, target: Target, size: int, batch: int, tree: str):
        torch.manual_seed(0)
        self.drafter: Any = kind_class(kind).begin(
            target, "random", {"draft_vocab_size": size}, "kl", torch.arange
        )
        self.drafter.eval()
        if form != "torch":
            self.drafter.fresh = True  # as loaded
            prepare(self.drafter, target)
        self.drafter.bind(target)
        if form == "modules" and kind in ("dflash", "dspark"):
            self.drafter.draft_step = None
        elif form == "modules":
            self.drafter.draft_steps = ()
        self.form, self.spec, self.seconds = form, TreeSpec.parse(tree), list[float]()
        ids = torch.randint(
            target.vocab_size, (batch, TOKENS), generator=torch.Generator().manual_seed(1)
        )
        features = [
            target.forward(row[None], self.drafter.feature_layers).features[0] for row in ids
        ]
        self.sessions = [self.drafter.start(row[:1], 4 * TOKENS) for row in ids]
        before = slice(0, -1 - NEW)
        self.extend([row[1:][before] for row in ids], [part[:-1][before] for part in features])
        self.new = [row[-NEW:] for row in ids], [part[-1 - NEW : -1] for part in features]

    def extend(self, tokens: list[torch.Tensor], features: list[torch.Tensor]) -> None:
        self.drafter.extend_all(self.sessions, tokens, features)

    def round(self) -> None:
        held = [session.length for session in self.sessions]
        with mock.patch.object(
            DraftHead, "of", (lambda _: None) if self.form != "kernels" else DraftHead.of
        ):
            began = time.perf_counter()
            self.extend(*self.new)
            count = len(self.sessions)
            self.drafter.propose_all(self.sessions, self.spec, [None] * count)
            self.seconds.append(time.perf_counter() - began)
        for session, length in zip(self.sessions, held, strict=True):
            session.cache.lengths[0] = length


def milliseconds(seconds: list[float]) -> float:
    return round(1000 * statistics.median(seconds[2:]), 3)


def timed(run: Callable[[], object], flush: torch.Tensor, repeats: int) -> float:
    """Median milliseconds of a call whose weights come from memory."""
    seconds = []
    for _ in range(repeats + 2):
        flush.add_(1.0)
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return milliseconds(seconds)


def heads(target: Target, flush: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Milliseconds of the top 4 tokens of 1 and 4 states, by full int8 logits and by draft heads, from memory."""
    rows = target.head_weight.float()
    states = torch.randn(4, rows.shape[1])
    found = dict[str, Any]()
    for size in sorted({min(size, len(rows)) for size in (8192, 32768, len(rows))}):
        weight = rows[:size].contiguous()
        head = DraftHead(weight)
        panels = pack_panels(round_to_int8(weight))
        for count in (1, 4):
            times = {
                name: timed(partial(run, states[:count].contiguous()), flush, repeats)
                for name, run in (
                    (
                        "full",
                        lambda own, panels=panels, size=size: top_log_probs(
                            skinny_linear(own, panels, size), 4
                        ),
                    ),
                    ("draft_head", lambda own, head=head: head.top(own, 4)),
                )
            }
            found[f"{size} words, {count} states"] = times
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m", help="short name, folder or Hub id")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--tree", action="append", help="default: chain:3 and dynamic:4,4,8")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--flush", type=int, default=128, help="MB")
    parser.add_argument("--no-torch", action="store_true", help="leave out the drafter as trained")
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    target = Target.load(args.target, "bfloat16", "cpu").pack()
    flush = torch.zeros(args.flush * 2**18)
    sides = dict[str, Any]()
    ratios = list[float]()
    forms = ("kernels", "modules") if args.no_torch else ("kernels", "modules", "torch")
    for kind in args.kinds:
        for batch in args.batch:
            for tree in args.tree or ("chain:3", "dynamic:4,4,8"):
                made = [Side(form, kind, target, args.vocabulary, batch, tree) for form in forms]
                for _ in range(args.repeats + 2):
                    for side in made:
                        flush.add_(1.0)
                        side.round()
                ms = {side.form: milliseconds(side.seconds) for side in made}
                sides[f"{kind} {tree} x{batch}"] = ms
                ratios.append(ms["modules"] / ms["kernels"])
                print(f"{kind} {tree} x{batch}", ms, f"{ratios[-1]:.2f}x", flush=True)
    sides["heads"] = heads(target, flush, args.repeats)
    print(sides["heads"])
    write_result(
        args.output, statistics.geometric_mean(ratios), 1.0, sides, target.device, dtype="bfloat16"
    )


if __name__ == "__main__":
    main()
