"""Response tokens per second: our engine against transformers' generate with batches of 64, and against vLLM; interleaved.

All sides answer the same prompts with the same sampling, limit, dtype and cores; a response ends at its stop token.
transformers reads the prompts in their order, padded on the left. vLLM gets all prompts at once, reuses prefixes and answers as
many at a time as we do; `--vllm` names the interpreter of its environment. `--against PATH` compares with another checkout
instead: both run this benchmark, alternating, `--repeats` times each.

    python eval/bench_generate.py --target smollm2-135m --count 256 --max-new-tokens 256 \\
        --vllm ~/vllm/bin/python --output eval/results/generate_smollm2-135m_cpu.json
    python eval/bench_generate.py --count 64 --max-new-tokens 64 --against ../before --output ratio.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmark import against, alternate, median, result_path, write_result

from drafttrain.data.conversation import ChatRenderer
from drafttrain.inference.responses import ResponseEngine, ResponseRequest
from drafttrain.ops.sampling import SamplingParams
from drafttrain.target import Target
from drafttrain.target.devices import DTYPES

GOAL = 2.0
TASKS = (
    "Explain {} to a curious ten-year-old.",
    "What are three things that most people get wrong about {}?",
    "Write a short story of one paragraph in which {} plays a part.",
    "Give me a list of five practical tips about {}, with one sentence each.",
    "Summarise the history of {} in two sentences.",
    "I have to hold a talk about {} tomorrow. How should I begin?",
    "Name one book about {} and say why I should read it.",
    "Is {} worth learning about? Answer in one sentence.",
)
TOPICS = (
    "volcanoes", "sourdough bread", "the French Revolution", "sorting algorithms", "black holes", "chess openings",
    "vaccines", "garden compost", "the stock market", "jazz", "long-distance running", "electric cars", "octopuses",
    "the Roman aqueducts", "writing unit tests", "tea", "bicycle repair", "photosynthesis", "loneliness", "origami",
    "bees", "public libraries", "medieval castles", "sleep", "the Python language", "rain", "negotiating a salary",
    "Mars", "probability", "kites", "glaciers", "learning Spanish",
)  # fmt: skip


def make_prompts(count: int, seed: int, notes: int = 0) -> list[str]:
    """Varied user turns: every task about every topic, shuffled, repeated when more are asked for.

    notes: how many other tasks stand before each one, which makes it long.
    """
    pairs = [task.format(topic) for task, topic in itertools.product(TASKS, TOPICS)]
    order = random.Random(seed)
    order.shuffle(pairs)
    texts = [pairs[i % len(pairs)] for i in range(count)]
    return ["\n".join([*order.choices(pairs, k=notes), text]) for text in texts]


def run_slots(
    target: Target, prompts: list[list[int]], stop_ids: set[int], args: argparse.Namespace
) -> dict[str, Any]:
    """One timed pass of our engine."""
    engine = ResponseEngine(
        target, slots=args.slots, max_length=max(map(len, prompts)) + args.max_new_tokens
    )
    requests = [
        ResponseRequest(str(i), ids, args.max_new_tokens, stop_ids) for i, ids in enumerate(prompts)
    ]
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p)
    start = time.perf_counter()
    lengths = [len(finished.tokens) for finished in engine.run(requests, sampling, seed=args.seed)]
    return figures(lengths, time.perf_counter() - start)


def run_transformers(
    model: Any, prompts: list[list[int]], stop_ids: set[int], args: argparse.Namespace
) -> dict[str, Any]:
    """One timed pass of transformers' generate over batches in order."""
    torch.manual_seed(args.seed)
    stops = sorted(stop_ids)
    lengths = []
    choice: dict[str, Any] = {"do_sample": False}
    if args.temperature > 0:
        choice = {
            "do_sample": True,
            "temperature": args.temperature,
            "top_k": args.top_k,
            "top_p": args.top_p,
        }
    start = time.perf_counter()
    for first in range(0, len(prompts), args.batch_size):
        rows = prompts[first : first + args.batch_size]
        longest = max(map(len, rows))
        ids = torch.tensor(
            [[stops[0]] * (longest - len(row)) + row for row in rows], device=model.device
        )
        mask = torch.tensor(
            [[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device
        )
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=args.max_new_tokens,
            eos_token_id=stops,
            pad_token_id=stops[0],
            **choice,
        )
        for row in out[:, longest:].tolist():
            lengths.append(
                next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row))
            )
    return figures(lengths, time.perf_counter() - start)


