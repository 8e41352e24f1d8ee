"""Attention of drafted blocks: each block sees an interval of context keys, and all of its own tokens.

    query of block i sees      context keys from spans.first[i] to spans.last[i]      document and causality
                               the keys of block i, before it and behind it           the block is bidirectional

Two softmaxes, merged by their log-sum-exp as in `path_attention`: flash attention over the intervals, several blocks at a time,
and flash attention within the blocks, all of them at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafttrain.ops.path_attention import Spans, _compiled_flex, _flash, _flash_backward


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, base_key: Tensor, base_value: Tensor, spans: Spans
) -> Tensor:
    """Attention of m blocks of B tokens, of which the last A ask.

    Args:
        query: [m * A, heads, e]; key, value: [m * B, kv_heads, e], block after block.
        base_key, base_value: [T, kv_heads, e] of the context.
        spans: the context interval of each block, none of them empty.

    Returns:
        [m * A, heads * e].
    """
    blocks = len(spans.last)
    if not blocks:  # whatever is shared by ranks still gets its gradient, zero
        return query.flatten(1) + 0 * sum(x.sum() for x in (key, value, base_key, base_value))
    per = len(query) // blocks
    wide = Spans(*(ends.repeat_interleave(per) for ends in (spans.first, spans.last, spans.begin)))
    if query.device.type == "cpu":
        return _OnCpu.apply(query, key, value, base_key, base_value, wide, blocks).flatten(1)
    return _on_gpu(query, key, value, base_key, base_value, wide, blocks).flatten(1)


def _blocks(x: Tensor, blocks: int) -> Tensor:
    """[m * B, heads, e] -> [m, heads, B, e]."""
    return x.view(blocks, -1, *x.shape[1:]).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """[m, heads, B, ...] -> [m * B, heads, ...]."""
    return x.transpose(1, 2).flatten(0, 1)


def _merge(base: Tensor, base_lse: Tensor, own: Tensor, own_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts [t, heads, e] with their log-sum-exps [t, heads] under one softmax."""
    lse = torch.logaddexp(base_lse, own_lse)
    shares = ((part - lse).exp().unsqueeze(-1).to(base.dtype) for part in (base_lse, own_lse))
    return base * next(shares) + own * next(shares), lse


class _OnCpu(torch.autograd.Function):
    """Backward gives both flash kernels the merged output and log-sum-exp, see `path_attention._OnCpu`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        base_key: Tensor,
        base_value: Tensor,
        spans: Spans,
        blocks: int,
    ):
        own, own_lse = (_rows(x) for x in _flash(*(_blocks(x, blocks) for x in (query, key, value))))
        base, base_lse = torch.empty_like(own), torch.empty_like(own_lse)
        for ask, see in spans.blocks():
            parts = (x.transpose(0, 1)[None] for x in (query[ask], base_key[see], base_value[see]))
            some, lse = _flash(*parts, attn_mask=spans.bias(ask, see, query.dtype))
            base[ask], base_lse[ask] = some[0].transpose(0, 1), lse[0].transpose(0, 1)
        out, lse = _merge(base, base_lse, own, own_lse)
        ctx.spans, ctx.blocks = spans, blocks
        ctx.save_for_backward(query, key, value, base_key, base_value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        query, key, value, base_key, base_value, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        own = (_blocks(x, ctx.blocks) for x in (grad, query, key, value, out))
        own_lse = lse.view(ctx.blocks, -1, lse.shape[1]).transpose(1, 2).contiguous()
        grads = [_rows(x) for x in _flash_backward(*own, own_lse, 0.0, False)]
        grad_base = torch.zeros_like(base_key), torch.zeros_like(base_value)
        for ask, see in ctx.spans.blocks():
            taken = (x.transpose(0, 1)[None] for x in (grad[ask], query[ask], base_key[see], base_value[see], out[ask]))
            bias = ctx.spans.bias(ask, see, query.dtype)
            parts = _flash_backward(*taken, lse[ask].t()[None].contiguous(), 0.0, False, attn_mask=bias)
            grads[0][ask] += parts[0][0].transpose(0, 1)
            for whole, part in zip(grad_base, parts[1:], strict=True):
                whole[see] += part[0].transpose(0, 1)
        return *grads, *grad_base, None, None


def _on_gpu(
    query: Tensor, key: Tensor, value: Tensor, base_key: Tensor, base_value: Tensor, spans: Spans, blocks: int,
    flex: Any = None,
) -> Tensor:  # fmt: skip
    """FlexAttention over the context, which differentiates its log-sum-exp too, and plain products within the blocks."""
    asked, seen, said = (x.transpose(0, 1)[None] for x in (query, base_key, base_value))
    mask, groups = spans.block_mask(len(base_key)), query.shape[1] // key.shape[1]
    base, base_lse = (flex or _compiled_flex())(
        asked, seen, said, block_mask=mask, enable_gqa=groups != 1, return_lse=True
    )
    own_key, own_value = (_blocks(x, blocks).repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (_blocks(query, blocks) @ own_key.transpose(-1, -2)).float() * query.shape[2] ** -0.5
    own_lse = scores.logsumexp(-1)
    own = (scores - own_lse.unsqueeze(-1)).exp().to(query.dtype) @ own_value
    return _merge(base[0].transpose(0, 1), base_lse[0].transpose(0, 1), _rows(own), _rows(own_lse))[0]
