"""The fused linear divergence against full logits with autograd, and on a GPU against Liger-Kernel's fused linear JSD.

Each side turns drafter states [t, h] and head [v, h], and the target's states and head, into the loss and both gradients.
Time: the sides interleaved in one process. Memory: the most that a call adds to what its inputs take, on a GPU as torch's
allocator counts it, on a CPU as the growth of resident memory in a process of the side's own (Linux).

Sizes without flags: on a GPU 8192 tokens, 151,936 words, 1024 columns, bfloat16; on a CPU 4096, 49,152, 576, float32 (about
five minutes on two cores). Full logits need seven matrices [t, v]: the GPU's size takes 40 GB in float32.

    python eval/bench_loss.py --output eval/results/loss_cpu.json
    python eval/bench_loss.py --loss js:0.5 --output eval/results/loss_js_h100.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmark import alternate, median, result_path, write_result
from plain_divergence import plain_divergence
from torch import Tensor

from drafttrain.losses import TargetRows, linear_divergence, parse_loss
from drafttrain.target.devices import DTYPES, resolve_device

TIME_GOAL = 1 / 1.15
MEMORY_GOAL = 0.10
SIZES = {"cuda": (8192, 151_936, 1024, "bfloat16"), "cpu": (4096, 49_152, 576, "float32")}
LIGER_BETA = {"kl": 0.0, "reverse_kl": 1.0}  # and js:BETA


def make_inputs(args: argparse.Namespace, device: torch.device) -> dict[str, Tensor]:
    """Both sides' states and heads, scaled so that logits spread as a model's do, and the tokens that follow."""
    generator = torch.Generator().manual_seed(args.seed)
    dtype = DTYPES[args.dtype]
    made = {}
    for name, rows in (("hidden", args.tokens), ("weight", args.vocabulary)):
        for side in ("drafter", "target"):
            scale = 1.0 if name == "hidden" else 2 * args.hidden**-0.5
            numbers = torch.randn(rows, args.hidden, generator=generator) * scale
            made[f"{side}_{name}"] = numbers.to(device, dtype).requires_grad_(side == "drafter")
    made["sampled"] = torch.randint(0, args.vocabulary, (args.tokens,), generator=generator).to(
        device
    )
    return made


def make_sides(
    args: argparse.Namespace, x: dict[str, Tensor]
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """By name: () -> the loss as a scalar with gradients; and why sides are left out."""
    hidden = x["drafter_hidden"]
    weight = x["drafter_weight"]
    row_weight = torch.full((len(hidden),), 1 / len(hidden), device=hidden.device)
    index = torch.arange(len(hidden), device=hidden.device)
    nothing = torch.zeros(len(hidden), device=hidden.device)

    def ours() -> Tensor:
        # log_z and argmax are the training loop's part; only metrics and losses of acceptance read them.
        rows = TargetRows(
            x["target_hidden"], x["target_weight"], nothing, index, None, x["sampled"]
        )
        return linear_divergence(
            hidden, weight, rows, index, row_weight, args.loss, measure=False
        ).loss

    def plain() -> Tensor:
        with torch.no_grad():
            logits = F.linear(x["target_hidden"], x["target_weight"]).float()
        return plain_divergence(
            hidden, weight, logits, nothing, row_weight, args.loss, x["sampled"]
        ).loss

    sides = {"plain": plain, "ours": ours}
    skipped = {}
    term = parse_loss(args.loss).terms[0]
    beta = LIGER_BETA.get(term.name, term.parameter if term.name == "js" else None)
    if not hidden.is_cuda:
        skipped["liger"] = "its Triton kernels need a GPU"
    elif importlib.util.find_spec("liger_kernel") is None:
        skipped["liger"] = "liger-kernel is not installed"
    elif beta is None or len(parse_loss(args.loss).terms) > 1 or term.weight != 1:
        skipped["liger"] = f"it has kl, reverse_kl and js:BETA, not {args.loss}"
    else:
        from liger_kernel.transformers import LigerFusedLinearJSD

        module = LigerFusedLinearJSD(jsd_beta=beta, temperature=term.temperature)
        sides["liger"] = lambda: module(
            hidden, weight, x["target_hidden"], x["target_weight"], None
        )
    return sides, skipped


def step(side: Callable[[], Tensor], x: dict[str, Tensor]) -> float:
    """One forward and backward; returns the loss."""
    for tensor in x.values():
        tensor.grad = None
    loss = side()
    loss.backward()
    return float(loss.detach())  # waits for the device


def timed(
    side: Callable[[], Tensor], x: dict[str, Tensor], device: torch.device
) -> dict[str, float]:
    start = time.perf_counter()
    loss = step(side, x)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - start, "loss": loss}


def resident(key: str) -> int:
    """Bytes of resident memory, now (VmRSS) or at most since it was reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def extra_memory(side: Callable[[], Tensor], x: dict[str, Tensor], device: torch.device) -> int:
    """The most bytes that one step holds beyond its inputs, gradients included."""
    if device.type == "cuda":
        for tensor in x.values():
            tensor.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(side, x)
        return torch.cuda.max_memory_allocated() - before
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    step(side, x)
    return resident("VmHWM") - before


def extra_memory_apart(name: str) -> int | None:
    """The same in a process of its own, which has not grown before; None where there is no /proc."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    command = [sys.executable, *sys.argv, "--memory-of", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1])["bytes"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--dtype", choices=list(DTYPES))
    parser.add_argument(
        "--loss", default="kl", help="as in a recipe, at temperature 1 if it reads acceptance"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=result_path)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = zip(
        ("tokens", "vocabulary", "hidden", "dtype"),
        SIZES[resolve_device(args.device).type],
        strict=True,
    )
    for name, value in sizes:
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> None:
    args = parse_arguments()
    device = resolve_device(args.device)
    x = make_inputs(args, device)
    sides, skipped = make_sides(args, x)
    if args.memory_of:
        print(json.dumps({"bytes": extra_memory(sides[args.memory_of], x, device)}))
        return
    runs = alternate(
        {name: lambda side=side: timed(side, x, device) for name, side in sides.items()},
        args.repeats,
    )
    results: dict[str, dict[str, Any]] = {}
    for name, side in sides.items():
        held = extra_memory(side, x, device) if device.type == "cuda" else extra_memory_apart(name)
        results[name] = {
            "seconds": round(median(runs[name], "seconds"), 4),
            "runs": [round(run["seconds"], 4) for run in runs[name]],
            "peak_extra_mb": held and round(held / 1e6, 1),
            "loss": runs[name][0]["loss"],
        }
        print(
            f"{name:6} {results[name]['seconds']:9.3f} s  {results[name]['peak_extra_mb']} MB  loss {results[name]['loss']:.6f}"
        )
    peaks = [results[name]["peak_extra_mb"] for name in ("ours", "plain")]
    share = round(peaks[0] / peaks[1], 4) if all(peaks) else None
    print(f"extra memory: {share} of plain's (goal at most {MEMORY_GOAL})")
    write_result(
        args.output,
        results["plain"]["seconds"] / results["ours"]["seconds"],
        round(TIME_GOAL, 3),
        results,
        device,
        skipped=skipped,
        memory_share=share,
        memory_goal=MEMORY_GOAL,
        **{
            name: getattr(args, name)
            for name in ("tokens", "vocabulary", "hidden", "dtype", "loss", "repeats")
        },
    )


if __name__ == "__main__":
    main()
