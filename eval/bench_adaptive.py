"""What adaptive speculation costs where the drafter is useless, and what it keeps where the drafter is good.

Four sides answer the same prompts, interleaved: plain decoding, the given tree, the same tree with @adapt, and the tree with
@adapt on a drafter of random weights (the drafter's own shape). Decoders persist between prompts, as a server's do; the random
drafter's decoder is new in every repeat, so that the cost of adapting is part of the figure.

    python eval/bench_adaptive.py --target smollm2-135m --drafter runs/quickstart/drafter --tree dynamic:3,4,8 \
        --dtype bfloat16 --output eval/results/adaptive_smollm2-135m_cpu.json

The headline is plain time over adaptive time with the random drafter; the goal of 0.97 is "never slower by more than 3 %".
`kept` is adaptive speed over the fixed tree's with the drafter itself.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from benchmark import alternate, median, result_path, write_result

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter, load_trained
from drafttrain.evaluation.suites import load_suite, take_evenly
from drafttrain.inference import Decoder
from drafttrain.target import Target

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


def answer(decoder: Decoder, prompts: list[list[int]], count: int) -> dict[str, Any]:
    made = [decoder.generate([prompt], max_new_tokens=count)[0].stats for prompt in prompts]
    seconds = sum(stats.total_seconds for stats in made)
    tokens = sum(stats.new_tokens for stats in made)
    passes = sum(stats.target_passes for stats in made)
    return {
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 3),
        "accepted_length": round((tokens - len(made)) / passes, 3),
        "drafting_rounds": round(sum(offered > 0 for stats in made for offered in stats.offered) / passes, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="short name, folder or Hub id")
    parser.add_argument("--drafter", required=True, help="a trained drafter's folder")
    parser.add_argument("--tree", default="dynamic:3,4,8")
    parser.add_argument("--suite", default="drafttrain")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    target = Target.load(args.target, args.dtype, args.device).pack()
    drafter: Any = load_drafter(args.drafter, target)
    useless = randomised(args.drafter, target)
    questions = take_evenly(load_suite(args.suite).questions, args.prompts)
    prompts = [question.prompt(target.tokenizer) for question in questions]
    fixed, adaptive = TreeSpec.parse(args.tree), TreeSpec.parse(f"{args.tree}@adapt")
    plain, with_tree, with_pace = (
        Decoder(target, own, spec=spec, eos_ids=())
        for own, spec in ((None, fixed), (drafter, fixed), (drafter, adaptive))
    )
    runs = alternate(
        {
            "plain": lambda: answer(plain, prompts, args.tokens),
            "fixed": lambda: answer(with_tree, prompts, args.tokens),
            "adaptive": lambda: answer(with_pace, prompts, args.tokens),
            "random_fixed": lambda: answer(Decoder(target, useless, spec=fixed, eos_ids=()), prompts, args.tokens),
            "random_adaptive": lambda: answer(
                Decoder(target, useless, spec=adaptive, eos_ids=()), prompts, args.tokens
            ),
        },
        args.repeats,
    )
    rates = {name: median(side, "tokens_per_second") for name, side in runs.items()}
    print(f"tokens/s: {rates}")
    write_result(
        args.output,
        rates["random_adaptive"] / rates["plain"],
        GOAL,
        {name: {"tokens_per_second": rates[name], "runs": side} for name, side in runs.items()},
        target.device,
        kept=round(rates["adaptive"] / rates["fixed"], 3),
        speedup=round(rates["adaptive"] / rates["plain"], 3),
        tree=args.tree,
        dtype=args.dtype,
        prompts=len(prompts),
        tokens=args.tokens,
    )


if __name__ == "__main__":
    main()
