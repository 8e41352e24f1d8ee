"""Attention of training-time test: a causal prefix shared by all depths, plus each anchor's own path of later depths.

    query at (anchor t, depth k) sees      first-depth keys from `first` to t       an interval: document, causality, window
                                           its own keys at depths 1 .. k            a row each

Textbooks write this as one softmax under an [s, k*s] mask. Here it is two, merged by their log-sum-exp: flash attention
over the intervals, block by block, and row-wise products over the paths. Neither part ever holds a score per head and pair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# Queries per call of a CPU's flash attention, and per block of FlexAttention's mask.
BLOCK = 128
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class Spans:
    """Which first-depth tokens each query sees: an interval that ends at its own anchor.

    Attributes:
        first, last: [t] int64, both ends included, ascending within a document; begin: [t] where the query's document begins.
    """

    first: Tensor
    last: Tensor
    begin: Tensor

    def blocks(self) -> list[tuple[slice, slice]]:
        """Up to BLOCK queries of one document each, and the keys that any of them sees."""
        cuts = (self.begin[1:] != self.begin[:-1]).nonzero().squeeze(1).add(1).tolist()
        first, last = self.first.tolist(), self.last.tolist()
        result = []
        for begin, end in zip([0, *cuts], [*cuts, len(last)], strict=True):
            for start in range(begin, end, BLOCK):
                stop = min(start + BLOCK, end)
                result.append((slice(start, stop), slice(first[start], last[stop - 1] + 1)))
        return result

    def bias(self, queries: slice, keys: slice, dtype: torch.dtype) -> Tensor:
        """[1, 1, queries, keys] of 0 and -inf."""
        seen = torch.arange(keys.start, keys.stop, device=self.first.device)
        hidden = (seen < self.first[queries, None]) | (seen > self.last[queries, None])
        bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return bias.masked_fill_(hidden, float("-inf"))[None, None]

    def block_mask(self, keys: int) -> BlockMask:
        """The same for FlexAttention over that many keys, from the intervals' ends alone: no [t, keys] is formed."""
        t = len(self.first)
        padded = torch.arange(-(-t // BLOCK) * BLOCK, device=self.first.device).clamp(max=t - 1)
        first, last = (ends[padded].view(-1, BLOCK) for ends in (self.first, self.last))
        begin = torch.arange(0, keys, BLOCK, device=first.device)
        end = (begin + BLOCK).clamp(max=keys) - 1
        touched = (begin <= last.amax(1, keepdim=True)) & (end >= first.amin(1, keepdim=True))
        full = (begin >= first.amax(1, keepdim=True)) & (end <= last.amin(1, keepdim=True))
        full &= end - begin == BLOCK - 1
        lists: list[Tensor] = []
        for chosen in (touched & ~full, full):
            order = chosen.to(torch.int32).argsort(dim=1, descending=True, stable=True)
            lists += chosen.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]
        own_first, own_last = self.first, self.last

        def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key >= own_first[query]) & (key <= own_last[query])

        count, some, full_count, whole = lists
        return BlockMask.from_kv_blocks(count, some, full_count, whole, BLOCK, sees, (t, keys))


@dataclass
class Path:
    """One later depth's keys and values [m, kv_heads, e]; rows: [t] int64, each query's own among them, None if in order."""

    key: Tensor
    value: Tensor
    rows: Tensor | None = None


