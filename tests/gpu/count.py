"""Synchronizations and torch calls of a decoding round, by source line, on a pretend GPU.

    python -m tests.gpu.count --kind eagle3 --tree dynamic:4,4,8 --batch 8     # a kind, or all of them without --kind
    python -m tests.gpu.count --tree chain:5 --lines 0                         # a line per kind

The drafter is as training begins it, for a tiny target. Rounds that read the prompt, capture a graph or end a sequence are left
out, so what is printed is what every round of a long answer costs the host. A replayed graph is one call.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from drafttrain.drafters.combined import CombinedDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import kind_class, untrained
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.inference.engine import Engine
from drafttrain.target import Target
from tests.drafters import test_contract as contract
from tests.gpu.pretend import PretendGpu

COMBINED = "eagle3+ngram"
DECODERS = [*contract.KINDS, COMBINED]


def drafter_of(kind: str, trained: bool = False) -> Any:
    """A drafter of the kind on the CPU, bound to the contract tests' target; trained: overfitted on its answers."""
    if kind == COMBINED:
        side = untrained("ngram", beside=True)
        side.bind(contract.the_target())
        return CombinedDrafter(drafter_of("eagle3", trained), side)
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
        held = {id(base): base, id(base.model): base.model}  # `bind` replaces what the drafter holds of its target
        drafter = copy.deepcopy(drafter, held).to(target.device)
    else:
        drafter = copy.copy(drafter)
    drafter.bind(target)
    return drafter


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
        syncs, calls, captures, before = Counter(gpu.syncs), Counter(gpu.calls), gpu.captures, len(engine.active)
        news = list(inner(engine))
        if before:
            whole = gpu.captures == captures and len(engine.active) == before
            counted.append((gpu.syncs - syncs, gpu.calls - calls, whole))
        return iter(news)

    sampling = SamplingParams(temperature)
    decoder = Decoder(
        target, drafter, spec=TreeSpec.parse(tree), sampling=sampling, eos_ids=(), max_rows=batch, graphs=True
    )
    prompts = [[*contract.PROMPTS[i % len(contract.PROMPTS)], i] for i in range(batch)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "round", round_)
        for _ in range(2):  # the first run captures
            counted.clear()
            decoder.generate(prompts, max_new_tokens=10)
    kept = [(syncs, calls) for syncs, calls, whole in counted[1:] if whole]
    if not kept:
        raise RuntimeError(f"no round of {tree} at batch {batch} without a capture or the end of a sequence")
    syncs, calls = (sum(parts, Counter()) for parts in zip(*kept, strict=True))
    return Rounds(*({line: n / len(kept) for line, n in one.most_common()} for one in (syncs, calls)), len(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=DECODERS, help="all unless given; repeat it for several")
    parser.add_argument("--tree", action="append", help="repeat it for several; chain:5 and dynamic:4,4,8 unless given")
    parser.add_argument("--batch", type=int, action="append", help="sequences at a time; 1 and 8 unless given")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--lines", type=int, default=15, help="lines of the source to print per count")
    args = parser.parse_args()
    torch.set_num_threads(1)
    drafters = {kind: drafter_of(kind) for kind in args.kind or DECODERS}
    with PretendGpu() as gpu:
        target = moved_target()
        for kind, drafter in drafters.items():
            for tree in args.tree or ("chain:5", "dynamic:4,4,8"):
                for batch in args.batch or (1, 8):
                    made = count_rounds(gpu, target, moved(drafter, target), tree, batch, args.temperature)
                    syncs, calls = made.total
                    print(
                        f"{kind:16} {tree:16} batch {batch}: {syncs:6.1f} syncs, {calls:7.1f} torch calls a round",
                        flush=True,
                    )
                    for name, lines in (("syncs", made.syncs), ("calls", made.calls)):
                        for line, n in list(lines.items())[: args.lines]:
                            print(f"    {n:7.1f} {name}  {line}")


if __name__ == "__main__":
    main()
