"""Linear layers on a CPU: our kernel against torch's, over shapes, rows and dtypes.

Copies of a weight that exceed the caches are multiplied one after the other, as a decoding step reads its layers. torch is
the faster of `F.linear` and a prepacked product (MKL for float32, oneDNN for bfloat16). The dtypes:

    float32      any float32 weight
    exact        float32 inputs, weights that hold bfloat16 values: read as bfloat16, multiplied as float32
    bfloat16     both bfloat16; ours rounds float32 inputs and adds in float32
    (both are measured with weights in 12 bits too: `twelve` is their time by that of 16 bits, below 1 where they are quicker)
    int8         float32 inputs, weights that are integers times a factor per row; torch reads float32

    python eval/bench_linear.py --output eval/results/linear_cpu.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from benchmark import result_path, write_result
from torch import Tensor

from drafttrain.ops.native import kernel_path
from drafttrain.ops.packing import WEIGHTS_VARIABLE, pack_panels, round_to_int8, skinny_linear

SHAPES = (
    "960x576",
    "576x576",
    "3072x576",
    "576x1536",
    "49152x576",
    "2048x2048",
    "16384x2048",
    "2048x8192",
)
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 512)
COLD = 64 * 2**20  # bytes of weights that no cache holds
GOAL = 1.0
OURS = ("ours", "12 bits")
Call = Callable[[Tensor, int], Any]  # x [rows, in] and the number of the copy


def packed_as(form: str, weight: Tensor, copies: int) -> list[Tensor]:
    """Panels of a weight, of which bfloat16 values are in 16 bits (`bfloat16`) or in 12 (`packed`)."""
    os.environ[WEIGHTS_VARIABLE] = form
    return [pack_panels(weight).clone() for _ in range(copies)]


def sides(dtype: str, weight: Tensor, copies: int) -> dict[str, Call]:
    """Products with each of `copies` weights [out, in], by side."""
    form = {
        "exact": lambda w: w.bfloat16().float(),
        "bfloat16": lambda w: w.bfloat16().float(),
        "int8": round_to_int8,
    }
    weight = form.get(dtype, lambda w: w)(weight)
    panels = packed_as("bfloat16", weight, copies)
    out = len(weight)
    rounded = dtype == "bfloat16"
    theirs = [
        weight.to(torch.bfloat16 if rounded else torch.float32).clone() for _ in range(copies)
    ]
    found: dict[str, Call] = {
        "ours": lambda x, i: skinny_linear(x, panels[i], out, rounded),
        "torch": lambda x, i: F.linear(x, theirs[i]),
    }
    if dtype in ("exact", "bfloat16"):
        small = packed_as("packed", weight, copies)
        found["12 bits"] = lambda x, i: skinny_linear(x, small[i], out, rounded)
    if rounded:
        packed = [torch.ops.mkldnn._reorder_linear_weight(w, None) for w in theirs]
        found["packed"] = lambda x, i: torch.ops.mkldnn._linear_pointwise(
            x, packed[i], None, "none", [], ""
        )
    elif torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear"):
        packed = [torch.ops.mkl._mkl_reorder_linear_weight(w, 128) for w in theirs]
        found["packed"] = lambda x, i: torch.ops.mkl._mkl_linear(
            x, packed[i], theirs[i], None, len(x)
        )
    return found


@torch.no_grad()
def measure(shape: str, dtype: str, rows: list[int], repeats: int) -> list[dict[str, Any]]:
    """A line per row count: microseconds of each side (median of `repeats` walks over the copies), ours against torch's."""
    out, width = (int(number) for number in shape.split("x"))
    copies = max(1, min(48, COLD // (out * width * 2)))
    calls = sides(
        dtype,
        torch.randn(out, width, generator=torch.Generator().manual_seed(0)) / width**0.5,
        copies,
    )
    lines = []
    for n in rows:
        x = torch.randn(n, width)
        inputs = {
            name: x.bfloat16() if dtype == "bfloat16" and name not in OURS else x for name in calls
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        walk = max(
            1, min(copies, 2**32 // (n * out * width))
        )  # copies of one reading: fewer where a product takes long
        for repeat in range(repeats + 1):
            for name, call in calls.items():
                began = time.perf_counter()
                for i in range(walk):
                    call(inputs[name], (repeat * walk + i) % copies)
                if repeat:  # the first round warms up
                    times[name].append((time.perf_counter() - began) / walk)
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        ratio = (
            min(seconds for name, seconds in medians.items() if name not in OURS) / medians["ours"]
        )
        gflops = 2 * n * out * width / medians["ours"] / 1e9
        micro = {name: round(1e6 * seconds, 1) for name, seconds in medians.items()}
        lines.append(
            {
                "shape": shape,
                "dtype": dtype,
                "rows": n,
                "us": micro,
                "ratio": round(ratio, 3),
                "gflops": round(gflops),
            }
        )
        if "12 bits" in medians:
            lines[-1]["twelve"] = round(medians["12 bits"] / medians["ours"], 3)
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="OUTxIN")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "exact", "bfloat16", "int8"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    table = [
        line
        for dtype in args.dtypes
        for shape in args.shapes
        for line in measure(shape, dtype, args.rows, args.repeats)
    ]
    worst = min(table, key=lambda line: line["ratio"])
    print(f"{kernel_path()}, {torch.get_num_threads()} threads; worst ratio to torch: {worst}")
    medians = {
        dtype: statistics.median(line["ratio"] for line in table if line["dtype"] == dtype)
        for dtype in args.dtypes
    }
    write_result(
        args.output,
        worst["ratio"],
        GOAL,
        {"table": table},
        torch.device("cpu"),
        path=kernel_path(),
        median_ratio=medians,
    )


if __name__ == "__main__":
    main()