class PathAttention:
    """What one layer has to remember between depths: the first depth's keys, and each anchor's path since.

    Args:
        begin: [T] int64, for each first-depth token the first one of its document. Documents lie one after the other.
        window: visible positions, own included; 0 for all. Larger than the depth, so that an anchor sees itself.
    """

    def __init__(self, begin: Tensor, window: int = 0):
        self.begin, self.window = begin, window
        self.base: tuple[Tensor, Tensor] | None = None
        self.paths: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, own: Tensor, fresh: list[Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The attention of the next depth.

        It changes nothing here, so that a checkpoint may run it twice; its keys and values come out through `fresh`,
        to be given to `remember`.

        Args:
            own: [t] int64, the queries' anchors among the first-depth tokens, ascending.
        """
        base, begin = self.base, self.begin[own]
        first = begin
        if self.window:
            depth = len(self.paths) + (base is not None)
            first = torch.maximum(begin, own + depth - self.window + 1)
        spans = Spans(first, own, begin)
        paths = [
            Path(key, value, None if len(anchors) == len(own) else torch.searchsorted(anchors, own))
            for anchors, key, value in self.paths
        ]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            fresh[:] = key, value
            if base is None:
                return path_attention(query, key, value, spans, [])
            return path_attention(query, *base, spans, [*paths, Path(key, value)])

        return attend

    def remember(self, own: Tensor, key: Tensor, value: Tensor) -> None:
        """Keeps a depth's keys and values; later depths are asked for anchors among `own` only."""
        if self.base is None:
            self.base = key, value
        else:
            self.paths.append((own, key, value))


def path_attention(query: Tensor, base_key: Tensor, base_value: Tensor, spans: Spans, paths: Sequence[Path]) -> Tensor:
    """Each query sees an interval of base keys, and one key per later depth: its own.

    On a CPU the base part is torch's flash kernel, elsewhere FlexAttention; none runs where nobody asks.

    Args:
        query: [t, heads, e]; base_key, base_value: [T, kv_heads, e].
        spans: the intervals. paths: one entry per later depth.

    Returns:
        [t, heads * e].
    """
    tensors = [tensor for path in paths for tensor in (path.key, path.value)]
    if query.device.type == "cpu" or not len(query):
        out = _OnCpu.apply(query, base_key, base_value, spans, [path.rows for path in paths], *tensors)
    else:
        out = _on_gpu(query, base_key, base_value, spans, paths)
    return out.flatten(1)


def _rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor[rows]


def _grouped(tensor: Tensor, paths: Sequence[Path]) -> Tensor:
    """[t, heads, e] -> [t, kv_heads, heads / kv_heads, e]; t may be 0."""
    t, heads, e = tensor.shape
    kv = paths[0].key.shape[1]
    return tensor.reshape(t, kv, heads // kv, e)


def _scores(query: Tensor, paths: Sequence[Path]) -> Tensor:
    """[t, heads, k] scaled dot products of queries with their own paths."""
    grouped = _grouped(query, paths)
    products = [(grouped * _rows(path.key, path.rows).unsqueeze(2)).sum(-1) for path in paths]
    exact = torch.promote_types(query.dtype, torch.float32)
    return torch.stack(products, dim=-1).flatten(1, 2).to(exact) * query.shape[2] ** -0.5


def _merge(
    query: Tensor, base: Tensor, base_lse: Tensor, paths: Sequence[Path], scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Joins the base part [t, heads, e], with its log-sum-exp [t, heads], and the paths' under one softmax."""
    lse = torch.logaddexp(base_lse, scores.logsumexp(-1))
    out = base * (base_lse - lse).exp().unsqueeze(-1).to(base.dtype)
    weights = (scores - lse.unsqueeze(-1)).exp().to(base.dtype).unsqueeze(-2)
    grouped = _grouped(out, paths)
    shares = weights.view(*grouped.shape[:3], 1, len(paths))
    for i, path in enumerate(paths):
        grouped = grouped + shares[..., i] * _rows(path.value, path.rows).unsqueeze(2)
    return grouped.view_as(query), lse


class _OnCpu(torch.autograd.Function):
    """Backward gives the flash kernel the merged output and log-sum-exp: the base keys' weights are exp(score - lse) of the
    whole softmax, and what a score's gradient subtracts is the whole output's, so its formulas hold as they stand."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, base_key: Tensor, base_value: Tensor, spans: Spans, rows: Any, *tensors: Tensor
    ):
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for ask, see in spans.blocks():
            parts = (x.transpose(0, 1)[None] for x in (query[ask], base_key[see], base_value[see]))
            some, its_lse = _flash(*parts, attn_mask=spans.bias(ask, see, query.dtype))
            out[ask], lse[ask] = some[0].transpose(0, 1), its_lse[0].transpose(0, 1)
        scores = lse.new_empty(0)
        if tensors:
            paths = _paths(tensors, rows)
            scores = _scores(query, paths)
            out, lse = _merge(query, out, lse, paths, scores)
        ctx.spans, ctx.rows = spans, rows
        ctx.save_for_backward(query, base_key, base_value, out, lse, scores, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        query, base_key, base_value, out, lse, scores, *tensors = ctx.saved_tensors
        grad = grad.contiguous()
        grad_query, grad_key, grad_value = map(torch.zeros_like, (query, base_key, base_value))
        for ask, see in ctx.spans.blocks():
            taken = (x.transpose(0, 1)[None] for x in (grad[ask], query[ask], base_key[see], base_value[see], out[ask]))
            bias = ctx.spans.bias(ask, see, query.dtype)
            parts = _flash_backward(*taken, lse[ask].t()[None].contiguous(), 0.0, False, attn_mask=bias)
            wholes = grad_query[ask], grad_key[see], grad_value[see]
            for whole, part in zip(wholes, parts, strict=True):
                whole += part[0].transpose(0, 1)
        grads = _path_grads(grad, query, out, lse, scores, _paths(tensors, ctx.rows), grad_query) if tensors else []
        return grad_query, grad_key, grad_value, None, None, *grads


def _paths(tensors: Sequence[Tensor], rows: Sequence[Tensor | None]) -> list[Path]:
    return [Path(*pair) for pair in zip(tensors[::2], tensors[1::2], rows, strict=True)]


def _path_grads(
    grad: Tensor, query: Tensor, out: Tensor, lse: Tensor, scores: Tensor, paths: Sequence[Path], grad_query: Tensor
) -> list[Tensor]:
    """Adds the paths' part to grad_query; returns the gradients of each path's key and value."""
    t, heads, e = query.shape
    shape = _grouped(query, paths).shape
    weights = (scores - lse.unsqueeze(-1)).exp()
    delta = (grad * out).sum(-1)
    grouped, asked, into = grad.view(shape), query.view(shape), grad_query.view(shape)
    grads = []
    for i, path in enumerate(paths):
        weight = weights[..., i].to(grad.dtype)
        value, key = (_rows(x, path.rows).unsqueeze(2) for x in (path.value, path.key))
        change = (weight * ((grouped * value).sum(-1).view(t, heads) - delta) * e**-0.5).view(shape[:3]).unsqueeze(-1)
        into += change * key
        for whole, part in (
            (path.key, (change * asked).sum(2)),
            (path.value, (weight.view(shape[:3]).unsqueeze(-1) * grouped).sum(2)),
        ):
            grads.append(part if path.rows is None else torch.zeros_like(whole).index_copy(0, path.rows, part))
    return grads


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _on_gpu(
    query: Tensor, base_key: Tensor, base_value: Tensor, spans: Spans, paths: Sequence[Path], flex: Any = None
) -> Tensor:
    """FlexAttention over the base, which differentiates its log-sum-exp too, and torch's own gradients for the rest."""
    query, base_key, base_value = (x.transpose(0, 1)[None] for x in (query, base_key, base_value))
    out, lse = (flex or _compiled_flex())(
        query,
        base_key,
        base_value,
        block_mask=spans.block_mask(base_key.shape[2]),
        enable_gqa=query.shape[1] != base_key.shape[1],
        return_lse=True,
    )
    out, lse, query = (x[0].transpose(0, 1) for x in (out, lse, query))
    return _merge(query, out, lse, paths, _scores(query, paths))[0] if paths else out
