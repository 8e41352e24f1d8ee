"""What a long context costs: reading it, a plain step behind it, and a pass over a token tree behind it.

Ours reads a prompt of each length once, then plain steps and trees of random nodes alternate at its end. transformers reads
the same prompt by its own forward. `--against PATH` compares with another checkout instead: both run this benchmark,
alternating, `--repeats` times each.

    python eval/bench_context.py --target smollm2-135m --dtype bfloat16 --output eval/results/context_smollm2-135m_cpu.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from benchmark import against, result_path, write_result
from transformers import AutoModelForCausalLM

from drafttrain.evaluation.suites import load_suite
from drafttrain.inference.engine import Engine
from drafttrain.target import Target
from drafttrain.target.devices import DTYPES

GOAL = 1 / 0.65  # transformers' time to read the longest prompt, over ours
NODES = (0, 7, 16)  # 0: a plain step
STEPS = 12  # of each kind, after one that warms up


def text_of(target: Target, length: int) -> torch.Tensor:
    """[length] ids of the suites' questions, one after the other."""
    ids: list[int] = []
    questions = load_suite("drafttrain").questions
    while len(ids) < length:
        for question in questions:
            ids += question.prompt(target.tokenizer)
    return torch.tensor(ids[:length], device=target.device)


def ours(target: Target, prompt: torch.Tensor) -> tuple[float, dict[int, float]]:
    """Seconds to read a prompt, and milliseconds of a pass over a root and n nodes behind it, by n."""
    generator = torch.Generator().manual_seed(0)
    times: dict[int, list[float]] = {n: [] for n in NODES}
    with torch.no_grad(), closing(Engine(target, len(prompt) + max(NODES) + 2, 1, True)) as engine:
        began = time.perf_counter()
        engine.read(0, prompt)
        reading = time.perf_counter() - began
        for step in range(STEPS + 1):
            for n, seconds in times.items():
                parents = [int(torch.randint(-1, i, (1,), generator=generator)) for i in range(n)]
                tokens = torch.randint(target.vocab_size, (n + 1,), generator=generator)
                began = time.perf_counter()
                engine.cache.open([(0, parents)])
                engine.run_target(tokens).logits.argmax(-1).tolist()
                if step:
                    seconds.append(time.perf_counter() - began)
    return reading, {n: 1000 * statistics.median(seconds) for n, seconds in times.items()}


def theirs(model: Any, prompt: torch.Tensor) -> float:
    """Seconds of transformers' forward over a prompt, with the head at its last token."""
    began = time.perf_counter()
    with torch.no_grad():
        model(input_ids=prompt[None], logits_to_keep=1)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m", help="short name, folder or Hub id")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 1024, 2500, 8000])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, help="root of another checkout to compare with")
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    names = {n: f"{n} nodes" if n else "plain" for n in NODES}
    if args.against:
        sides = [f"{part} at {n}" for n in args.lengths for part in ("reading", *names.values())]
        return against(args.against, "per_second", sides, args.repeats, args.output)
    target = Target.load(args.target, args.dtype, "cpu").pack()
    model = AutoModelForCausalLM.from_pretrained(
        target.path, dtype=DTYPES.get(args.dtype, target.dtype), use_safetensors=True
    )
    runs: dict[str, list[float]] = {}  # milliseconds
    for _ in range(args.repeats):
        for length in args.lengths:
            prompt = text_of(target, length)
            reading, steps = ours(target, prompt)
            runs.setdefault(f"reading at {length}", []).append(1000 * reading)
            runs.setdefault(f"transformers at {length}", []).append(1000 * theirs(model, prompt))
            for n, ms in steps.items():
                runs.setdefault(f"{names[n]} at {length}", []).append(ms)
    entries = {}
    for name, ms in runs.items():
        least = min(ms)
        entries[name] = {
            "ms": round(statistics.median(ms), 2),
            "least_ms": round(least, 2),
            "per_second": round(1000 / least, 4),
        }
        print(f"{name}: {entries[name]}")
    longest = max(args.lengths)
    ratio = entries[f"transformers at {longest}"]["ms"] / entries[f"reading at {longest}"]["ms"]
    write_result(args.output, ratio, GOAL, entries, target.device, dtype=args.dtype)


if __name__ == "__main__":
    main()
