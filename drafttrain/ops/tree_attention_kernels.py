"""Triton kernels of packed tree attention: partial results per part of the keys, then their merge.

    program (tile, part, row and key head)          rows of a tile: all query heads of the group, token after token

              slots   0 ......................... L | L .... L+n        token 0   head 0  head 1  head 2
              part        0    |    1    |    2     |   (3)             token 1   head 0  head 1  head 2
                      dense: no mask but the window | ancestor bits     ...

Softmax runs in base 2 and in float32. A part writes its normalized output and the logarithm of its
weight, so the merge is one weighted mean. Lengths are read on the device: the grid depends on upper
bounds alone, and programs beyond a row's end return at once. A third kernel moves accepted keys and
values together.

Source: online softmax with split keys as in Flash-Decoding (Dao et al., 2023).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Triton's interpreter multiplies the bit patterns of bfloat16 numbers, so it needs wider ones.
WIDEN = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _read(
    base,
    slots,
    stride,
    end,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    # Zero beyond the end: an unwritten slot may hold NaN, which a weight of 0 does not cancel.
    dims = tl.arange(0, PADDED)
    mask = (slots < end)[:, None] & (dims < WIDTH)[None, :]
    return tl.load(
        base + slots[:, None] * stride + dims[None, :],
        mask=mask,
        other=0.0,
    )


@triton.jit
def _dot(left, right, plus, PRECISION: tl.constexpr):
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, plus, input_precision=PRECISION)


@triton.jit
def _step(
    top, total, mean, query, keys, values, slot, end, key_stride, value_stride,
    token, position, prefix, positions, ancestors, words, used, window, scaling, softcap,
    BLOCK_N: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
):  # fmt: skip
    """Adds a block of slots to the running maximum [m], sum [m] and weighted sum [m, value_width]."""
    slots = slot + tl.arange(0, BLOCK_N)
    key = _read(keys, slots, key_stride, end, WIDTH, PADDED)
    scores = _dot(query, tl.trans(key), None, PRECISION)
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1), which is right at both infinities.
        grown = tl.exp2(scores * (2 * LOG2_E * scaling / softcap))
        scores = (1 - 2 / (grown + 1)) * (softcap * LOG2_E)
    else:
        scores = scores * (scaling * LOG2_E)
    if TREE:
        new = (slots >= prefix) & (slots < end)
        node = tl.maximum(slots - prefix, 0)
        # A block of up to 64 slots has its bits in 3 words, wherever it starts.
        low = tl.maximum(slot - prefix, 0) // 32
        words_at = ancestors + token * words + low
        word = tl.load(words_at, mask=low < used, other=0)[:, None]
        for more in tl.static_range(1, 3):
            further = tl.load(words_at + more, mask=low + more < used, other=0)
            word = tl.where(
                (node // 32 - low == more)[None, :],
                further[:, None],
                word,
            )
        related = ((word >> (node % 32)[None, :]) & 1) != 0
        related = tl.where(
            used[:, None] > 0,
            related,
            node[None, :] <= token[:, None],
        )
        visible = (slots < prefix)[None, :] | (related & new[None, :])
        if WINDOW:
            at = tl.where(
                new,
                tl.load(positions + node, mask=new, other=0),
                slots,
            )
            visible = visible & (position[:, None] - at[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
    elif WINDOW:
        scores = tl.where(
            position[:, None] - slots[None, :] < window,
            scores,
            float("-inf"),
        )
    highest = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no key stays at zero.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(top - shift)  # what was summed so far refers to the old maximum
    value = _read(values, slots, value_stride, end, VALUE_WIDTH, VALUE_PADDED)
    mean = _dot(
        weights.to(value.dtype),
        value,
        mean * fade[:, None],
        PRECISION,
    )
    return highest, total * fade + tl.sum(weights, 1), mean


@triton.jit(do_not_specialize=["count", "words", "parts"])
def attend_parts(
    query, keys, values, sinks, out, logs, rows, offsets, prefixes, chains, helds, places, positions, ancestors,
    query_head_stride, query_token_stride, key_row_stride, key_head_stride, key_stride,
    value_row_stride, value_head_stride, value_stride,
    count, words, parts, window, scaling, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MERGED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of (token, head) pairs over one part of its row's slots.

    Writes out [parts, count, heads, value_width] and logs [parts, count, heads] if MERGED, else the
    final out.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.program_id(2) // KV_HEADS
    kv_head = tl.program_id(2) % KV_HEADS
    first = tl.load(offsets + row)
    n = tl.load(offsets + row + 1) - first
    if tile * BLOCK_M >= n * GROUP:  # the grid is made for the longest row
        return
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # heads of one token are neighbors
    token = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    live = token < n
    at = first.to(tl.int64) + token
    prefix = tl.load(prefixes + row)
    held = tl.load(helds + row)
    chain = tl.load(chains + row) != 0
    own = held + token  # number in the tree
    positions += tl.load(places + row)
    ancestors += tl.load(places + row).to(tl.int64) * words
    position = tl.load(positions + own, mask=live, other=0)

    # A chain's tokens see earlier ones only, so the tile's last token bounds what it sees.
    bound = tl.where(
        chain,
        tl.minimum(n, (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1),
        n,
    )
    stop = prefix + held + bound
    start = 0
    if WINDOW:
        start = tl.maximum(prefix + 1 - window, 0) // BLOCK_N * BLOCK_N
    length = tl.cdiv(tl.cdiv(stop - start, BLOCK_N), parts) * BLOCK_N
    begin = start + part * length
    end = tl.minimum(begin + length, stop)
    used = tl.where(live, tl.where(chain, 0, words), 0)  # a chain has no bits
    place = (part.to(tl.int64) * count + at) * (KV_HEADS * GROUP) + head
    if begin >= end:  # no slot in this part: it gets no weight in the merge
        if MERGED:
            tl.store(
                logs + place,
                tl.full([BLOCK_M], float("-inf"), tl.float32),
                mask=live,
            )
        return

    dims = tl.arange(0, PADDED)
    query += at[:, None] * query_token_stride + head[:, None] * query_head_stride + dims[None, :]
    queries = tl.load(
        query,
        mask=live[:, None] & (dims < WIDTH)[None, :],
        other=0.0,
    )
    slot_row = tl.load(rows + row).to(tl.int64)
    keys += slot_row * key_row_stride + kv_head * key_head_stride
    values += slot_row * value_row_stride + kv_head * value_head_stride

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mean = tl.zeros([BLOCK_M, VALUE_PADDED], tl.float32)
    if SINKS:  # noqa: SIM102 (one condition is known when compiling, the other when running)
        # A sink is one more key without a value. The first part is never empty.
        if part == 0:
            top = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
    # Whole blocks of committed slots need no mask but the window.
    dense = begin + tl.maximum(tl.minimum(end, prefix) - begin, 0) // BLOCK_N * BLOCK_N
    for tree in tl.static_range(2):  # the prefix without a mask, then what may hold new tokens
        for slot in range(dense if tree else begin, end if tree else dense, BLOCK_N):
            top, total, mean = _step(
                top, total, mean, queries, keys, values, slot, end, key_stride, value_stride,
                own, position, prefix, positions, ancestors, words, used, window, scaling, softcap,
                BLOCK_N, tree, WINDOW, SOFTCAP, PRECISION, WIDTH, VALUE_WIDTH, PADDED, VALUE_PADDED,
            )  # fmt: skip

    seen = total > 0
    mean = mean / tl.where(seen, total, 1.0)[:, None]
    dims = tl.arange(0, VALUE_PADDED)
    written = live[:, None] & (dims < VALUE_WIDTH)[None, :]
    tl.store(
        out + place[:, None] * VALUE_WIDTH + dims[None, :],
        mean.to(out.dtype.element_ty),
        mask=written,
    )
    if MERGED:
        log = top + tl.log2(tl.where(seen, total, 1.0))
        tl.store(logs + place, tl.where(seen, log, float("-inf")), mask=live)


@triton.jit(do_not_specialize=["count", "parts"])
def merge_parts(
    partial, logs, out, count, parts,
    HEADS: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Mean of the parts' outputs [parts, count, heads, value_width], weighted by 2**logs.

    One program per token and head.
    """
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    dims = tl.arange(0, VALUE_PADDED)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mean = tl.zeros([VALUE_PADDED], tl.float32)
    for start in range(0, parts, CHUNK):
        part = start + tl.arange(0, CHUNK)
        where = part.to(tl.int64) * count * HEADS + place
        weight = tl.load(logs + where, mask=part < parts, other=float("-inf"))
        some = weight > float("-inf")
        mask = some[:, None] & (dims < VALUE_WIDTH)[None, :]
        values = tl.load(
            partial + where[:, None] * VALUE_WIDTH + dims[None, :],
            mask=mask,
            other=0.0,
        )
        highest = tl.maximum(top, tl.max(weight, 0))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        share = tl.exp2(weight - shift)
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(share, 0)
        mean = mean * fade + tl.sum(values * share[:, None], 0)
        top = highest
    tl.store(
        out + place * VALUE_WIDTH + dims,
        (mean / total).to(out.dtype.element_ty),
        mask=dims < VALUE_WIDTH,
    )


@triton.jit
def move_paths(
    addresses, moves, like, head_stride, slot_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Moves a path's slots together in one head of one buffer.

    One program per (buffer, head) and path. addresses [buffers] are pointers like `like`; moves
    [paths, 1 + PATH] are the first goal and then the sources, padded with -1.
    """
    head = tl.program_id(0) % HEADS
    path = tl.program_id(1)
    buffer = tl.load(addresses + tl.program_id(0) // HEADS).to(like.dtype)
    base = buffer + head.to(tl.int64) * head_stride
    moves += path * (PATH + 1)
    step = tl.arange(0, PATH)
    dims = tl.arange(0, PADDED)
    source = tl.load(moves + 1 + step)
    goal = tl.load(moves) + step
    mask = (source >= 0)[:, None] & (dims < WIDTH)[None, :]
    held = tl.load(base + source[:, None] * slot_stride + dims[None, :], mask=mask)
    tl.debug_barrier()  # a goal may be another's source
    tl.store(
        base + goal[:, None] * slot_stride + dims[None, :],
        held,
        mask=mask,
    )


@triton.jit
def mark(out):
    """Writes a one: shows that a kernel can be built and launched."""
    tl.store(out, 1)
