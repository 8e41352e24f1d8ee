"""Packed tree attention against torch's ways of verifying a batch of token trees, and against the memory's speed.

On a GPU: our Triton kernels, scaled_dot_product_attention with a dense mask, FlexAttention with the same mask as a
function, and the floor: the bytes of keys and values, read once at the speed of a large copy (bytes read plus written);
each layer's call is replayed from a CUDA graph, so the host's time does not count. On a CPU: our torch reference and
scaled_dot_product_attention. All sides read the same cache; masks, block masks and plans are built beforehand, as a
model's layers share them. Every call takes the next of several layers' caches, so that none is found in the processor's.

scaled_dot_product_attention has three forms for grouped heads: `enable_gqa`, expanded keys and values, and the query heads of a
group as rows of one head. Which backend torch picks depends on the form; the result names it. The ratio is against the fastest.

    python eval/bench_tree_attention.py --prefix 8192 --nodes 64 --output eval/results/tree_attention_h100.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from benchmark import result_path, write_result
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.overrides import TorchFunctionMode

from drafttrain.ops.tree_attention import TreeLayout
from drafttrain.ops.tree_attention_triton import PackedPlan, packed_tree_attention
from drafttrain.target.devices import DTYPES, resolve_device

GOAL = 2.0
FLOOR_GOAL = 0.7
# Caches of all layers together, well above the processors' caches.
CACHE_BYTES = {"cuda": 2**29, "cpu": 2**28}
Side = Callable[[Tensor, Tensor], Tensor]


def make_sides(args: argparse.Namespace, device: torch.device, query: Tensor) -> dict[str, Side]:
    """By name: (keys, values) of a layer [batch, kv_heads, capacity, head_dim] -> [batch, heads, nodes, head_dim]."""
    generator = random.Random(args.seed)
    parents = [
        [generator.randint(-1, node - 1) for node in range(args.nodes - 1)]
        for _ in range(args.batch)
    ]
    layouts = [TreeLayout(args.prefix, row) for row in parents]
    plan = PackedPlan.build(list(enumerate(layouts)), device)
    scaling = args.head_dim**-0.5
    packed = query.transpose(0, 1).reshape(1, args.heads, args.batch * args.nodes, args.head_dim)
    visible = torch.stack([layout.mask(None, 1, torch.empty(0))[1] == 0 for layout in layouts])[
        :, None
    ].to(device)

    def ours(keys: Tensor, values: Tensor) -> Tensor:
        out = packed_tree_attention(
            packed, keys, values, plan, scaling=scaling, window=None, softcap=None, sinks=None
        )
        return out.view(args.heads, args.batch, args.nodes, args.head_dim).transpose(0, 1)

    groups = args.heads // args.kv_heads
    folded_shape = (args.batch, args.kv_heads, groups * args.nodes, args.head_dim)
    folded_query = query.reshape(folded_shape)
    folded_mask = visible.repeat(1, 1, groups, 1)

    def grouped(keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, keys, values, visible, scale=scaling, enable_gqa=True
        )

    def expanded(keys: Tensor, values: Tensor) -> Tensor:
        keys = keys.repeat_interleave(groups, dim=1)
        values = values.repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(query, keys, values, visible, scale=scaling)

    def folded(keys: Tensor, values: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(folded_query, keys, values, folded_mask, scale=scaling)
        return out.view(query.shape)

    sides: dict[str, Side] = {
        "ours": ours,
        "sdpa_grouped": grouped,
        "sdpa_expanded": expanded,
        "sdpa_folded": folded,
    }
    if device.type == "cuda":
        mask = visible[:, 0]
        blocks = create_block_mask(
            lambda b, head, node, slot: mask[b, node, slot],
            args.batch,
            None,
            args.nodes,
            args.prefix + args.nodes,
            device=device.type,
        )
        compiled: Any = torch.compile(flex_attention)
        # torch's kernel for few queries has no form for this mask: "No choices exist for backend".
        options = {"FORCE_USE_FLEX_ATTENTION": True}
        sides["flex_attention"] = lambda keys, values: compiled(
            query,
            keys,
            values,
            block_mask=blocks,
            scale=scaling,
            enable_gqa=True,
            kernel_options=options,
        )
    return sides


class ChosenBackend(TorchFunctionMode):
    """Records which backend scaled_dot_product_attention takes for its arguments."""

    name = ""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            choice = torch._fused_sdp_choice(*args, **kwargs)
            self.name = SDPBackend(choice).name.lower()
        return func(*args, **kwargs)


def backends_of(sides: dict[str, Side], layer: tuple[Tensor, Tensor]) -> dict[str, str]:
    """The backend of each side that calls scaled_dot_product_attention."""
    found = {}
    for name, side in sides.items():
        if not name.startswith("sdpa_"):
            continue
        with ChosenBackend() as chosen:
            side(*layer)
        found[name] = chosen.name
    return found


def seconds_per_layer(
    side: Side, layers: list[tuple[Tensor, Tensor]], device: torch.device
) -> float:
    """The mean over one pass through all layers."""
    if device.type != "cuda":
        start = time.perf_counter()
        for keys, values in layers:
            side(keys, values)
        return (time.perf_counter() - start) / len(layers)
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for keys, values in layers:
        side(keys, values)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / len(layers)


def captured(side: Side, layers: list[tuple[Tensor, Tensor]]) -> Side:
    """The side as one CUDA graph per layer, so that the time is the device's and not the host's."""
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    for keys, values in layers:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            side(keys, values)
        graphs[keys.data_ptr()] = graph

    def replay(keys: Tensor, values: Tensor) -> Tensor:
        graphs[keys.data_ptr()].replay()
        return keys

    return replay


def copy_speed(device: torch.device) -> float:
    """Bytes per second read plus written by a large copy; the median of 5."""
    source = torch.empty(CACHE_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy: Side = lambda x, y: y.copy_(x)  # noqa: E731
    seconds = [seconds_per_layer(copy, [(source, target)], device) for _ in range(6)][1:]
    return 2 * source.numel() / statistics.median(seconds)


def report(
    args: argparse.Namespace,
    device: torch.device,
    runs: dict[str, list[float]],
    floor: float,
    errors: dict[str, float],
    backends: dict[str, str],
) -> None:
    medians = {name: statistics.median(seconds) for name, seconds in runs.items()}
    sides: dict[str, dict[str, Any]] = {
        name: {
            "microseconds": round(medians[name] * 1e6, 2),
            "runs": runs[name],
            "error": errors[name],
        }
        for name in runs
    }
    for name, backend in backends.items():
        sides[name]["backend"] = backend
    sides["memory_floor"] = {"microseconds": round(floor * 1e6, 2)}
    share = round(floor / medians["ours"], 3)
    for name, side in sides.items():
        print(f"{name:16} {side['microseconds']:10.1f} us a layer  {side.get('backend', '')}")
    print(f"{share:.0%} of the floor (goal {FLOOR_GOAL:.0%})")
    settings = ("prefix", "nodes", "batch", "heads", "kv_heads", "head_dim", "dtype", "repeats")
    fastest = min(medians[name] for name in backends)
    write_result(
        args.output,
        fastest / medians["ours"],
        GOAL,
        sides,
        device,
        floor_share=share,
        floor_goal=FLOOR_GOAL,
        **{name: getattr(args, name) for name in settings},
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefix", type=int, default=8192, help="committed tokens of each row")
    parser.add_argument(
        "--nodes", type=int, default=64, help="new tokens of each row, root included"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--layers",
        type=int,
        help="caches that calls take in turn; as many as fill 0.5 GB unless given",
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=result_path)
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args = parse_arguments()
    device = resolve_device(args.device)
    dtype = DTYPES[args.dtype]
    torch.manual_seed(args.seed)
    shape = (args.batch, args.kv_heads, args.prefix + args.nodes, args.head_dim)
    query = torch.randn(
        args.batch, args.heads, args.nodes, args.head_dim, dtype=dtype, device=device
    )
    first = [torch.randn(shape, dtype=dtype, device=device) for _ in range(2)]
    read = sum(x.numel() * x.element_size() for x in first)
    count = args.layers or max(2, -(-CACHE_BYTES[device.type] // read))
    layers = [(first[0].clone(), first[1].clone()) for _ in range(count)]
    sides = make_sides(args, device, query)
    want = sides["sdpa_grouped"](*layers[0]).float()
    errors = {
        name: (side(*layers[0]).float() - want).abs().max().item() for name, side in sides.items()
    }
    print(f"largest distance from scaled_dot_product_attention: {errors}")
    backends = backends_of(sides, layers[0])
    if device.type == "cuda":
        sides = {name: captured(side, layers) for name, side in sides.items()}
    runs: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        seconds_per_layer(side, layers, device)
    for _ in range(args.repeats):
        for name, side in sides.items():
            runs[name].append(seconds_per_layer(side, layers, device))
    report(args, device, runs, read / copy_speed(device), errors, backends)


if __name__ == "__main__":
    main()