class Vllm:
    """vLLM in a process of its own, on this process's cores."""

    def __init__(
        self, target: Target, prompts: list[list[int]], stop_ids: set[int], args: argparse.Namespace
    ):
        job = {
            key: vars(args)[key]
            for key in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
        }
        job |= {
            "target": target.path,
            "dtype": str(target.dtype).removeprefix("torch."),
            "prompts": prompts,
        }
        job |= {"stop_ids": sorted(stop_ids), "sequences": args.slots}
        job["max_model_len"] = max(map(len, prompts)) + args.max_new_tokens
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": cores,  # as many threads as we use, a core each
            "VLLM_LOGGING_LEVEL": "ERROR",
            **os.environ,
        }
        self.folder = tempfile.TemporaryDirectory()
        place = Path(self.folder.name) / "job.json"
        place.write_text(json.dumps(job))
        command = [args.vllm, str(Path(__file__).with_name("vllm_generate_side.py")), str(place)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"'):
                return json.loads(line)
        raise SystemExit(f"vLLM ended early with status {self.process.wait()}")

    def run(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Answers the first len(prompts) prompts."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{len(prompts)}\n")
        self.process.stdin.flush()
        answer = self._answer()
        return figures(answer["lengths"], answer["seconds"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


def figures(lengths: list[int], seconds: float) -> dict[str, Any]:
    return {
        "tokens": sum(lengths),
        "mean_length": round(sum(lengths) / len(lengths), 1),
        "seconds": round(seconds, 2),
        "tokens_per_second": round(sum(lengths) / seconds, 1),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m", help="short name, folder or Hub id")
    parser.add_argument("--count", type=int, default=256, help="prompts")
    parser.add_argument(
        "--notes", type=int, default=0, help="tasks before each prompt: 100 are about 1,500 tokens"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64, help="of transformers' generate")
    parser.add_argument(
        "--vllm", metavar="PYTHON", help="also compare with vLLM, installed for this interpreter"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--against", type=Path, help="root of another checkout to compare with")
    parser.add_argument("--output", type=result_path)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.against:
        sides = ["slots", f"hf_generate_batch_{args.batch_size}"]
        return against(args.against, "tokens_per_second", sides, args.repeats, args.output)
    target = Target.load(args.target, args.dtype, args.device)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        target.path, dtype=DTYPES.get(args.dtype, target.dtype), use_safetensors=True
    )
    model = model.to(target.device).eval()
    renderer = ChatRenderer(target)
    prompts = [
        renderer.open([{"role": "user", "content": text}])
        for text in make_prompts(args.count, args.seed, args.notes)
    ]
    stop_ids = renderer.stop_ids
    sides: dict[str, Callable[..., dict[str, Any]]] = {
        "slots": lambda rows, options: run_slots(target, rows, stop_ids, options),
        f"hf_generate_batch_{args.batch_size}": lambda rows, options: run_transformers(
            model, rows, stop_ids, options
        ),
    }
    vllm = Vllm(target, prompts, stop_ids, args) if args.vllm else None
    if vllm:
        sides["vllm"] = lambda rows, options: vllm.run(rows)
    short = [ids[-64:] for ids in prompts[:8]]
    for side in sides.values():
        side(short, argparse.Namespace(**{**vars(args), "max_new_tokens": 4}))
    runs = alternate(
        {name: partial(side, prompts, args) for name, side in sides.items()},
        args.repeats,
        warm_up=False,
    )
    if vllm:
        vllm.close()
    speeds = {name: median(side, "tokens_per_second") for name, side in runs.items()}
    ours, theirs, *_ = speeds.values()
    print(
        "response tokens/s: " + ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
    )
    write_result(
        args.output,
        ours / theirs,
        GOAL,
        {name: {"tokens_per_second": speeds[name], "runs": side} for name, side in runs.items()},
        target.device,
        over={name: round(ours / speed, 3) for name, speed in speeds.items() if name != "slots"},
        prompts=args.count,
        prompt_tokens=round(sum(map(len, prompts)) / len(prompts)),
        dtype=str(target.dtype).removeprefix("torch."),
    )


if __name__ == "__main__":
    main()
