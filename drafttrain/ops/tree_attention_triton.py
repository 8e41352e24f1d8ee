"""Tree attention over a packed batch: rows of different length, each with its own chain or tree.

    row 0: L = 5, root and 2 nodes      new tokens   r0 a0 b0 | r1 | r2 a2 b2 c2      N = 8
    row 1: L = 9, root alone            offsets      0          3    4            8
    row 2: L = 2, root and 3 nodes

On a GPU two Triton kernels compute it (tree_attention_kernels.py); elsewhere, and as the kernels'
reference in tests, a masked product over all slots does. All layers share one `PackedPlan`.
Visibility among new tokens is a bit per pair in trees and implied in chains, so no mask is
quadratic in the prompt. For a long prompt without a prefix torch's causal attention is faster;
callers choose it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from drafttrain.ops.launch import has_triton, run_kernel
from drafttrain.ops.tree_attention import AttentionForm, TreeLayout, masked_attention

# More parts than this cost more in the merge than they gain.
_MOST_PARTS = 128
_WORD = 32
Opened = Sequence[tuple[int, TreeLayout]]  # row of the cache, and prefix and tree (or chain)


class PlanShape(NamedTuple):
    """Sizes of a plan's tensors. Static plans are larger than their contents."""

    rows: int  # R
    tokens: int  # N
    max_new: int  # most new tokens of any row
    words: int  # of 32 bits, enough for the new tokens of any tree

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """Shapes of rows, offsets, prefix_lens, chains, helds, places, positions and ancestors."""
        n = self.rows
        return [(n,), (n + 1,), (n,), (n,), (n,), (n,), (self.tokens,), (self.tokens, self.words)]

    @property
    def numbers(self) -> int:
        """Count of int32 numbers in all tensors.

        Each tensor starts on 16 bytes: Triton compiles unaligned pointers separately.
        """
        return sum(_aligned(math.prod(size)) for size in self.sizes)


