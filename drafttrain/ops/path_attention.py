"""Attention of training: each query sees an interval of base keys, and a few keys of its own.

    training-time test, query at (anchor t, depth k)     drafted blocks, query of block i
    first-depth keys from `first` to t                   context keys from spans.first[i] to spans.last[i]
    its own keys at depths 1 .. k, one row per depth     the keys of block i, earlier and later ones

The interval follows from document, causality and window. The textbook form is one softmax under a
dense mask. Here it is two, merged by their log-sum-exp: flash attention over the intervals, block
by block, and either row-wise products over the paths or flash attention within the drafted blocks.
Neither part holds a score per head and pair.

Shapes: t queries, T base tokens, k later depths, m drafted blocks of B tokens with A queries each,
e head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import wrap_torch_function

from drafttrain.ops.flex_spans import Flex, span_attention_gpu

# Queries per call of the CPU's flash attention, and per block of FlexAttention's mask.
BLOCK = 128
cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Spans(NamedTuple):
    """The base tokens that each query sees: an interval that ends at its own anchor. Ends ascend
    within a document.
    """

    first: Tensor  # [t] int64
    last: Tensor  # [t] int64, included
    begin: Tensor  # [t] int64, where the query's document begins

    def blocks(self) -> list[tuple[slice, slice]]:
        """Up to BLOCK queries of one document each, and the keys that any of them sees."""
        cuts = (self.begin[1:] != self.begin[:-1]).nonzero().squeeze(1).add(1).tolist()
        first = self.first.tolist()
        last = self.last.tolist()
        result = []
        for begin, end in zip([0, *cuts], [*cuts, len(last)], strict=True):
            for start in range(begin, end, BLOCK):
                stop = min(start + BLOCK, end)
                result.append(
                    (slice(start, stop), slice(min(first[start:stop]), last[stop - 1] + 1))
                )
        return result

    def bias(self, queries: slice, keys: slice, dtype: torch.dtype) -> Tensor:
        """[1, 1, queries, keys] additive mask of 0 and -inf."""
        seen = torch.arange(keys.start, keys.stop, device=self.first.device)
        masked = (seen < self.first[queries, None]) | (
            seen > self.last[queries, None]
        )  # [queries, keys]
        bias = torch.zeros(masked.shape, dtype=dtype, device=masked.device)
        return bias.masked_fill_(masked, float("-inf"))[None, None]

    def block_mask(self, keys: int) -> BlockMask:
        """The mask for FlexAttention over `keys` keys, from the ends of the intervals: no [t, keys]
        matrix is formed.
        """
        t = len(self.first)
        padded = torch.arange(-(-t // BLOCK) * BLOCK, device=self.first.device).clamp(max=t - 1)
        first, last = (
            ends[padded].view(-1, BLOCK) for ends in (self.first, self.last)
        )  # [query blocks, BLOCK]
        begin = torch.arange(0, keys, BLOCK, device=first.device)  # [key blocks]
        end = (begin + BLOCK).clamp(max=keys) - 1
        touched = (begin <= last.amax(1, keepdim=True)) & (
            end >= first.amin(1, keepdim=True)
        )  # [query, key blocks]
        full = (begin >= first.amax(1, keepdim=True)) & (end <= last.amin(1, keepdim=True))
        full &= end - begin == BLOCK - 1
        lists: list[Tensor] = []
        for chosen in (touched & ~full, full):
            order = chosen.to(torch.int32).argsort(dim=1, descending=True, stable=True)
            lists += chosen.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]
        own_first = self.first
        own_last = self.last

        def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key >= own_first[query]) & (key <= own_last[query])

        count, partial, full_count, complete = lists
        return BlockMask.from_kv_blocks(
            count,
            partial,
            full_count,
            complete,
            BLOCK,
            sees,
            (t, keys),
        )


# -- flash attention over the intervals, of paths and of drafted blocks ----------------------------


def span_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
) -> tuple[Tensor, Tensor]:
    """On a CPU: query [t, heads, e] over its intervals of key, value [T, kv_heads, e].

    Returns:
        Outputs [t, heads, e] and log-sum-exps [t, heads], float32 or wider.
    """
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
    for queries, keys in spans.blocks():
        parts = (
            x.transpose(0, 1)[None] for x in (query[queries], key[keys], value[keys])
        )  # [1, heads, n, e]
        block, block_lse = cpu_flash(*parts, attn_mask=spans.bias(queries, keys, query.dtype))
        out[queries], lse[queries] = block[0].transpose(0, 1), block_lse[0].transpose(0, 1)
    return out, lse


def span_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Spans,
) -> tuple[Tensor, Tensor, Tensor]:
    """The intervals' part of the gradients of query, key and value.

    Args:
        grad, out: [t, heads, e] of the *merged* output; lse: [t, heads] of the whole softmax. The
            flash kernel's formulas hold as they are: a key's weight is exp(score - lse), and the
            term subtracted from a score's gradient is that of out.
    """
    of_query = torch.empty_like(query)
    of_key = torch.zeros_like(key)
    of_value = torch.zeros_like(value)
    for queries, keys in spans.blocks():
        parts = (grad[queries], query[queries], key[keys], value[keys], out[queries])
        rows = (x.transpose(0, 1)[None] for x in parts)  # [1, heads, n, e]
        bias = spans.bias(queries, keys, query.dtype)
        grads = cpu_flash_backward(
            *rows,
            lse[queries].t()[None].contiguous(),
            0.0,
            False,
            attn_mask=bias,
        )
        of_query[queries], key_grad, value_grad = (x[0].transpose(0, 1) for x in grads)
        of_key[keys] += key_grad
        of_value[keys] += value_grad
    return of_query, of_key, of_value


# -- own keys, and both parts under one softmax ----------------------------------------------------


Tensors = Sequence[Tensor]
Pair = tuple[Tensor, Tensor]


def _own_rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """[m, kv_heads, e] -> [t, kv_heads, 1, e], each query's own row."""
    return (tensor if rows is None else tensor[rows]).unsqueeze(2)


