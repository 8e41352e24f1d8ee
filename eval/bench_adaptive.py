"""What adaptive speculation costs where the drafter is useless, and what it keeps where the drafter is good.

The sides answer the same prompts, interleaved: plain decoding, fixed trees, the first of them with @adapt, and (with --random)
that tree, fixed and with @adapt, on a drafter of random weights of the drafter's own shape. Decoders persist between prompts, as
a server's do; the random drafter's decoder is new in every repeat, so that the cost of adapting is part of the figure.

    python eval/bench_adaptive.py --target smollm2-135m --drafter runs/quickstart/drafter --tree dynamic:3,4,8 \
        --others dynamic:2,4,4 chain:2 --batch-size 1 --dtype bfloat16 --output eval/results/adaptive_smollm2-135m_cpu.json

The headline is the rate of @adapt over that of the best fixed tree, plain decoding among them, with its 95 % interval over
prompts (paired; the median of the repeats); the goal of 0.97 is "never slower by more than 3 %". `random`: the same with
the random drafter against plain decoding.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from benchmark import alternate, result_path, write_result

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter, load_trained
from drafttrain.evaluation.suites import load_suite, take_evenly
from drafttrain.inference import Decoder
from drafttrain.target import Target
from drafttrain.tuning.tune import Timings

GOAL = 0.97


def randomised(name: str, target: Target) -> Any:
    """The drafter with noise for weights, loaded as it is: its drafting takes as long, and almost no token is accepted."""
    useless = load_trained(name)
    generator = torch.Generator().manual_seed(0)
    for parameter in useless.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * parameter.float().std().cpu()
        parameter.data.copy_(noise.to(parameter))
    with tempfile.TemporaryDirectory() as folder:
        useless.save_pretrained(folder)
        return load_drafter(folder, target)


def answer(decoder: Decoder, batches: list[list[list[int]]], count: int) -> dict[str, Any]:
    made = []
    each = []
    for batch in batches:
        begun = time.perf_counter()
        made += [one.stats for one in decoder.generate(batch, max_new_tokens=count)]
        each.append(round(time.perf_counter() - begun, 5))
    seconds = sum(each)
    tokens = sum(stats.new_tokens for stats in made)
    passes = sum(stats.target_passes for stats in made)
    return {
        "seconds": each,
        "tokens_per_second": round(tokens / seconds, 3),
        "accepted_length": round((tokens - len(made)) / passes, 3),
        "drafting_rounds": round(
            sum(offered > 0 for stats in made for offered in stats.offered) / passes, 3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m", help="short name, folder or Hub id")
    parser.add_argument("--drafter", required=True, help="a trained drafter's folder")
    parser.add_argument("--tree", default="dynamic:3,4,8", help="the tree that @adapt starts from")
    parser.add_argument("--others", nargs="*", default=[], help="further fixed trees")
    parser.add_argument(
        "--random",
        action="store_true",
        help="also a drafter of random weights; needs one that is a folder",
    )
    parser.add_argument("--suite", default="drafttrain")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    target = Target.load(args.target, args.dtype, args.device).pack()
    drafter: Any = load_drafter(args.drafter, target)
    questions = take_evenly(load_suite(args.suite).questions, args.prompts)
    prompts = [question.prompt(target.tokenizer) for question in questions]
    batches = [prompts[i : i + args.batch_size] for i in range(0, len(prompts), args.batch_size)]

    def side(own: Any, tree: str) -> Callable[[], dict[str, Any]]:
        spec = TreeSpec.parse(tree)
        decoder = Decoder(target, own, spec=spec, eos_ids=(), max_rows=args.batch_size)
        return lambda: answer(decoder, batches, args.tokens)

    adaptive = f"{args.tree}@adapt"
    sides = {tree: side(drafter, tree) for tree in ("none", args.tree, *args.others, adaptive)}
    if args.random:
        useless = randomised(args.drafter.partition("+")[0], target)
        sides |= {
            f"random {tree}": lambda tree=tree: side(useless, tree)()  # type: ignore[misc]
            for tree in (args.tree, adaptive)
        }
    runs = alternate(sides, args.repeats)
    names = list(runs)
    seconds = np.median(
        [[run["seconds"] for run in runs[name]] for name in names], axis=1
    )  # [sides, batches]
    timings = Timings(
        np.full(seconds.shape, args.tokens * args.batch_size, float), seconds, seconds
    )
    rates = {name: round(timings.rate(i), 3) for i, name in enumerate(names)}
    best = max(
        (tree for tree in names if "adapt" not in tree and "random" not in tree),
        key=lambda tree: rates[tree],
    )

    def over(name: str, other: str) -> dict[str, Any]:
        return {"over": other, **timings.ratio(names.index(name), names.index(other))._asdict()}

    kept = over(adaptive, best)
    print(f"tokens/s: {rates}\n{adaptive}: {kept}")
    write_result(
        args.output,
        kept["value"],
        GOAL,
        {name: {"tokens_per_second": rates[name], "runs": side} for name, side in runs.items()},
        target.device,
        kept=kept,
        random=over(f"random {adaptive}", "none") if args.random else None,
        speedup=over(adaptive, "none"),
        tree=args.tree,
        dtype=args.dtype,
        prompts=len(prompts),
        batch_size=args.batch_size,
        tokens=args.tokens,
    )


if __name__ == "__main__":
    main()
