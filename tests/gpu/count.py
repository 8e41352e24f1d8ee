"""Synchronizations and torch calls of a decoding round, by source line, on a pretend GPU.

    python -m tests.gpu.count --kind eagle3 --tree dynamic:4,4,8 --batch 8     # a kind, or all of them without --kind
    python -m tests.gpu.count --tree chain:5 --lines 0                         # a line per kind
    python -m tests.gpu.count --training                                       # waits of a training step instead
    python -m tests.gpu.count --budgets                                        # write tests/gpu/budgets.json from today's counts

The drafter is as training begins it, for a tiny target. Rounds that read the prompt, capture a graph or end a sequence are left
out, so what is printed is what every round of a long answer costs the host. A replayed graph is one call.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import has_gpu

if not has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from drafttrain.batch import Batch, StepOutput
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.combined import CombinedDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import kind_class, untrained
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.inference.engine import Engine
from drafttrain.states.source import TargetSource
from drafttrain.target import Target
from tests.drafters import contract
from tests.files import load_json
from tests.gpu.pretend import PretendGpu

BUDGETS = Path(__file__).with_name("budgets.json")
TREES = ("chain:5", "dynamic:4,4,8")
COMBINED = "eagle3+ngram"
DECODERS = [*contract.KINDS, COMBINED]


def drafter_of(kind: str, trained: bool = False) -> Any:
    """A drafter of the kind on the CPU, bound to the contract tests' target; trained: overfitted on its answers."""
    if kind == COMBINED:
        side = untrained("ngram", beside=True)
        side.bind(contract.the_target())
        return CombinedDrafter(drafter_of("eagle3", trained), side)
    torch.manual_seed(0)  # rounds differ by what is accepted
    if kind_class(kind).trainable:
        return contract.overfitted(kind)[0] if trained else contract.build(kind).eval()
    drafter = untrained(kind)
    drafter.bind(contract.the_target())
    return drafter


def moved_target(device: str = "cuda", dtype: torch.dtype = torch.float32) -> Target:
    """The contract tests' target on another device."""
    base = contract.the_target()
    model = copy.deepcopy(base.model).to(device, dtype)  # type: ignore[call-overload]
    return Target.wrap(model, base.tokenizer, name=base.name, dtype=dtype)


def moved(drafter: Any, target: Target) -> Any:
    """A copy of the drafter on the target's device and bound to it."""
    if isinstance(drafter, CombinedDrafter):
        return CombinedDrafter(moved(drafter.main, target), moved(drafter.side, target))
    if isinstance(drafter, torch.nn.Module):
        base = contract.the_target()
        held = {
            id(base): base,
            id(base.model): base.model,
        }  # `bind` replaces what the drafter holds of its target
        drafter = copy.deepcopy(drafter, held).to(target.device)
    else:
        drafter = copy.copy(drafter)
    drafter.bind(target)
    return drafter


def training_batch() -> Batch:
    """The target's answers to the contract tests' prompts."""
    return contract.rows_of(list(zip(contract.PROMPTS, contract.answers(), strict=True)))


def training_step(drafter: Any, target: Target, batch: Batch, autocast: bool = False) -> StepOutput:
    """Forward and backward of one step, the target online; autocast: products in bfloat16, weights stay float32."""
    source = TargetSource(target, drafter.feature_layers, drafter.kept_ids)
    torch.manual_seed(7)  # of kinds that draw noise
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        features, rows, row_of = source(batch)
        step = drafter(
            StepInputs(batch, target.embed(batch.input_ids), features, rows, row_of, total=20)
        )
    step.loss.backward()
    return step


@cache
def budgets() -> Any:
    """What the tests allow: {"rounds": {kind: {tree: {batch: {"syncs", "calls"}}}}, "training": {kind: syncs}}."""
    return load_json(BUDGETS)


class Rounds(NamedTuple):
    """What rounds cost. syncs, calls: per round, by line; rounds: how many were counted."""

    syncs: dict[str, float]
    calls: dict[str, float]
    rounds: int

    @property
    def total(self) -> tuple[float, float]:
        """Synchronizations and torch calls of a round."""
        return sum(self.syncs.values()), sum(self.calls.values())


