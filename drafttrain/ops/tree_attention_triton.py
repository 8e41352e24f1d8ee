"""Tree attention over a packed batch: rows of different length, each with a chain or a tree of new tokens of its own.

    row 0: L = 5, root and 2 nodes      new tokens   r0 a0 b0 | r1 | r2 a2 b2 c2      N = 8
    row 1: L = 9, root alone            offsets      0          3    4            8
    row 2: L = 2, root and 3 nodes

On a GPU two Triton kernels do the work (`tree_attention_kernels`); elsewhere, and in tests as the reference, a loop over
rows calls `tree_attention`, or a masked product does where a plan is static, so that only its tensors are known. What the
forward looks like is said once, in a `PackedPlan` that all layers share. Who sees whom among new tokens is a bit per pair in
trees and nothing at all in chains, so no mask is quadratic in the prompt. A long prompt without a prefix is still better
served by torch's causal attention, which the reference picks for it.
"""

from __future__ import annotations

import functools
import importlib.util
import math
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


class PlanShape(NamedTuple):
    """What a plan's tensors are sized by. Static plans are larger than what they hold.

    Attributes:
        rows: R; tokens: N; max_new: most new tokens of any row.
        words: of 32 bits, enough for the new tokens of any tree.
    """

    rows: int
    tokens: int
    max_new: int
    words: int

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """Of rows, offsets, prefix_lens, chains, positions and ancestors."""
        n = self.rows
        return [(n,), (n + 1,), (n,), (n,), (self.tokens,), (self.tokens, self.words)]

    @property
    def numbers(self) -> int:
        """int32 numbers of all tensors together; each starts on 16 bytes, as Triton compiles unaligned pointers anew."""
        return sum(_aligned(math.prod(size)) for size in self.sizes)


