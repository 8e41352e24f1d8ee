"""Attention of training-time test: a causal prefix that all depths share, plus each anchor's own path of later depths.

    query at (anchor t, depth k) sees      first-depth keys from `first` to t       an interval: document, causality, window
                                           its own keys at depths 1 .. k            one row per depth

The textbook form is one softmax under an [s, k*s] mask. Here it is two, merged by their log-sum-exp: flash attention over the
intervals, block by block, and row-wise products over the paths. Neither part holds a score per head and pair.

Shapes: t queries, T first-depth tokens, k later depths, e head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# Queries per call of the CPU's flash attention, and per block of FlexAttention's mask.
BLOCK = 128
cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Flex = Callable[..., tuple[Tensor, Tensor]]  # FlexAttention, compiled or not: outputs and log-sum-exps


@dataclass
class Spans:
    """The first-depth tokens that each query sees: an interval that ends at its own anchor.

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
        """[1, 1, queries, keys] additive mask of 0 and -inf."""
        seen = torch.arange(keys.start, keys.stop, device=self.first.device)
        masked = (seen < self.first[queries, None]) | (seen > self.last[queries, None])  # [queries, keys]
        bias = torch.zeros(masked.shape, dtype=dtype, device=masked.device)
        return bias.masked_fill_(masked, float("-inf"))[None, None]

    def block_mask(self, keys: int) -> BlockMask:
        """The mask for FlexAttention over `keys` keys, from the ends of the intervals: no [t, keys] matrix is formed."""
        t = len(self.first)
        padded = torch.arange(-(-t // BLOCK) * BLOCK, device=self.first.device).clamp(max=t - 1)
        first, last = (ends[padded].view(-1, BLOCK) for ends in (self.first, self.last))  # [query blocks, BLOCK]
        begin = torch.arange(0, keys, BLOCK, device=first.device)  # [key blocks]
        end = (begin + BLOCK).clamp(max=keys) - 1
        touched = (begin <= last.amax(1, keepdim=True)) & (end >= first.amin(1, keepdim=True))  # [query, key blocks]
        full = (begin >= first.amax(1, keepdim=True)) & (end <= last.amin(1, keepdim=True))
        full &= end - begin == BLOCK - 1
        lists: list[Tensor] = []
        for chosen in (touched & ~full, full):
            order = chosen.to(torch.int32).argsort(dim=1, descending=True, stable=True)
            lists += chosen.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]
        own_first, own_last = self.first, self.last

        def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key >= own_first[query]) & (key <= own_last[query])

        count, partial, full_count, complete = lists
        return BlockMask.from_kv_blocks(count, partial, full_count, complete, BLOCK, sees, (t, keys))


# -- flash attention over the intervals, of paths and of drafted blocks -----------------------------------------------


def span_attention(query: Tensor, key: Tensor, value: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """On a CPU: query [t, heads, e] over its intervals of key, value [T, kv_heads, e].

    Returns:
        Outputs [t, heads, e] and log-sum-exps [t, heads], float32 or wider.
    """
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
    for queries, keys in spans.blocks():
        parts = (x.transpose(0, 1)[None] for x in (query[queries], key[keys], value[keys]))  # [1, heads, n, e]
        block, block_lse = cpu_flash(*parts, attn_mask=spans.bias(queries, keys, query.dtype))
        out[queries], lse[queries] = block[0].transpose(0, 1), block_lse[0].transpose(0, 1)
    return out, lse


def span_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, spans: Spans, into: list[Tensor]
) -> None:
    """Adds the intervals' part to the gradients `into` of query, key and value.

    Args:
        grad, out: [t, heads, e] of the *merged* output; lse: [t, heads] of the whole softmax. The flash kernel's formulas hold
            as they are: a key's weight is exp(score - lse), and the term subtracted from a score's gradient is that of out.
    """
    for queries, keys in spans.blocks():
        parts = (grad[queries], query[queries], key[keys], value[keys], out[queries])
        rows = (x.transpose(0, 1)[None] for x in parts)  # [1, heads, n, e]
        bias = spans.bias(queries, keys, query.dtype)
        grads = cpu_flash_backward(*rows, lse[queries].t()[None].contiguous(), 0.0, False, attn_mask=bias)
        for total, at, part in zip(into, (queries, keys, keys), grads, strict=True):
            total[at] += part[0].transpose(0, 1)


@functools.cache
def _compiled_flex() -> Flex:
    return torch.compile(flex_attention, dynamic=True)  # type: ignore[return-value]


def span_attention_gpu(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, flex: Flex | None = None
) -> tuple[Tensor, Tensor]:
    """`span_attention` by FlexAttention, which differentiates the log-sum-exps too."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, n, e]
    out, lse = (flex or _compiled_flex())(
        q, k, v, block_mask=spans.block_mask(len(key)), enable_gqa=q.shape[1] != k.shape[1], return_lse=True
    )
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


# -- paths ------------------------------------------------------------------------------------------------------------


@dataclass
class Path:
    """The keys and values [m, kv_heads, e] of one later depth; rows: [t] int64, each query's own row, None if in order."""

    key: Tensor
    value: Tensor
    rows: Tensor | None = None


