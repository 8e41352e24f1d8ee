"""Tree attention over a packed batch: rows of different length, each with a chain or a tree of new tokens of its own.

    row 0: L = 5, root and 2 nodes      new tokens   r0 a0 b0 | r1 | r2 a2 b2 c2      N = 8
    row 1: L = 9, root alone            offsets      0          3    4            8
    row 2: L = 2, root and 3 nodes

On a GPU two Triton kernels do the work (`tree_attention_kernels`); elsewhere, and in tests as the reference, a loop over
rows calls `tree_attention`. What the forward looks like is said once, in a `PackedPlan` that all layers share. Who sees whom
among new tokens is a bit per pair in trees and nothing at all in chains, so no mask is quadratic in the prompt. A long prompt
without a prefix is still better served by torch's causal attention, which the reference picks for it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafttrain.ops.tree_attention import TreeLayout, tree_attention

# More parts than this cost more in the merge than they gain.
_MOST_PARTS = 128
_WORD = 32


@dataclass(frozen=True)
class PackedPlan:
    """Where the N new tokens of one forward stand; R rows, row r's new tokens at offsets[r] .. offsets[r+1].

    All tensors are int32 on the device. A captured CUDA graph replays with new contents copied into them, as long as
    `max_new` and the shapes stay; tokens that pad such a batch form a row of their own on a spare cache row.

    Attributes:
        layouts: R layouts on the host; the reference reads nothing else.
        rows: [R] each sequence's row of the cache; `cache_rows`: the same on the host.
        offsets: [R+1].
        prefix_lens: [R], L_r.
        chains: [R], 1 where new tokens see all earlier ones, 0 where `ancestors` says whom they see.
        positions: [N] absolute positions, L_r + depth.
        ancestors: [N, words]; bit j of word w: the token sees new token 32 * w + j of its row. Not read for chains.
        max_new: most new tokens of any row.
    """

    layouts: tuple[TreeLayout, ...]
    cache_rows: tuple[int, ...]
    rows: Tensor
    offsets: Tensor
    prefix_lens: Tensor
    chains: Tensor
    positions: Tensor
    ancestors: Tensor
    max_new: int

    @staticmethod
    def build(
        layouts: Sequence[TreeLayout], rows: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> PackedPlan:
        """Packs R layouts, in order, into one upload.

        Args:
            layouts: prefix length and tree (or chain) of each row.
            rows: each one's row of the cache; 0 .. R-1 unless given.
            device: of the queries.
        """
        rows = tuple(range(len(layouts)) if rows is None else rows)
        counts = [layout.count for layout in layouts]
        words = max([1, *(-(-layout.count // _WORD) for layout in layouts if layout.parents is not None)])
        parts = [
            np.asarray(rows),
            np.cumsum([0, *counts]),
            np.asarray([layout.prefix_len for layout in layouts]),
            np.asarray([layout.parents is None for layout in layouts]),
            np.concatenate([layout.depths + layout.prefix_len for layout in layouts]),
            np.concatenate([_ancestor_words(layout, words) for layout in layouts]),
        ]
        # Every tensor starts on 16 bytes: Triton compiles unaligned pointers anew.
        room = [-(-part.size // 4) * 4 for part in parts]
        flat = np.zeros(sum(room), dtype=np.int32)
        for part, start in zip(parts, np.cumsum([0, *room]), strict=False):
            flat[start : start + part.size] = part.ravel()
        pieces = torch.from_numpy(flat).to(device).split(room)
        tensors = (piece[: part.size].view(part.shape) for piece, part in zip(pieces, parts, strict=True))
        cache_rows, offsets, prefix_lens, chains, positions, ancestors = tensors
        return PackedPlan(
            tuple(layouts), rows, cache_rows, offsets, prefix_lens, chains, positions, ancestors, max(counts)
        )


def _ancestor_words(layout: TreeLayout, words: int) -> np.ndarray:
    """[n, words] int32; zeros for a chain."""
    if layout.parents is None:
        return np.zeros((layout.count, words), dtype=np.int32)
    seen = [1]
    for node, parent in enumerate(layout.parents, 1):
        seen.append(seen[parent + 1] | 1 << node)
    raw = b"".join(bits.to_bytes(4 * words, "little") for bits in seen)
    return np.frombuffer(raw, dtype="<i4").reshape(len(seen), words)


def packed_tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: PackedPlan,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends with N packed new tokens over the cache, whose slots [L_r, L_r + n_r) hold their keys already.

    Args:
        query: [1, heads, N, head_dim], RoPE applied.
        keys: [cache rows, kv_heads, capacity, head_dim]; query head i reads key head i // (heads / kv_heads).
        values: [cache rows, kv_heads, capacity, value_dim]. Slots from L_r + n_r on may hold anything.
        plan: of this forward, on the same device.
        scaling: factor of the dot products.
        window: visible positions, own included; None for all.
        softcap: c in c * tanh(score / c), applied to scaled scores (Gemma 2).
        sinks: [heads], a logit per head that takes part in the softmax and contributes no value (gpt-oss).

    Returns:
        [1, heads, N, value_dim], laid out so that its transpose [1, N, heads, value_dim] is contiguous.
    """
    attend = _launch if query.is_cuda and _has_triton() else packed_reference
    return attend(query, keys, values, plan, scaling=scaling, window=window, softcap=softcap, sinks=sinks)


