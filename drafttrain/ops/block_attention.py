"""Attention of drafted blocks: each block sees an interval of context keys, and all of its own tokens.

    query of block i sees      context keys from spans.first[i] to spans.last[i]      document and causality
                               the keys of block i, earlier and later ones            the block is bidirectional

Two softmaxes, merged by their log-sum-exp as in `path_attention`: flash attention over the intervals, several blocks at a time,
and flash attention within the blocks, all of them at once.

Shapes: m blocks of B tokens, A queries of each, T context tokens, e head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafttrain.ops.path_attention import (
    Flex,
    Spans,
    cpu_flash,
    cpu_flash_backward,
    span_attention,
    span_attention_backward,
    span_attention_gpu,
)


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, base_key: Tensor, base_value: Tensor, spans: Spans
) -> Tensor:
    """Attention of m blocks of B tokens, whose last A tokens are queries.

    Args:
        query: [m * A, heads, e]; key, value: [m * B, kv_heads, e], block after block.
        base_key, base_value: [T, kv_heads, e] of the context.
        spans: the context interval of each block, none of them empty.

    Returns:
        [m * A, heads * e].
    """
    blocks = len(spans.last)
    if not blocks:  # ranks that have blocks share these weights, so they need a gradient here too: zero
        return query.flatten(1) + 0 * sum(x.sum() for x in (key, value, base_key, base_value))
    per = len(query) // blocks
    each = Spans(*(ends.repeat_interleave(per) for ends in (spans.first, spans.last, spans.begin)))  # of queries
    if query.device.type == "cpu":
        return _BlocksOnCpu.apply(query, key, value, base_key, base_value, each, blocks).flatten(1)
    return _on_gpu(query, key, value, base_key, base_value, each, blocks).flatten(1)


def _blocks(x: Tensor, blocks: int) -> Tensor:
    """[m * B, heads, e] -> [m, heads, B, e]."""
    return x.view(blocks, -1, *x.shape[1:]).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """[m, heads, B, ...] -> [m * B, heads, ...]."""
    return x.transpose(1, 2).flatten(0, 1)


def _merge(base: Tensor, base_lse: Tensor, own: Tensor, own_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Joins two parts [t, heads, e] with their log-sum-exps [t, heads] under one softmax."""
    lse = torch.logaddexp(base_lse, own_lse)
    shares = ((part - lse).exp().unsqueeze(-1).to(base.dtype) for part in (base_lse, own_lse))
    return base * next(shares) + own * next(shares), lse


class _BlocksOnCpu(torch.autograd.Function):
    """Backward gives both flash kernels the merged output and log-sum-exp, see `span_attention_backward`."""

    @staticmethod
    def forward(ctx, query, key, value, base_key, base_value, spans: Spans, blocks: int):
        own, own_lse = (_rows(x) for x in cpu_flash(*(_blocks(x, blocks) for x in (query, key, value))))
        out, lse = _merge(*span_attention(query, base_key, base_value, spans), own, own_lse)
        ctx.spans, ctx.blocks = spans, blocks
        ctx.save_for_backward(query, key, value, base_key, base_value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        query, key, value, base_key, base_value, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        own = (_blocks(x, ctx.blocks) for x in (grad, query, key, value, out))  # [m, heads, n, e]
        own_lse = lse.view(ctx.blocks, -1, lse.shape[1]).transpose(1, 2).contiguous()  # [m, heads, A]
        grads = [_rows(x) for x in cpu_flash_backward(*own, own_lse, 0.0, False)]  # of query, key, value
        base_grads = [torch.zeros_like(base_key), torch.zeros_like(base_value)]
        into = [grads[0], *base_grads]
        span_attention_backward(grad, query, base_key, base_value, out, lse, ctx.spans, into)
        return *grads, *base_grads, None, None


def _on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    base_key: Tensor,
    base_value: Tensor,
    spans: Spans,
    blocks: int,
    flex: Flex | None = None,
) -> Tensor:
    """FlexAttention over the context, and plain products within the blocks."""
    base, base_lse = span_attention_gpu(query, base_key, base_value, spans, flex)
    groups = query.shape[1] // key.shape[1]
    own_key, own_value = (_blocks(x, blocks).repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (_blocks(query, blocks) @ own_key.transpose(-1, -2)).float() * query.shape[2] ** -0.5  # [m, heads, A, B]
    own_lse = scores.logsumexp(-1)
    own = (scores - own_lse.unsqueeze(-1)).exp().to(query.dtype) @ own_value
    return _merge(base, base_lse, _rows(own), _rows(own_lse))[0]
