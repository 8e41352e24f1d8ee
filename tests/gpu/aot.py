"""Compiles every Triton kernel ahead of time for GPUs that are not here; reads shared memory and tensor-core instructions.

    python -m tests.gpu.aot --output eval/results/aot_kernels.json            # all kernels, architectures, widths: minutes
    python -m tests.gpu.aot --arch 90 --width 128 --kernel attend_parts       # some of them
    python -m tests.gpu.aot --table eval/results/aot_kernels.json             # the table of docs/benchmarks.md

A kernel that does not compile, or that needs more shared memory than the architecture gives a program, ends the run with an
error after all others were compiled. A launch with that geometry would fail there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from drafttrain.ops import divergence_kernels, layer_kernels, tree_attention_kernels
from drafttrain.ops.tree_attention_triton import _power_of_two, choose_geometry
from tests.files import load_json

# Bytes of shared memory that a program may ask for, and processors of a device.
# Source: CUDA C++ Programming Guide, technical specifications per compute capability.
ARCHITECTURES = {
    75: ("T4", 65_536, 40),
    80: ("A100", 166_912, 108),
    86: ("RTX 3090", 101_376, 82),
    89: ("RTX 4090", 101_376, 128),
    90: ("H100", 232_448, 132),
    100: ("B200", 232_448, 148),
    120: ("RTX 5090", 101_376, 170),
}
WIDTHS = (64, 80, 96, 128, 256)
TENSOR_CORE = {"mma": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma"}
# shapes of an 8B model: a tree behind a long prefix
KV_HEADS = 8
GROUP = 4
CAPACITY = 8192
TREE = 64
LOSSES = ("KL", "REVERSE", "JS", "ACCEPT", "CE", "MEASURE", "GRAD", "ADD")


class Build(NamedTuple):
    """A kernel with the constants and argument types that one launch gives it."""

    kernel: Any
    dtype: str
    width: int
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]


def types_for(architecture: int) -> tuple[str, ...]:
    """Triton's names of the dtypes that its tensor cores multiply, and float32."""
    return ("fp16", "fp32") if architecture < 80 else ("bf16", "fp32")


def builds(architecture: int, widths: tuple[int, ...] = WIDTHS) -> Iterator[Build]:
    """Every kernel as decoding and training launch it on an architecture."""
    _, shared, processors = ARCHITECTURES[architecture]
    half = types_for(architecture)[0]
    for width in widths:
        padded = _power_of_two(width)
        for dtype in types_for(architecture):
            size = 4 if dtype == "fp32" else 2
            g = choose_geometry(
                TREE * GROUP, KV_HEADS, CAPACITY, width, width, size, processors, shared
            )
            names = (
                "rows",
                "offsets",
                "prefixes",
                "chains",
                "helds",
                "places",
                "positions",
                "ancestors",
            )
            numbers = dict.fromkeys(names, "*i32")
            inputs = dict.fromkeys(("query", "keys", "values", "sinks"), "*" + dtype)
            outputs = {"out": "*fp32" if g.parts > 1 else "*" + dtype, "logs": "*fp32"}
            sizes = {
                "KV_HEADS": KV_HEADS,
                "GROUP": GROUP,
                "BLOCK_M": g.block_m,
                "BLOCK_N": g.block_n,
            }
            widths_ = {
                "WIDTH": width,
                "PADDED": padded,
                "VALUE_WIDTH": width,
                "VALUE_PADDED": padded,
            }
            # With window, soft cap and sinks: the form that needs most.
            flags = {
                "MERGED": g.parts > 1,
                "WINDOW": True,
                "SOFTCAP": True,
                "SINKS": True,
                "PRECISION": "ieee",
            }
            options = {"num_warps": g.warps, "num_stages": g.stages}
            kinds = {"scaling": "fp32", "softcap": "fp32", **numbers, **inputs, **outputs}
            yield Build(
                tree_attention_kernels.attend_parts,
                dtype,
                width,
                kinds,
                sizes | widths_ | flags,
                options,
            )
        merged = {
            "HEADS": KV_HEADS * GROUP,
            "VALUE_WIDTH": width,
            "VALUE_PADDED": padded,
            "CHUNK": 16,
        }
        kinds = {"partial": "*fp32", "logs": "*fp32", "out": "*" + half}
        yield Build(tree_attention_kernels.merge_parts, half, width, kinds, merged, {})
        moved = {"HEADS": KV_HEADS, "WIDTH": width, "PADDED": padded, "PATH": 8}
        kinds = {"addresses": "*i64", "moves": "*i64", "like": "*" + half}
        yield Build(tree_attention_kernels.move_paths, half, width, kinds, moved, {})
    for dtype in types_for(architecture):
        # A state of 4096 numbers, heads of each width, and a gated activation.
        pointers = dict.fromkeys(("state", "delta", "weight", "out"), "*" + dtype)
        sizes = {"WIDTH": 4096, "PADDED": 4096, "ADDS": True}
        kinds = {"plus": "fp32", "eps": "fp32", **pointers}
        yield Build(layer_kernels.add_norm, dtype, 0, kinds, sizes, {"num_warps": 8})
        pointers = dict.fromkeys(("heads", "cosine", "sine", "weight", "out"), "*" + dtype)
        kinds = {"plus": "fp32", "eps": "fp32", **pointers}
        for width in widths:
            sizes = {
                "COUNT": KV_HEADS * GROUP,
                "WIDTH": width,
                "PADDED": _power_of_two(width),
                "ROTARY": width,
                "NORM": True,
            }
            yield Build(layer_kernels.rotate_head, dtype, width, kinds, sizes, {"num_warps": 1})
        kinds = dict.fromkeys(("gate", "up", "out"), "*" + dtype)
        sizes = {"GELU": True, "BLOCK": 1024}
        yield Build(layer_kernels.gate_up, dtype, 0, kinds, sizes, {})
        for chosen in (
            {"KL", "GRAD", "MEASURE"},
            set(LOSSES),
        ):  # the default, and all terms at once
            constants = {name: name in chosen for name in LOSSES} | {"BLOCK": 4096}
            kinds = {"z": "*" + dtype, "y": "*" + dtype, "grad": "*" + dtype, "agrees": "*i1"}
            kinds |= dict.fromkeys(("values", "alphas", "full_log_z", "row_weight"), "*fp32")
            kinds |= dict.fromkeys(("likeliest", "sampled"), "*i64")
            kinds |= dict.fromkeys(("z_stride", "y_stride", "grad_stride", "width"), "i32")
            weights = divergence_kernels.divergence_rows.arg_names
            kinds = dict.fromkeys(weights, "fp32") | kinds
            yield Build(
                divergence_kernels.divergence_rows, dtype, 0, kinds, constants, {"num_warps": 8}
            )