def packed_reference(query: Tensor, keys: Tensor, values: Tensor, plan: PackedPlan, **options: Any) -> Tensor:
    """The same in plain torch, one row after the other; arguments as in `packed_tree_attention`."""
    out = query.new_empty(1, query.shape[2], query.shape[1], values.shape[3])
    start = 0
    for layout, row in zip(plan.layouts, plan.cache_rows, strict=True):
        end, total = start + layout.count, layout.prefix_len + layout.count
        if layout.count:
            key, value = keys[row, None, :, :total], values[row, None, :, :total]
            part = tree_attention(query[:, :, start:end], key, value, layout, **options)
            out[:, start:end] = part.transpose(1, 2)
        start = end
    return out.transpose(1, 2)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class Geometry(NamedTuple):
    """How the work is cut.

    Attributes:
        block_m: (token, head) pairs of a program; block_n: slots it takes at a time.
        parts: in which the slots of a row are split.
        warps: per program; stages: blocks of slots in flight.
    """

    block_m: int
    block_n: int
    parts: int
    warps: int
    stages: int


def choose_geometry(
    pairs: int, groups: int, span: int, width: int, value_width: int, itemsize: int, processors: int, shared: int
) -> Geometry:
    """Tiles that hold a row's whole group where they can, and as many parts as fill the device once.

    Nothing depends on the sequences' lengths, so a captured CUDA graph stays valid while they grow.

    Args:
        pairs: most (token, head) pairs of a row and key head.
        groups: rows times key heads.
        span: most slots that a row reads.
        width, value_width: of a key and a value; itemsize: bytes of a number.
        processors: of the device; shared: bytes of fast memory per program.
    """
    padded, value_padded = _power_of_two(width), _power_of_two(value_width)
    # As large as registers allow (the compiler's figures for sm_80 to sm_90). Products in full precision run without
    # tensor cores and keep whole operands in registers.
    most, block_n = (16, 16) if itemsize == 4 else (128, 64) if max(padded, value_padded) <= 128 else (64, 32)
    block_m = min(_power_of_two(pairs), most)

    def stages() -> int:
        free = shared - block_m * (padded + block_n) * itemsize
        return free // (block_n * (padded + value_padded) * itemsize)

    while stages() < 2 and max(block_m, block_n) > 16:
        block_m, block_n = (block_m // 2, block_n) if block_m > block_n else (block_m, block_n // 2)
    tiles = -(-pairs // block_m)
    resident = 1 if block_m >= 128 else 2
    parts = processors * resident // (groups * tiles)
    parts = max(1, min(parts, -(-span // (2 * block_n)), _MOST_PARTS))
    warps = 8 if block_m * max(padded, value_padded) >= 64 * 128 else 4
    return Geometry(block_m, block_n, parts, warps, max(1, min(stages(), 3)))


def _power_of_two(x: int) -> int:
    """The smallest power of two that is at least x, and at least 16, the narrowest product of matrices in Triton."""
    return max(16, 1 << (x - 1).bit_length())


@functools.cache
def _device_limits(index: int) -> tuple[int, int]:
    """Processors, and bytes of shared memory that a program may use."""
    import triton

    facts = triton.runtime.driver.active.utils.get_device_properties(index)
    return facts["multiprocessor_count"], facts["max_shared_mem"]


def _launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: PackedPlan,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    geometry: Geometry | None = None,
) -> Tensor:
    """Runs the kernels. `geometry` is chosen from the device unless given."""
    from drafttrain.ops.tree_attention_kernels import attend_parts, merge_parts

    _, heads, count, width = query.shape
    kv_heads, capacity, value_width = keys.shape[1], keys.shape[2], values.shape[3]
    group, row_count = heads // kv_heads, len(plan.rows)
    assert query.dtype == keys.dtype == values.dtype, "queries, keys and values share a dtype"
    assert query.stride(3) == keys.stride(3) == values.stride(3) == 1, "the last dimension must be contiguous"
    assert len(plan.positions) == count, "the plan is of another forward"
    if geometry is None:
        span = capacity if window is None else min(capacity, window + plan.max_new)
        pairs, groups = plan.max_new * group, row_count * kv_heads
        limits = _device_limits(query.device.index)
        geometry = choose_geometry(pairs, groups, span, width, value_width, query.element_size(), *limits)
    out = query.new_empty(1, count, heads, value_width)
    partial, logs = out, out
    if geometry.parts > 1:
        partial = query.new_empty(geometry.parts, count, heads, value_width, dtype=torch.float32)
        logs = query.new_empty(geometry.parts, count, heads, dtype=torch.float32)
    padded, value_padded = _power_of_two(width), _power_of_two(value_width)
    tiles = -(-plan.max_new * group // geometry.block_m)
    # Tiles of one row and part are neighbours, so they run together and share what they read through the L2 cache.
    attend_parts[(tiles, geometry.parts, row_count * kv_heads)](
        query,
        keys,
        values,
        query if sinks is None else sinks,
        partial,
        logs,
        plan.rows,
        plan.offsets,
        plan.prefix_lens,
        plan.chains,
        plan.positions,
        plan.ancestors,
        query.stride(1),
        query.stride(2),
        *keys.stride()[:3],
        *values.stride()[:3],
        count,
        plan.ancestors.shape[1],
        geometry.parts,
        window or 0,
        scaling,
        softcap or 1.0,
        KV_HEADS=kv_heads,
        GROUP=group,
        WIDTH=width,
        VALUE_WIDTH=value_width,
        PADDED=padded,
        VALUE_PADDED=value_padded,
        BLOCK_M=geometry.block_m,
        BLOCK_N=geometry.block_n,
        MERGED=geometry.parts > 1,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        PRECISION="ieee",
        num_warps=geometry.warps,
        num_stages=geometry.stages,
    )
    if geometry.parts > 1:
        sizes = {"HEADS": heads, "VALUE_WIDTH": value_width, "VALUE_PADDED": value_padded, "CHUNK": 16}
        merge_parts[(count, heads)](partial, logs, out, count, geometry.parts, **sizes)
    return out.transpose(1, 2)