class PathAttention:
    """One layer's memory between depths: the keys of the first depth, and each anchor's path since.

    Args:
        begin: [T] int64, the first token of each first-depth token's document. Documents lie one after the other.
        window: visible positions, own included; 0 for all. Larger than the depth, so that an anchor sees itself.
    """

    def __init__(self, begin: Tensor, window: int = 0):
        self.begin, self.window = begin, window
        self.base: tuple[Tensor, Tensor] | None = None
        self.paths: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, own: Tensor, fresh: list[Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The attention of the next depth.

        It changes nothing here, so that gradient checkpointing may run it twice; the new keys and values are returned
        through `fresh`, for `remember`.

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
        """Keeps a depth's keys and values; queries of later depths must be anchors among `own`."""
        if self.base is None:
            self.base = key, value
        else:
            self.paths.append((own, key, value))


def path_attention(query: Tensor, base_key: Tensor, base_value: Tensor, spans: Spans, paths: Sequence[Path]) -> Tensor:
    """Each query sees an interval of base keys, and its own key of each later depth.

    The base part is torch's flash kernel on a CPU, FlexAttention elsewhere; neither runs without queries.

    Args:
        query: [t, heads, e]; base_key, base_value: [T, kv_heads, e].
        spans: the intervals. paths: one entry per later depth.

    Returns:
        [t, heads * e].
    """
    tensors = [tensor for path in paths for tensor in (path.key, path.value)]
    if query.device.type == "cpu" or not len(query):
        out = _PathsOnCpu.apply(query, base_key, base_value, spans, [path.rows for path in paths], *tensors)
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
    products = [(grouped * _rows(path.key, path.rows).unsqueeze(2)).sum(-1) for path in paths]  # k * [t, kv, groups]
    exact = torch.promote_types(query.dtype, torch.float32)
    return torch.stack(products, dim=-1).flatten(1, 2).to(exact) * query.shape[2] ** -0.5


def _merge(
    query: Tensor, base: Tensor, base_lse: Tensor, paths: Sequence[Path], scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Joins the base part [t, heads, e], with its log-sum-exp [t, heads], and the paths' under one softmax."""
    lse = torch.logaddexp(base_lse, scores.logsumexp(-1))  # [t, heads]
    out = base * (base_lse - lse).exp().unsqueeze(-1).to(base.dtype)
    weights = (scores - lse.unsqueeze(-1)).exp().to(base.dtype).unsqueeze(-2)  # [t, heads, 1, k]
    grouped = _grouped(out, paths)
    shares = weights.view(*grouped.shape[:3], 1, len(paths))
    for i, path in enumerate(paths):
        grouped = grouped + shares[..., i] * _rows(path.value, path.rows).unsqueeze(2)
    return grouped.view_as(query), lse


class _PathsOnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, base_key, base_value, spans: Spans, rows: list[Tensor | None], *tensors: Tensor):
        out, lse = span_attention(query, base_key, base_value, spans)
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
    def backward(ctx, grad: Tensor):
        query, base_key, base_value, out, lse, scores, *tensors = ctx.saved_tensors
        grad = grad.contiguous()
        grads = [torch.zeros_like(x) for x in (query, base_key, base_value)]
        span_attention_backward(grad, query, base_key, base_value, out, lse, ctx.spans, grads)
        more = _path_grads(grad, query, out, lse, scores, _paths(tensors, ctx.rows), grads[0]) if tensors else []
        return *grads, None, None, *more


def _paths(tensors: Sequence[Tensor], rows: Sequence[Tensor | None]) -> list[Path]:
    return [Path(*pair) for pair in zip(tensors[::2], tensors[1::2], rows, strict=True)]


def _path_grads(
    grad: Tensor, query: Tensor, out: Tensor, lse: Tensor, scores: Tensor, paths: Sequence[Path], grad_query: Tensor
) -> list[Tensor]:
    """Adds the paths' part to grad_query; returns the gradients of each path's key and value."""
    t, heads, e = query.shape
    shape = _grouped(query, paths).shape
    weights = (scores - lse.unsqueeze(-1)).exp()  # [t, heads, k]
    delta = (grad * out).sum(-1)  # [t, heads]
    grad_groups, query_groups, into = grad.view(shape), query.view(shape), grad_query.view(shape)
    grads = []
    for i, path in enumerate(paths):
        weight = weights[..., i].to(grad.dtype)
        value, key = (_rows(x, path.rows).unsqueeze(2) for x in (path.value, path.key))  # [t, kv, 1, e]
        score_grad = weight * ((grad_groups * value).sum(-1).view(t, heads) - delta) * e**-0.5
        change = score_grad.view(shape[:3]).unsqueeze(-1)
        into += change * key
        for whole, part in (
            (path.key, (change * query_groups).sum(2)),
            (path.value, (weight.view(shape[:3]).unsqueeze(-1) * grad_groups).sum(2)),
        ):
            grads.append(part if path.rows is None else torch.zeros_like(whole).index_copy(0, path.rows, part))
    return grads


def _on_gpu(
    query: Tensor,
    base_key: Tensor,
    base_value: Tensor,
    spans: Spans,
    paths: Sequence[Path],
    flex: Flex | None = None,
) -> Tensor:
    """FlexAttention over the base, and torch's own gradients for the rest."""
    out, lse = span_attention_gpu(query, base_key, base_value, spans, flex)
    return _merge(query, out, lse, paths, _scores(query, paths))[0] if paths else out
