"""Where a decoding round's time goes, by part, with and without a drafter.

    python eval/profile_round.py --target smollm2-135m --drafter runs/quickstart/drafter --tree dynamic:3,4,8 \\
        --output eval/results/profile_smollm2-135m_cpu.json

Parts: target (body, and the head where one kernel computes both), head, draft steps (the drafter's forward while a tree
grows), tree building (what else proposing takes: top-k, choosing nodes), extend (the drafter reads what was committed),
verify (with sampling), commit (moving the accepted keys), snapshot (copies of a model's own cache, and the forwards that
move them on), rest (Python around it).
Milliseconds are means over all rounds after the prefill. `python` is the part of them outside the CPU kernels, whose sum has a
median over the rounds: a sequence's first round also reads its prompt.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from statistics import median
from typing import Any

from benchmark import result_path, write_result

from drafttrain.drafters.combined import CombinedDrafter
from drafttrain.drafters.common.layer_model import LayerDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter
from drafttrain.evaluation.suites import load_suite, take_evenly
from drafttrain.inference import SamplingParams, engine, generate
from drafttrain.ops.cpu_draft import DraftStep
from drafttrain.ops.native import _ARGUMENTS, cpu_kernels
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target import Target
from drafttrain.target.own_cache import CacheForm
from drafttrain.target.snapshots import SnapshotCache


class Parts:
    """Exclusive wall-clock time of wrapped functions: a part's time does not count in the part that called it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside: list[float] = []
        self._part = "rest"
        self.on = False
        self.kernels: defaultdict[str, float] = defaultdict(
            float
        )  # of the parts' seconds those in C kernels

    def wrap(self, owner: Any, attribute: str, part: str) -> None:
        function = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return function(*args, **kwargs)
            began = time.perf_counter()
            self._inside.append(0.0)
            before = self._part
            self._part = part
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - began
                self._part = before
                self.seconds[part] += spent - self._inside.pop()
                if self._inside:
                    self._inside[-1] += spent

        setattr(owner, attribute, timed)

    def wrap_kernels(self) -> None:
        """Adds up the time in C kernels, which also counts in the parts that call them."""
        for name in _ARGUMENTS:
            function = getattr(cpu_kernels(), name, None)
            if function is not None:
                setattr(cpu_kernels(), name, self._timed_kernel(function))

    def _timed_kernel(self, function: Any) -> Any:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            out = function(*args)
            self.kernels[self._part] += (time.perf_counter() - began) * self.on
            return out

        return timed


def profile(
    target: Target,
    drafter: Any,
    spec: str,
    sampling: SamplingParams,
    prompts: list[list[int]],
    count: int,
):
    parts = Parts()
    kernels = {name: getattr(cpu_kernels(), name, None) for name in _ARGUMENTS}
    parts.wrap_kernels()
    replaced = [(engine.Engine, name) for name in ("round", "_draft", "_read_pending")]
    replaced += [(TreeCache, "commit"), (SnapshotCache, "commit"), (SnapshotCache, "_move_on")]
    replaced += [(CacheForm, name) for name in ("copy", "row", "stack")]
    saved = [(owner, name, getattr(owner, name)) for owner, name in replaced]
    verify = engine.verify_batch
    owned = [(target, "score", "target"), (target, "head", "head")]
    stepping = drafter.main if isinstance(drafter, CombinedDrafter) else drafter
    if isinstance(stepping, LayerDrafter):
        owned += [(stepping, name, "draft steps") for name in ("advance", "grow_by_kernel")]
    read = DraftStep.read
    parts.wrap(DraftStep, "read", "draft steps")
    parts.wrap(engine.Engine, "_draft", "tree building")
    parts.wrap(engine.Engine, "_read_pending", "extend")
    parts.wrap(engine, "verify_batch", "verify")
    for owner, name in replaced[3:]:
        parts.wrap(owner, name, "commit" if name == "commit" else "snapshot")
    for owner, attribute, part in owned:
        parts.wrap(owner, attribute, part)
    inner = engine.Engine.round

    def timed_round(self: Any) -> Any:
        parts.on, kernel_seconds = True, sum(parts.kernels.values())
        began = time.perf_counter()
        news = list(inner(self))
        if news:
            spent = time.perf_counter() - began
            parts.seconds["round"] += spent
            python.append(spent - (sum(parts.kernels.values()) - kernel_seconds))
        parts.on = False
        return iter(news)

    engine.Engine.round = timed_round  # type: ignore[method-assign]
    tokens = rounds = 0
    python: list[float] = []  # seconds outside the kernels of each round
    try:
        for prompt in prompts:
            stats = generate(
                target,
                drafter,
                prompt,
                max_new_tokens=count,
                spec=TreeSpec.parse(spec),
                sampling=sampling,
                eos_ids=(),
            ).stats
            tokens = tokens + stats.new_tokens - 1
            rounds = rounds + stats.target_passes
    finally:
        for owner, name, method in saved:
            setattr(owner, name, method)
        engine.verify_batch = verify
        DraftStep.read = read  # type: ignore[method-assign]
        for name, function in kernels.items():
            if function is not None:
                setattr(cpu_kernels(), name, function)
        for owner, attribute, _ in owned:
            delattr(owner, attribute)
    means = {part: 1000 * seconds / rounds for part, seconds in parts.seconds.items()}
    whole = means.pop("round")
    means["rest"] = whole - sum(means.values())
    parts.kernels["all"] = sum(parts.kernels.values())
    return {
        "ms_per_round": {
            **{part: round(ms, 3) for part, ms in means.items()},
            "all": round(whole, 3),
        },
        "python": {
            part: round(ms - 1000 * parts.kernels[part] / rounds, 3)
            for part, ms in (*means.items(), ("all", whole))
        },
        "python_median": round(1000 * median(python), 3),
        "accepted_length": round(tokens / rounds, 3),
        "ms_per_token": round(whole * rounds / tokens, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m", help="short name, folder or Hub id")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--tree", action="append", required=True, help="repeat it for several")
    parser.add_argument("--suite", default="drafttrain")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    target = Target.load(args.target, args.dtype, args.device).pack()
    drafter = load_drafter(args.drafter, target)
    questions = take_evenly(load_suite(args.suite).questions, args.prompts)
    prompts = [question.prompt(target.tokenizer) for question in questions]
    sampling = SamplingParams(args.temperature)
    generate(
        target,
        drafter,
        prompts[0],
        max_new_tokens=8,
        spec=TreeSpec.parse(args.tree[0]),
        sampling=sampling,
    )
    sides = {"plain": profile(target, None, "none", sampling, prompts, args.tokens)}
    for tree in args.tree:
        sides[tree] = profile(target, drafter, tree, sampling, prompts, args.tokens)
    for name, side in sides.items():
        print(name, side)
    best = min(side["ms_per_token"] for name, side in sides.items() if name != "plain")
    write_result(
        args.output,
        sides["plain"]["ms_per_token"] / best,
        1.6,
        sides,
        target.device,
        dtype=args.dtype,
    )


if __name__ == "__main__":
    main()