def count_rounds(
    gpu: PretendGpu, target: Target, drafter: Any, tree: str, batch: int, temperature: float = 0.0
) -> Rounds:
    """Counts the rounds of a batch; see above for those that are left out."""
    counted: list[tuple[Counter[str], Counter[str], int]] = []
    inner = Engine.round

    def round_(engine: Engine) -> Iterator[Any]:
        syncs = Counter(gpu.syncs)
        calls = Counter(gpu.calls)
        captures = gpu.captures
        before = len(engine.active)
        news = list(inner(engine))
        if before:
            whole = gpu.captures == captures and len(engine.active) == before
            counted.append((gpu.syncs - syncs, gpu.calls - calls, whole))
        return iter(news)

    sampling = SamplingParams(temperature)
    decoder = Decoder(
        target,
        drafter,
        spec=TreeSpec.parse(tree),
        sampling=sampling,
        eos_ids=(),
        max_rows=batch,
        graphs=True,
    )
    prompts = [[*contract.PROMPTS[i % len(contract.PROMPTS)], i] for i in range(batch)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "round", round_)
        for _ in range(2):  # the first run captures
            counted.clear()
            decoder.generate(prompts, max_new_tokens=10)
    kept = [(syncs, calls) for syncs, calls, whole in counted[1:] if whole]
    if not kept:
        raise RuntimeError(
            f"no round of {tree} at batch {batch} without a capture or the end of a sequence"
        )
    syncs, calls = (sum(parts, Counter()) for parts in zip(*kept, strict=True))
    return Rounds(
        *({line: n / len(kept) for line, n in one.most_common()} for one in (syncs, calls)),
        len(kept),
    )


def _show(name: str, counts: dict[str, float], lines: int) -> None:
    for line, n in list(counts.items())[:lines]:
        print(f"    {n:7.1f} {name}  {line}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kind", action="append", choices=DECODERS, help="all unless given; repeat it for several"
    )
    parser.add_argument(
        "--tree", action="append", help=f"repeat it for several; {' and '.join(TREES)} unless given"
    )
    parser.add_argument(
        "--batch", type=int, action="append", help="sequences at a time; 1 and 8 unless given"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--lines", type=int, default=15, help="lines of the source to print per count"
    )
    parser.add_argument("--training", action="store_true", help="training steps instead of rounds")
    parser.add_argument(
        "--budgets",
        action="store_true",
        help="all kinds, both; writes the table that the tests read",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    drafters = {kind: drafter_of(kind) for kind in args.kind or DECODERS}
    batch = training_batch()
    rounds = {}
    training = {}
    with PretendGpu() as gpu:
        target = moved_target()
        for kind, drafter in drafters.items() if args.training or args.budgets else ():
            if kind in contract.TRAINED:
                on_gpu = moved(drafter, target).train()
                gpu.reset()
                training_step(on_gpu, target, batch.to(target.device), autocast=True)
                training[kind] = sum(gpu.syncs.values())
                print(
                    f"{kind:16} training step: {training[kind]:3} syncs, {sum(gpu.calls.values())} torch calls",
                    flush=True,
                )
                _show("syncs", dict(gpu.syncs.most_common()), args.lines)
        for kind, drafter in drafters.items() if args.budgets or not args.training else ():
            rounds[kind] = {tree: {} for tree in args.tree or TREES}
            for tree, by_batch in rounds[kind].items():
                for size in args.batch or (1, 8):
                    made = count_rounds(
                        gpu, target, moved(drafter, target), tree, size, args.temperature
                    )
                    syncs, calls = made.total
                    by_batch[size] = {"syncs": round(syncs, 1), "calls": round(calls)}
                    print(
                        f"{kind:16} {tree:14} batch {size}: {syncs:6.1f} syncs, {calls:7.1f} torch calls a round",
                        flush=True,
                    )
                    _show("syncs", made.syncs, args.lines)
                    _show("calls", made.calls, args.lines)
    if args.budgets:
        BUDGETS.write_text(json.dumps({"rounds": rounds, "training": training}, indent=1) + "\n")


if __name__ == "__main__":
    main()