class _Paths(NamedTuple):
    """Own keys of training-time test. tensors: key and value [m, kv_heads, e] of each later depth
    in turn.
    """

    rows: list[Tensor | None]  # per depth, see `Path`

    def merge(
        self,
        query: Tensor,
        base: Tensor,
        base_lse: Tensor,
        tensors: Tensors,
        flash: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not tensors:
            return base, base_lse, base_lse.new_empty(0)
        (t, heads, e), kv = query.shape, tensors[0].shape[1]
        groups = (t, kv, heads // kv)  # t may be 0
        grouped = query.reshape(*groups, e)
        keys = zip(tensors[::2], self.rows, strict=True)
        products = [
            (grouped * _own_rows(key, rows)).sum(-1) for key, rows in keys
        ]  # k * [t, kv_heads, groups]
        exact = torch.promote_types(query.dtype, torch.float32)
        scores = torch.stack(products, dim=-1).flatten(1, 2).to(exact) * e**-0.5  # [t, heads, k]
        lse = torch.logaddexp(base_lse, scores.logsumexp(-1))  # [t, heads]
        out = (base * (base_lse - lse).exp().unsqueeze(-1).to(base.dtype)).reshape(*groups, e)
        weights = (scores - lse.unsqueeze(-1)).exp().to(base.dtype).view(*groups, 1, len(products))
        for i, (value, rows) in enumerate(zip(tensors[1::2], self.rows, strict=True)):
            out = out + weights[..., i] * _own_rows(value, rows)
        return out.view_as(query), lse, scores

    def backward(
        self,
        grad: Tensor,
        into: Tensor,
        query: Tensor,
        out: Tensor,
        lse: Tensor,
        scores: Tensor,
        tensors: Tensors,
    ) -> list[Tensor]:
        """Adds to the query's gradient `into` [t, heads, e]; returns the gradients of `tensors`."""
        if not tensors:
            return []
        (t, heads, e), kv = query.shape, tensors[0].shape[1]
        groups = (t, kv, heads // kv)
        weights = (scores - lse.unsqueeze(-1)).exp()  # [t, heads, k]
        delta = (grad * out).sum(-1)  # [t, heads]
        grad_groups, query_groups, into = (x.view(*groups, e) for x in (grad, query, into))
        grads: list[Tensor] = []
        for i, rows in enumerate(self.rows):
            key, value = tensors[2 * i : 2 * i + 2]
            weight = weights[..., i].to(grad.dtype)
            score_grad = (
                weight
                * ((grad_groups * _own_rows(value, rows)).sum(-1).view(t, heads) - delta)
                * e**-0.5
            )
            change = score_grad.view(groups).unsqueeze(-1)
            into += change * _own_rows(key, rows)
            parts = (
                (change * query_groups).sum(2),
                (weight.view(groups).unsqueeze(-1) * grad_groups).sum(2),
            )
            if rows is None:
                grads += parts
            else:
                grads += (torch.zeros_like(key).index_copy(0, rows, part) for part in parts)
        return grads


class _Blocks(NamedTuple):
    """Own keys of drafted blocks. tensors: key and value [m * B, kv_heads, e], block after block."""

    blocks: int  # m

    def split(self, x: Tensor) -> Tensor:
        """[m * B, heads, ...] -> [m, heads, B, ...]."""
        return x.view(self.blocks, -1, *x.shape[1:]).transpose(1, 2)

    def merge(
        self,
        query: Tensor,
        base: Tensor,
        base_lse: Tensor,
        tensors: Tensors,
        flash: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries, key, value = map(self.split, (query, *tensors))
        if flash:
            own, own_lse = cpu_flash(queries, key, value)
        else:
            key, value = (
                x.repeat_interleave(queries.shape[1] // x.shape[1], dim=1) for x in (key, value)
            )
            scores = (queries @ key.transpose(-1, -2)).float() * query.shape[
                2
            ] ** -0.5  # [m, heads, A, B]
            own_lse = scores.logsumexp(-1)
            own = (scores - own_lse.unsqueeze(-1)).exp().to(query.dtype) @ value  # [m, heads, A, e]
        own, own_lse = (
            x.transpose(1, 2).flatten(0, 1) for x in (own, own_lse)
        )  # [m * A, heads, ...]
        lse = torch.logaddexp(base_lse, own_lse)
        base_share, own_share = (
            (part - lse).exp().unsqueeze(-1).to(base.dtype) for part in (base_lse, own_lse)
        )
        return base * base_share + own * own_share, lse, lse.new_empty(0)

    def backward(
        self,
        grad: Tensor,
        into: Tensor,
        query: Tensor,
        out: Tensor,
        lse: Tensor,
        _: Tensor,
        tensors: Tensors,
    ) -> list[Tensor]:
        parts = map(self.split, (grad, query, *tensors, out))  # [m, heads, n, e]
        grads = cpu_flash_backward(*parts, self.split(lse).contiguous(), 0.0, False)
        self.split(into).add_(grads[0])
        return [x.transpose(1, 2).flatten(0, 1) for x in grads[1:]]


Own = _Paths | _Blocks


class _OnCpu(torch.autograd.Function):
    """Both parts under one softmax. Each backward takes the merged output and log-sum-exp, see
    `span_attention_backward`.
    """

    @staticmethod
    def forward(ctx, own: Own, spans: Spans, query, base_key, base_value, *tensors: Tensor):
        base, base_lse = span_attention(query, base_key, base_value, spans)
        out, lse, scores = own.merge(query, base, base_lse, tensors, flash=True)
        ctx.own, ctx.spans = own, spans
        ctx.save_for_backward(query, base_key, base_value, out, lse, scores, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        query, base_key, base_value, out, lse, scores, *tensors = ctx.saved_tensors
        grad = grad.contiguous()
        grads = span_attention_backward(grad, query, base_key, base_value, out, lse, ctx.spans)
        return (
            None,
            None,
            *grads,
            *ctx.own.backward(grad, grads[0], query, out, lse, scores, tensors),
        )


def narrowed(query: Tensor, base: Pair, tensors: Tensors) -> tuple[Tensor, Pair, Tensors]:
    """All in autocast's dtype, if it is on: rotary tables or norms in float32 may have widened
    some.
    """
    kind = query.device.type
    if not torch.is_autocast_enabled(kind):
        return query, base, tensors
    query, key, value, *rest = (
        x.to(torch.get_autocast_dtype(kind)) for x in (query, *base, *tensors)
    )
    return query, (key, value), rest


@wrap_torch_function(lambda own, spans, query, *rest: (query,))
def attend_spans(
    own: Own,
    spans: Spans,
    query: Tensor,
    base: Pair,
    tensors: Tensors,
    flex: Flex | None,
) -> Tensor:
    """Attention over intervals of base keys and own keys: [t, heads, e].

    Runs on a CPU by flash attention; elsewhere, or by a given `flex`, with torch's own gradients.
    `drafttrain plan` overrides it.
    """
    if flex is None and (query.device.type == "cpu" or not len(query)):
        # The CPU's flash attention is faster in float32 than in bfloat16.
        parts = (
            x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, *base, *tensors)
        )
        return _OnCpu.apply(own, spans, *parts).to(query.dtype)
    query, base, tensors = narrowed(query, base, tensors)
    out, lse = span_attention_gpu(query, *base, spans, flex)
    return own.merge(query, out, lse, tensors, flash=False)[0]


# -- drafted blocks --------------------------------------------------------------------------------


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    base_key: Tensor,
    base_value: Tensor,
    spans: Spans,
    flex: Flex | None = None,
    window: int = 0,
) -> Tensor:
    """Attention of m blocks of B tokens, whose last A tokens are queries.

    Args:
        query: [m * A, heads, e]; key, value: [m * B, kv_heads, e], block after block.
        base_key, base_value: [T, kv_heads, e] of the context.
        spans: the context interval of each block, none of them empty.
        window: positions that a query sees, its own included, 0 for all; larger than B, so that a
            block sees all of itself.

    Returns:
        [m * A, heads * e].
    """
    blocks = len(spans.last)
    if (
        not blocks
    ):  # ranks that have blocks share these weights, so they need a gradient here too: zero
        return query.flatten(1) + 0 * sum(x.sum() for x in (key, value, base_key, base_value))
    per = len(query) // blocks
    each = Spans(*(ends.repeat_interleave(per) for ends in spans))  # of queries
    if window:  # token j of a block stands j + 1 behind the block's last context token
        j = torch.arange(len(key) // blocks - per, len(key) // blocks, device=query.device).repeat(
            blocks
        )
        each = each._replace(first=torch.maximum(each.first, each.last + j + 2 - window))
    return attend_spans(
        _Blocks(blocks),
        each,
        query,
        (base_key, base_value),
        (key, value),
        flex,
    ).flatten(1)


# -- paths of training-time test -------------------------------------------------------------------


class Path(NamedTuple):
    """The keys and values of one later depth."""

    key: Tensor  # [m, kv_heads, e]
    value: Tensor  # [m, kv_heads, e]
    rows: Tensor | None = None  # [t] int64, each query's own row; None if in order


class PathAttention:
    """One layer's memory between depths: the keys of the first depth, and each anchor's path since.

    Args:
        begin: [T] int64, the first token of each first-depth token's document. Documents lie one
            after the other.
        window: visible positions, own included; 0 for all. Larger than the depth, so that an anchor
            sees itself.
    """

    def __init__(self, begin: Tensor, window: int = 0):
        self.begin = begin
        self.window = window
        self.depths: list[
            tuple[Tensor, Tensor, Tensor]
        ] = []  # anchors [t] int64, key and value [t, kv_heads, e]

    def attend(
        self,
        own: Tensor,
        fresh: list[Tensor],
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The attention of the next depth.

        It changes nothing here, so that gradient checkpointing may run it twice; the new keys and
        values are returned through `fresh`, for `remember`.

        Args:
            own: [t] int64, the queries' anchors among the first-depth tokens, ascending.
        """
        begin = first = self.begin[own]  # [t]
        if self.window:
            first = torch.maximum(begin, own + len(self.depths) - self.window + 1)
        spans = Spans(first, own, begin)
        if self.depths:
            base = self.depths[0][1:]
        else:
            base = None
        paths = [
            Path(key, value, None if len(anchors) == len(own) else torch.searchsorted(anchors, own))
            for anchors, key, value in self.depths[1:]
        ]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            fresh[:] = key, value
            if base is None:
                return path_attention(query, key, value, spans, [])
            return path_attention(query, *base, spans, [*paths, Path(key, value)])

        return attend

    def remember(self, own: Tensor, key: Tensor, value: Tensor) -> None:
        """Keeps a depth's keys and values; queries of later depths must be anchors among `own`."""
        self.depths.append((own, key, value))


def path_attention(
    query: Tensor,
    base_key: Tensor,
    base_value: Tensor,
    spans: Spans,
    paths: Sequence[Path],
    flex: Flex | None = None,
) -> Tensor:
    """Each query sees an interval of base keys, and its own key of each later depth.

    The base part is torch's flash kernel on a CPU, FlexAttention elsewhere; neither runs without
    queries.

    Args:
        query: [t, heads, e]; base_key, base_value: [T, kv_heads, e].
        spans: the intervals. paths: one entry per later depth.

    Returns:
        [t, heads * e].
    """
    tensors = [tensor for path in paths for tensor in path[:2]]
    own = _Paths([path.rows for path in paths])
    return attend_spans(own, spans, query, (base_key, base_value), tensors, flex).flatten(1)