def _aligned(count: int) -> int:
    """The count rounded up to 16 bytes of int32 numbers."""
    return -(-count // 4) * 4


class PackedPlan(NamedTuple):
    """Where the N new tokens of one forward stand, in R rows.

    Row r's new tokens are those from offsets[r] to offsets[r+1]. A tree may grow over several
    forwards: then a row holds the tokens of earlier ones in the slots behind its prefix, and its
    new tokens continue their numbers. Positions and ancestors stand at places[r] + number, for held
    tokens too.

    All tensors are int32 on the device, views of one. A static plan has a shape that fits many
    forwards, whose numbers (`pack_plan`) are copied into it: nothing that a captured CUDA graph
    holds depends on lengths or trees.
    """

    rows: Tensor  # [R], each sequence's row of the cache
    offsets: Tensor  # [R+1]
    prefix_lens: Tensor  # [R], L_r
    # [R], 1 if new tokens see all earlier ones, 0 if `ancestors` defines what they see
    chains: Tensor
    helds: Tensor  # [R], tokens of the row's tree that earlier forwards stored
    places: Tensor  # [R], where the row's tree begins in the next two
    positions: Tensor  # [tree tokens], absolute: L_r + depth
    # [tree tokens, words], bit j of word w: the token sees token 32 * w + j of its row; not read
    # for chains
    ancestors: Tensor
    max_new: int  # no row has more new tokens
    queries: int  # N

    @property
    def tensors(self) -> list[Tensor]:
        """The eight tensors in order."""
        return list(self[:8])

    @staticmethod
    def build(opened: Opened, device: torch.device | str = "cpu") -> PackedPlan:
        """Packs R parts, in order, into one upload. device: of the queries."""
        counts = [layout.count for _, layout in opened]
        words = 1
        for _, layout in opened:
            if layout.parents is not None:
                words = max(words, -(-layout.count // _WORD))
        shape = PlanShape(len(opened), sum(counts), max(counts), words)
        numbers = torch.from_numpy(pack_plan(opened, shape))
        return PackedPlan.static(numbers.to(device), shape)

    @staticmethod
    def static(numbers: Tensor, shape: PlanShape) -> PackedPlan:
        """A plan over [shape.numbers] int32 numbers on the device, which later copies may replace."""
        views = []
        begin = 0
        for size in shape.sizes:
            count = math.prod(size)
            views.append(numbers[begin : begin + count].view(size))
            begin += _aligned(count)
        return PackedPlan._make([*views, shape.max_new, shape.tokens])


def pack_plan(opened: Opened, shape: PlanShape) -> np.ndarray:
    """The numbers of a plan, [shape.numbers] int32.

    Padding tokens belong to the last row: they have its root's position, see what the root sees and
    themselves, and take slots behind its new tokens. Padding rows are empty.
    """
    rows = [row for row, _ in opened]
    counts = [layout.count for _, layout in opened]
    pads = shape.tokens - sum(counts)
    counts[-1] += pads
    if pads < 0 or max(counts) > shape.max_new or min(rows) < 0:
        raise ValueError(
            f"rows={rows} with {counts} tokens do not fit the plan's shape {tuple(shape)}"
        )
    # Numbers per row; those of padding rows stay 0.
    cache_rows = np.zeros(shape.rows, np.int32)
    prefix_lens = np.zeros(shape.rows, np.int32)
    chains = np.zeros(shape.rows, np.int32)
    helds = np.zeros(shape.rows, np.int32)  # a plan of the host has no held tokens
    offsets = np.full(shape.rows + 1, shape.tokens, np.int32)
    # Numbers per token; padding tokens stand at the last row's root.
    positions = np.full(shape.tokens, opened[-1][1].prefix_len, np.int32)
    ancestors = np.zeros((shape.tokens, shape.words), np.uint32)
    begin = 0
    for i, (row, layout) in enumerate(opened):
        end = begin + layout.count
        cache_rows[i] = row
        prefix_lens[i] = layout.prefix_len
        chains[i] = layout.parents is None
        offsets[i] = begin
        positions[begin:end] = layout.depths + layout.prefix_len
        # A chain has no bits: a long prompt would need a quadratic number.
        if layout.parents is not None:
            ancestors[begin:end] = layout.ancestor_words(shape.words)
        begin = end
    # Each padding token sees itself, by its number in the last row.
    own = np.arange(counts[-1] - pads, counts[-1])  # [pads]
    bit = np.uint32(1) << (own % _WORD).astype(np.uint32)
    ancestors[begin + np.arange(pads), own // _WORD] = bit

    flat = np.zeros(shape.numbers, dtype=np.int32)
    begin = 0
    for part in (
        cache_rows,
        offsets,
        prefix_lens,
        chains,
        helds,
        offsets[:-1],  # places: without held tokens a tree begins where its new tokens do
        positions,
        ancestors.view(np.int32),
    ):
        flat[begin : begin + part.size] = part.ravel()
        begin += _aligned(part.size)
    return flat


def packed_tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: PackedPlan,
    **form: Unpack[AttentionForm],
) -> Tensor:
    """Attends with N packed new tokens over the cache, which holds their keys already.

    The new tokens of row r are in its slots [L_r, L_r + n_r).

    Args:
        query: [1, heads, N, head_dim], RoPE applied.
        keys: [cache rows, kv_heads, capacity, head_dim]; query head i reads key head i // (heads /
            kv_heads).
        values: [cache rows, kv_heads, capacity, value_dim]. Slots from L_r + n_r on may hold
            anything.
        plan: of this forward, on the same device.

    Returns:
        [1, heads, N, value_dim], whose transpose [1, N, heads, value_dim] is contiguous.
    """
    if query.is_cuda and has_triton():
        return _launch(query, keys, values, plan, **form)
    return static_reference(query, keys, values, plan, **form)


def static_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: PackedPlan,
    **form: Unpack[AttentionForm],
) -> Tensor:
    """`packed_tree_attention` in plain torch, from the plan's tensors alone, over all slots of the
    cache.

    No shape and no branch depends on lengths, so it can be captured. It is slow: every token
    multiplies with every slot of every row.
    """
    window = form["window"]
    count = query.shape[2]
    cache_rows, kv_heads, capacity, _ = keys.shape

    # Each token's row, its number in the row's tree, and where its positions and bits stand.
    token = torch.arange(count, device=query.device)
    row = torch.searchsorted(
        plan.offsets[1:],
        token.to(torch.int32),
        right=True,
    )  # [N]
    held = plan.helds[row]
    own = held + token - plan.offsets[row]  # [N]
    at = plan.places[row] + own  # [N]

    # Slots of its row that it sees: the prefix, and what a chain or the bits allow.
    slot = torch.arange(capacity, device=query.device)
    node = slot - plan.prefix_lens[row][:, None]  # [N, capacity] number in the tree, or negative
    tree_size = held + plan.offsets[row + 1] - plan.offsets[row]  # [N]
    new = (node >= 0) & (node < tree_size[:, None])
    word = (node // _WORD).clamp(0, plan.ancestors.shape[1] - 1)
    bits = plan.ancestors[at].gather(1, word)  # [N, capacity] the words that hold the bits
    bits = (bits >> (node % _WORD)) & 1
    chain = plan.chains[row][:, None] != 0  # [N, 1]
    related = torch.where(chain, node <= own[:, None], bits != 0)
    visible = (node < 0) | new & related  # [N, capacity]
    if window is not None:
        place = (plan.places[row][:, None] + node).clamp(0, len(plan.positions) - 1)
        position = torch.where(new, plan.positions[place], slot)
        visible &= plan.positions[at][:, None] - position < window

    # Slots of all rows.
    own_row = torch.arange(cache_rows, device=query.device) == plan.rows[row][:, None]
    visible = (own_row[:, :, None] & visible[:, None, :]).flatten(1)  # [N, cache rows * capacity]
    # Masked slots may hold NaN, which a weight of 0 does not cancel.
    unseen = ~visible.any(0)[:, None]
    keys = keys.transpose(0, 1).flatten(1, 2).masked_fill(unseen, 0)  # [kv_heads, slots, e]
    values = values.transpose(0, 1).flatten(1, 2).masked_fill(unseen, 0)

    mask = torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible, float("-inf"))
    mask = mask.repeat(query.shape[1] // kv_heads, 1)  # [group * N, slots]
    out = masked_attention(query, keys[None], values[None], mask, form)
    return out.transpose(1, 2).contiguous().transpose(1, 2)  # laid out as the kernels' output


class Geometry(NamedTuple):
    """How the work is split into programs."""

    block_m: int  # (token, head) pairs of a program
    block_n: int  # slots per step of its loop
    parts: int  # into which the slots of a row are split
    warps: int  # per program
    stages: int  # blocks of slots in flight


def choose_geometry(
    pairs: int,
    groups: int,
    span: int,
    width: int,
    value_width: int,
    itemsize: int,
    processors: int,
    shared: int,
) -> Geometry:
    """Tiles that hold a row's full group if they can, and as many parts as fill the device once.

    Nothing depends on the sequences' lengths, so a captured CUDA graph stays valid while they grow.

    Args:
        pairs: most (token, head) pairs of a row and key head.
        groups: rows times key heads.
        span: most slots that a row reads.
        width, value_width: of a key and a value.
        itemsize: bytes of a number.
        processors: of the device.
        shared: bytes of shared memory per program.
    """
    padded = _power_of_two(width)
    value_padded = _power_of_two(value_width)
    # As large as registers allow (the compiler's figures for sm_80 to sm_90). Products in float32
    # run without tensor cores and keep full operands in registers.
    if itemsize == 4:
        most = 16
        block_n = 16
    elif max(padded, value_padded) <= 128:
        most = 128
        block_n = 64
    else:
        most = 64
        block_n = 32
    block_m = min(_power_of_two(pairs), most)

    def stages() -> int:
        """Blocks of keys and values that fit beside the queries and their scores."""
        free = shared - block_m * (padded + block_n) * itemsize
        return free // (block_n * (padded + value_padded) * itemsize)

    while stages() < 2 and max(block_m, block_n) > 16:
        if block_m > block_n:
            block_m //= 2
        else:
            block_n //= 2
    tiles = -(-pairs // block_m)
    resident = 1 if block_m >= 128 else 2  # programs of a processor
    parts = processors * resident // (groups * tiles)
    useful = -(-span // (2 * block_n))  # parts of at least two blocks
    parts = max(1, min(parts, useful, _MOST_PARTS))
    wide = block_m * max(padded, value_padded) >= 64 * 128
    return Geometry(
        block_m=block_m,
        block_n=block_n,
        parts=parts,
        warps=8 if wide else 4,
        stages=max(1, min(stages(), 3)),
    )


def _power_of_two(x: int) -> int:
    """The smallest power of two that is at least x and 16, the narrowest matrix product of Triton."""
    return max(16, 1 << (x - 1).bit_length())


@functools.cache
def _device_limits(index: int) -> tuple[int, int]:
    """Processors, and bytes of shared memory that a program may use."""
    import triton

    facts = triton.runtime.driver.active.utils.get_device_properties(index)
    return facts["multiprocessor_count"], facts["max_shared_mem"]


def _check(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: PackedPlan,
    sinks: Tensor | None,
) -> None:
    """Raises TypeError or ValueError for what the kernels would read wrongly.

    Cache rows and lengths, which live on the device, were checked by `TreeCache.open` and
    `pack_plan`.
    """
    heads = query.shape[1]
    _, kv_heads, _, width = keys.shape
    if not query.dtype == keys.dtype == values.dtype:
        raise TypeError(
            f"queries {query.dtype}, keys {keys.dtype} and values {values.dtype} must share a dtype"
        )
    if not query.stride(3) == keys.stride(3) == values.stride(3) == 1:
        raise ValueError("the last dimension of queries, keys and values must be contiguous")
    if plan.queries != query.shape[2] or len(query) != 1:
        raise ValueError(
            f"queries {list(query.shape)}: the plan belongs to another forward, with {plan.queries} tokens"
        )
    if query.shape[3] != width or keys.shape[:3] != values.shape[:3] or heads % kv_heads:
        found = (
            f"queries {list(query.shape)}, keys {list(keys.shape)} and values {list(values.shape)}"
        )
        raise ValueError(f"{found} do not fit together")
    tensors = [keys, values]
    tensors += plan.tensors
    fits = True
    if sinks is not None:
        tensors.append(sinks)
        fits = sinks.shape == (heads,)
    if not fits or any(tensor.device != query.device for tensor in tensors):
        raise ValueError(f"keys, values, plan and sinks [{heads}] must be on {query.device}")


def _launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: PackedPlan,
    geometry: Geometry | None = None,
    **form: Unpack[AttentionForm],
) -> Tensor:
    """Runs the kernels. `geometry` is chosen from the device by default."""
    from drafttrain.ops.tree_attention_kernels import attend_parts, merge_parts

    window = form["window"]
    softcap = form["softcap"]
    sinks = form["sinks"]
    _, heads, count, width = query.shape
    kv_heads = keys.shape[1]
    capacity = keys.shape[2]
    value_width = values.shape[3]
    group = heads // kv_heads
    row_count = len(plan.rows)
    _check(query, keys, values, plan, sinks)
    if geometry is None:
        span = capacity
        if window is not None:
            span = min(capacity, window + plan.max_new)
        processors, shared = _device_limits(query.device.index)
        geometry = choose_geometry(
            pairs=plan.max_new * group,
            groups=row_count * kv_heads,
            span=span,
            width=width,
            value_width=value_width,
            itemsize=query.element_size(),
            processors=processors,
            shared=shared,
        )
    merged = geometry.parts > 1
    out = query.new_empty(1, count, heads, value_width)
    partial = out
    logs = out  # not written unless parts are merged
    if merged:
        partial = query.new_empty(
            geometry.parts,
            count,
            heads,
            value_width,
            dtype=torch.float32,
        )
        logs = query.new_empty(
            geometry.parts,
            count,
            heads,
            dtype=torch.float32,
        )
    value_padded = _power_of_two(value_width)
    # Tiles of one row and part are neighbors, so they run together and share what they read through
    # the L2 cache.
    tiles = -(-plan.max_new * group // geometry.block_m)
    run_kernel(
        attend_parts,
        (tiles, geometry.parts, row_count * kv_heads),
        query,
        keys,
        values,
        query if sinks is None else sinks,  # not read
        partial,
        logs,
        *plan.tensors,
        query.stride(1),
        query.stride(2),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        count,
        plan.ancestors.shape[1],
        geometry.parts,
        window or 0,  # not read without a window
        form["scaling"],
        softcap or 1.0,  # not read without a soft cap
        KV_HEADS=kv_heads,
        GROUP=group,
        WIDTH=width,
        PADDED=_power_of_two(width),
        VALUE_WIDTH=value_width,
        VALUE_PADDED=value_padded,
        BLOCK_M=geometry.block_m,
        BLOCK_N=geometry.block_n,
        MERGED=merged,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        PRECISION="ieee",
        num_warps=geometry.warps,
        num_stages=geometry.stages,
    )
    if merged:
        run_kernel(
            merge_parts,
            (count, heads),
            partial,
            logs,
            out,
            count,
            geometry.parts,
            HEADS=heads,
            CHUNK=16,
            VALUE_WIDTH=value_width,
            VALUE_PADDED=value_padded,
        )
    return out.transpose(1, 2)