def compile_for(architecture: int, build: Build) -> dict[str, Any]:
    """A row of the table: bytes of shared memory, and how many tensor-core instructions of each kind the code has."""
    kernel = build.kernel
    signature = {
        name: "constexpr" if name in build.constants else build.types.get(name, "i32")
        for name in kernel.arg_names
    }
    aligned = [
        i
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
        or (name.endswith("_stride") and name not in ("z_stride", "y_stride", "grad_stride"))
    ]
    source = ASTSource(
        kernel, signature, build.constants, {(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    row = {
        "kernel": kernel.__name__,
        "arch": architecture,
        "width": build.width,
        "dtype": build.dtype,
    }
    if build.kernel is divergence_kernels.divergence_rows:
        row["terms"] = "+".join(name for name in LOSSES if build.constants[name])
    limit = ARCHITECTURES[architecture][1]
    try:
        made = triton.compile(
            source, target=GPUTarget("cuda", architecture, 32), options=build.options
        )
    except Exception as error:  # whatever the compiler raises belongs into the table
        return row | {
            "error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
            "fits": False,
        }
    code = made.asm["ptx"]
    used = {name: code.count(word) for name, word in TENSOR_CORE.items() if word in code}
    return (
        row
        | {"shared": made.metadata.shared, "limit": limit, "fits": made.metadata.shared <= limit}
        | used
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: shared memory in KiB by kernel and width, an architecture a column, and the tensor cores that are used."""
    names = list(ARCHITECTURES)
    lines = ["| kernel | width | dtype | " + " | ".join(f"sm_{name}" for name in names) + " |"]
    lines.append("| --- | ---: | --- |" + " ---: |" * len(names))
    merged: dict[tuple[str, int, str], dict[int, str]] = {}
    for row in rows:
        used = next((name for name in reversed(TENSOR_CORE) if row.get(name)), "")
        cell = "fails" if "error" in row else f"{row['shared'] / 1024:.0f} {used}".strip()
        kernel = f"`{row['kernel']}`" + {None: "", "KL+MEASURE+GRAD": " kl"}.get(
            row.get("terms"), " all terms"
        )
        dtype = "float32" if row["dtype"] == "fp32" else "half"
        merged.setdefault((kernel, row["width"], dtype), {})[row["arch"]] = cell
    for (kernel, width, dtype), cells in sorted(merged.items()):
        shown = " | ".join(cells.get(name, "") for name in names)
        lines.append(f"| {kernel} | {width or ''} | {dtype} | {shown} |")
    limits = " | ".join(f"{ARCHITECTURES[name][1] / 1024:.0f}" for name in names)
    return "\n".join([*lines, f"| limit | | | {limits} |"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arch", type=int, action="append", choices=list(ARCHITECTURES), help="all unless given"
    )
    parser.add_argument("--width", type=int, action="append", help="of a key; all unless given")
    parser.add_argument("--kernel", action="append", help="by name; all unless given")
    parser.add_argument(
        "--dtype", action="append", choices=["bf16", "fp16", "fp32"], help="both unless given"
    )
    parser.add_argument("--output", type=Path, help="JSON; rows that it has already are kept")
    parser.add_argument("--table", type=Path, help="prints the table of a JSON file and ends")
    args = parser.parse_args()
    if args.table:
        print(table(load_json(args.table)["rows"]))
        return 0
    rows: list[dict[str, Any]] = (
        load_json(args.output)["rows"] if args.output and args.output.exists() else []
    )
    known = {
        tuple(row.get(key) for key in ("kernel", "arch", "width", "dtype", "terms")) for row in rows
    }
    for architecture in args.arch or ARCHITECTURES:
        for build in builds(architecture, tuple(args.width or WIDTHS)):
            name = build.kernel.__name__
            terms = (
                "+".join(n for n in LOSSES if build.constants.get(n))
                if name == "divergence_rows"
                else None
            )
            if (args.kernel and name not in args.kernel) or (
                args.dtype and build.dtype not in args.dtype
            ):
                continue
            if (name, architecture, build.width, build.dtype, terms) in known:
                continue
            rows.append(compile_for(architecture, build))
            print(rows[-1], flush=True)
            if args.output:
                made = {
                    "command": "python -m tests.gpu.aot",
                    "triton": triton.__version__,
                    "rows": rows,
                }
                args.output.write_text(json.dumps(made, indent=1) + "\n")
    bad = [row for row in rows if not row["fits"]]
    print(f"{len(rows)} kernels compiled, {len(bad)} do not compile or do not fit")
    for row in bad:
        print(row, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