def _aligned(count: int) -> int:
    return -(-count // 4) * 4


@dataclass(frozen=True)
class PackedPlan:
    """Where the N new tokens of one forward stand; R rows, row r's new tokens at offsets[r] .. offsets[r+1].

    All tensors are int32 on the device, views of one. A static plan has a shape that fits many forwards, whose numbers
    (`pack_plan`) are copied into it: nothing that a captured CUDA graph has baked in depends on lengths or trees.

    Attributes:
        layouts: R layouts on the host, the only thing that `packed_reference` reads; empty in a static plan.
        cache_rows: `rows` on the host, likewise.
        rows: [R] each sequence's row of the cache.
        offsets: [R+1].
        prefix_lens: [R], L_r.
        chains: [R], 1 where new tokens see all earlier ones, 0 where `ancestors` says whom they see.
        positions: [N] absolute positions, L_r + depth.
        ancestors: [N, words]; bit j of word w: the token sees new token 32 * w + j of its row. Not read for chains.
        max_new: no row has more new tokens.
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
        shape = PlanShape(len(layouts), sum(counts), max(counts), words)
        numbers = torch.from_numpy(pack_plan(layouts, rows, shape)).to(device)
        return PackedPlan(tuple(layouts), rows, *_views(numbers, shape), max_new=shape.max_new)

    @staticmethod
    def static(numbers: Tensor, shape: PlanShape) -> PackedPlan:
        """A plan over [shape.numbers] int32 numbers on the device, whatever they will hold."""
        return PackedPlan((), (), *_views(numbers, shape), max_new=shape.max_new)


def _views(numbers: Tensor, shape: PlanShape) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    counts = [math.prod(size) for size in shape.sizes]
    pieces = numbers.split([_aligned(count) for count in counts])
    parts = (piece[:n].view(size) for piece, n, size in zip(pieces, counts, shape.sizes, strict=True))
    rows, offsets, prefix_lens, chains, positions, ancestors = parts
    return rows, offsets, prefix_lens, chains, positions, ancestors


def pack_plan(layouts: Sequence[TreeLayout], rows: Sequence[int], shape: PlanShape) -> np.ndarray:
    """The numbers of a plan, [shape.numbers] int32.

    Tokens that pad it belong to the last row: they stand where its root stands, see what it sees and themselves, and take
    slots behind its new tokens. Rows that pad it are empty.
    """
    counts = [layout.count for layout in layouts]
    pads, spare = shape.tokens - sum(counts), [0] * (shape.rows - len(layouts))
    counts[-1] += pads
    assert pads >= 0 and max(counts) <= shape.max_new, "the plan's shape is too small"
    # A chain has no bits: its tokens see all earlier ones, and a long prompt would need a quadratic number.
    ancestors = [
        np.zeros((layout.count, shape.words), np.uint32)
        if layout.parents is None
        else layout.ancestor_words(shape.words)
        for layout in layouts
    ]
    if pads:
        own = np.arange(counts[-1] - pads, counts[-1])
        bits = np.zeros((pads, shape.words), dtype=np.uint32)
        bits[np.arange(pads), own // _WORD] = np.uint32(1) << (own % _WORD).astype(np.uint32)
        ancestors.append(bits)
    parts = [
        np.asarray([*rows, *spare]),
        np.cumsum([0, *counts, *spare]),
        np.asarray([*(layout.prefix_len for layout in layouts), *spare]),
        np.asarray([*(layout.parents is None for layout in layouts), *spare]),
        np.concatenate([layout.depths + layout.prefix_len for layout in layouts] + [[layouts[-1].prefix_len] * pads]),
        np.concatenate(ancestors).view(np.int32),
    ]
    flat = np.zeros(shape.numbers, dtype=np.int32)
    start = 0
    for part in parts:
        flat[start : start + part.size] = part.ravel()
        start += _aligned(part.size)
    return flat


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
    options: dict[str, Any] = {"scaling": scaling, "window": window, "softcap": softcap, "sinks": sinks}
    if torch.compiler.is_compiling():
        tensors = (plan.rows, plan.offsets, plan.prefix_lens, plan.chains, plan.positions, plan.ancestors)
        return _opaque(query, keys, values, *tensors, plan.max_new, **options)
    if query.is_cuda and has_triton():
        return _launch(query, keys, values, plan, **options)
    return (packed_reference if plan.layouts else static_reference)(query, keys, values, plan, **options)


@torch.library.custom_op("drafttrain::packed_tree_attention", mutates_args=())
def _opaque(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    offsets: Tensor,
    prefix_lens: Tensor,
    chains: Tensor,
    positions: Tensor,
    ancestors: Tensor,
    max_new: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """What torch.compile sees of `packed_tree_attention`: one operator whose inside it leaves alone."""
    plan = PackedPlan((), (), rows, offsets, prefix_lens, chains, positions, ancestors, max_new)
    return packed_tree_attention(
        query, keys, values, plan, scaling=scaling, window=window, softcap=softcap, sinks=sinks
    )


@_opaque.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], values.shape[3]).transpose(1, 2)


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


def static_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: PackedPlan,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same from the plan's tensors alone, over all slots of the cache; arguments as in `packed_tree_attention`.

    No shape and no branch depends on lengths, so it can be captured; it reads what the kernels read, and as slowly as that
    sounds: every token multiplies with every slot of every row.
    """
    count, (cache_rows, kv_heads, capacity, _) = query.shape[2], keys.shape
    token = torch.arange(count, device=query.device)
    row = torch.searchsorted(plan.offsets[1:], token.to(torch.int32), right=True)
    first, prefix, chain = (x[row][:, None] for x in (plan.offsets, plan.prefix_lens, plan.chains))
    slot = torch.arange(capacity, device=query.device)
    node = slot - prefix
    new = (node >= 0) & (node < plan.offsets[row + 1][:, None] - first)
    bits = plan.ancestors.gather(1, (node // _WORD).clamp(0, plan.ancestors.shape[1] - 1)) >> (node % _WORD) & 1
    visible = (node < 0) | new & torch.where(chain != 0, node <= token[:, None] - first, bits != 0)
    if window is not None:
        stands = torch.where(new, plan.positions[(first + node).clamp(0, count - 1)], slot)
        visible &= plan.positions[:, None] - stands < window
    own = torch.arange(cache_rows, device=query.device) == plan.rows[row][:, None]
    visible = (own[:, :, None] & visible[:, None, :]).flatten(1)  # [N, slots of all rows]
    # What nobody sees may be nan.
    keys, values = (x.transpose(0, 1).flatten(1, 2).masked_fill(~visible.any(0)[:, None], 0) for x in (keys, values))
    scores = query[0].unflatten(0, (kv_heads, -1)) @ keys[:, None].transpose(2, 3) * scaling
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores.float().masked_fill(~visible, float("-inf")).flatten(0, 1)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, count, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : visible.shape[1]].to(values.dtype)
    out = weights.unflatten(0, (kv_heads, -1)) @ values[:, None]
    return out.flatten(0, 1).transpose(0, 1).contiguous().transpose(0, 1)[None]


@functools.cache
def has_triton() -> bool:
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
