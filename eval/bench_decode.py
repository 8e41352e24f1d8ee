"""Decoding speed of our engine without a drafter against transformers' generate, and the cost of verifying a tree.

Both sides continue the same prompts greedily, one at a time, for the same number of tokens, in the same dtype and with
as many threads. A tree round is a target pass over a root and n nodes with the head at each of them, at the prompts' end,
against a pass over one token; drafting is not part of it. On a GPU, where rounds are replayed from CUDA graphs, another side
runs them launch by launch. `--random` takes a Llama of random weights in place of a target, for machines without a network.
`--against PATH` compares with another checkout instead: both run this benchmark, alternating, `--repeats` times each.

    python eval/bench_decode.py --target smollm2-135m --dtype bfloat16 \\
        --output eval/results/decode_smollm2-135m_cpu.json
    python eval/bench_decode.py --random 16x2048 --output eval/results/decode_random-16x2048_h100.json
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from benchmark import against, alternate, median, result_path, write_result
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from drafttrain.evaluation.suites import load_suite, take_evenly
from drafttrain.inference import Decoder
from drafttrain.inference.engine import Engine
from drafttrain.target import Target
from drafttrain.target.devices import DTYPES, resolve_device, resolve_dtype

GOAL = 1.5  # times transformers' generate; also the most that a tree round may cost, in plain steps
NODES = (1, 4, 8, 16, 31, 63)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ours(target: Target, prompts: list[list[int]], count: int, graphs: bool) -> dict[str, Any]:
    decoder = Decoder(target, None, eos_ids=(), graphs=graphs)
    began = time.perf_counter()
    for prompt in prompts:
        decoder.generate([prompt], max_new_tokens=count)
    synchronize(target.device)
    seconds = time.perf_counter() - began
    return {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(len(prompts) * count / seconds, 2),
    }


def theirs(model: Any, prompts: list[list[int]], count: int) -> dict[str, Any]:
    began = time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
        )
        assert out.shape[1] == len(prompt) + count
    synchronize(model.device)
    seconds = time.perf_counter() - began
    return {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(len(prompts) * count / seconds, 2),
    }


@torch.no_grad()
def tree_rounds(
    target: Target, prompts: list[list[int]], repeats: int, graphs: bool
) -> dict[str, float]:
    """Milliseconds of a pass over a root and a random tree of n nodes, by n, interleaved; 0 is a plain step."""
    generator = torch.Generator().manual_seed(0)
    times: dict[int, list[float]] = {n: [] for n in (0, *NODES)}
    for prompt in prompts:
        engine = Engine(target, len(prompt) + max(NODES) + 1, 1, True, graphs=graphs)
        with closing(engine):
            engine.cache.clear(0)  # captured passes keep their cache from engine to engine
            engine.read(0, torch.tensor(prompt, device=target.device))
            for repeat in range(repeats + 1):
                for n, seconds in times.items():
                    parents = [
                        int(torch.randint(-1, node, (1,), generator=generator)) for node in range(n)
                    ]
                    tokens = torch.randint(target.vocab_size, (n + 1,), generator=generator).to(
                        target.device
                    )
                    synchronize(target.device)
                    began = time.perf_counter()
                    engine.cache.open([(0, parents)])
                    out = engine.run_target(tokens)
                    (out.logits.argmax(-1) if out.choices is None else out.choices).tolist()
                    if repeat:  # the first round warms up
                        seconds.append(time.perf_counter() - began)
            if graphs and engine.graph_failure:
                raise SystemExit(f"static steps were not timed: {engine.graph_failure}")
    return {str(n): round(1000 * statistics.median(seconds), 2) for n, seconds in times.items()}


def random_llama(shape: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A Llama of random weights; shape: layers x hidden size, heads of 64."""
    layers, hidden = (int(number) for number in shape.split("x"))
    heads = hidden // 64
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // (3 if heads % 3 == 0 else 4),
        vocab_size=49152,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    with device:
        return LlamaForCausalLM(config).to(dtype)


def load(args: argparse.Namespace) -> tuple[Target, Any, list[list[int]]]:
    """The target, transformers' model with the same weights, and prompts."""
    if args.random:
        device = resolve_device(args.device)
        model = random_llama(args.random, resolve_dtype(args.dtype, device), device).eval()
        target = Target.wrap(copy.deepcopy(model), None, f"random-{args.random}").pack()
        draw = torch.Generator().manual_seed(0)
        prompts = [
            torch.randint(0, 49152, (100 * (i + 1),), generator=draw).tolist()
            for i in range(args.prompts)
        ]
        return target, model, prompts
    target = Target.load(args.target, args.dtype, args.device).pack()
    model = AutoModelForCausalLM.from_pretrained(
        target.path, dtype=DTYPES.get(args.dtype, target.dtype), use_safetensors=True
    )
    questions = take_evenly(load_suite(args.suite).questions, args.prompts)
    prompts = [question.prompt(target.tokenizer) for question in questions]
    return target, model.to(target.device).eval(), prompts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m", help="short name, folder or Hub id")
    parser.add_argument(
        "--random", metavar="LAYERSxHIDDEN", help="a Llama of random weights instead, e.g. 16x2048"
    )
    parser.add_argument("--suite", default="drafttrain")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, help="root of another checkout to compare with")
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    if args.against:
        return against(
            args.against,
            "tokens_per_second",
            ["autoregressive", "hf_generate"],
            args.repeats,
            args.output,
        )
    target, model, prompts = load(args)
    gpu = target.device.type == "cuda"
    sides = {
        "autoregressive": lambda: ours(target, prompts, args.tokens, graphs=gpu),
        "hf_generate": lambda: theirs(model, prompts, args.tokens),
    }
    if gpu:
        sides["autoregressive_without_graphs"] = lambda: ours(
            target, prompts, args.tokens, graphs=False
        )
    runs = alternate(sides, args.repeats)
    speeds = {name: median(side, "tokens_per_second") for name, side in runs.items()}
    rounds = tree_rounds(target, prompts, args.repeats, graphs=gpu)
    costs = {n: round(ms / rounds["0"], 3) for n, ms in rounds.items()}
    print(f"tokens/s: {speeds}\ntree round by nodes, ms: {rounds}\nin plain steps: {costs}")
    more = {}
    if gpu:
        slower = tree_rounds(target, prompts, args.repeats, graphs=False)
        ratio = speeds["autoregressive"] / speeds["autoregressive_without_graphs"]
        more = {"tree_round_without_graphs_ms": slower, "graphs_ratio": round(ratio, 3)}
        print(f"without graphs, ms: {slower}\ngraphs against none: {ratio:.3f}")
    write_result(
        args.output,
        speeds["autoregressive"] / speeds["hf_generate"],
        GOAL,
        {name: {"tokens_per_second": speeds[name], "runs": side} for name, side in runs.items()},
        target.device,
        tree_round_ms=rounds,
        tree_round_in_steps=costs,
        dtype=args.dtype,
        prompts=len(prompts),
        tokens=args.tokens,
        **more,
    )


if __name__ == "__main__":
    main()
