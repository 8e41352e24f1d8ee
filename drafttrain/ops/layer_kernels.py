"""Triton kernels of what a decoder layer does between its matrix products, each in one launch.

torch launches seven kernels for an RMS norm, five to rotate queries and two for a gated activation,
and a decoding step waits longer for launches than for their work. Sums run in float32, and a result
is rounded once. A row's result does not depend on the others, so a token gets the same bits in a
plain step and in a tree.
"""

import triton
import triton.language as tl


@triton.jit
def add_norm(
    state,
    delta,
    weight,
    out,
    plus,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS: tl.constexpr,
):
    """A row: state += delta, if ADDS; out = state / rms(state) * (weight + plus)."""
    columns = tl.arange(0, PADDED)
    inside = columns < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + columns
    x = tl.load(state + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        # What the next reader of the state finds is what the norm reads.
        rounded = x.to(state.dtype.element_ty)
        tl.store(state + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + plus
    tl.store(out + at, (x * scale * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_head(
    heads,
    cosine,
    sine,
    weight,
    out,
    plus,
    eps,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
):
    """A token's head: its RMS norm, if NORM, then the rotation of its first ROTARY entries in halves."""
    token = tl.program_id(0).to(tl.int64)
    start = (token * COUNT + tl.program_id(1)) * WIDTH
    columns = tl.arange(0, PADDED)
    inside = columns < WIDTH
    turned = columns < ROTARY
    left = columns < ROTARY // 2
    # The entry that each one is rotated with.
    other = tl.where(left, columns + ROTARY // 2, columns - ROTARY // 2)
    x = tl.load(heads + start + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(heads + start + other, mask=turned, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
        x *= scale * (tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + plus)
        y *= scale * (tl.load(weight + other, mask=turned, other=0.0).to(tl.float32) + plus)
    table = token * ROTARY + columns
    c = tl.load(cosine + table, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sine + table, mask=turned, other=0.0).to(tl.float32)
    x = x * c + y * tl.where(left, -s, s)
    tl.store(out + start + columns, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_up(
    gate,
    up,
    out,
    count,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = activation(gate) * up, elementwise: SiLU, or GELU in its tanh form."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    inner = x
    if GELU:
        # 1 + tanh(z) is twice the sigmoid of 2 z.
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    tl.store(out + at, (x * tl.sigmoid(inner) * y).to(out.dtype.element_ty), mask=inside)
