"""Attention of training: each query sees an interval of base keys, and a few keys of its own.

    training-time test, query at (anchor t, depth k)     drafted blocks, query of block i
    first-depth keys from `first` to t                   context keys from spans.first[i] to spans.last[i]
    its own keys at depths 1 .. k, one row per depth     the keys of block i, earlier and later ones

The interval follows from document, causality and window. The textbook form is one softmax under a
dense mask. Here it is two, merged by their log-sum-exp: flash attention over the intervals, block
by block, and either row-wise products over the paths or flash attention within the drafted blocks.
Neither part stores a score per head and pair.

Shapes: t queries, T base tokens, k later depths, m drafted blocks of B tokens with A queries each,
e head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
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
    """The base tokens that each query sees: an interval that ends at its own anchor.

    Ends ascend within a document.
    """

    first: Tensor  # [t] int64
    last: Tensor  # [t] int64, included
    begin: Tensor  # [t] int64, where the query's document begins

    def blocks(self) -> list[tuple[slice, slice]]:
        """Up to BLOCK queries of one document each, and the keys that any of them sees."""
        changed = self.begin[1:] != self.begin[:-1]
        first = self.first.tolist()
        last = self.last.tolist()
        # Where documents begin among the queries, and the end.
        cuts = [0]
        cuts += changed.nonzero().squeeze(1).add(1).tolist()
        cuts.append(len(last))
        result = []
        for begin, end in pairwise(cuts):
            for start in range(begin, end, BLOCK):
                stop = min(start + BLOCK, end)
                # Ends ascend, so the last query's is the highest.
                keys = slice(min(first[start:stop]), last[stop - 1] + 1)
                result.append((slice(start, stop), keys))
        return result

    def bias(
        self,
        queries: slice,
        keys: slice,
        dtype: torch.dtype,
    ) -> Tensor:
        """[1, 1, queries, keys] additive mask of 0 and -inf."""
        seen = torch.arange(keys.start, keys.stop, device=self.first.device)  # [keys]
        before = seen < self.first[queries, None]  # [queries, keys]
        masked = before | (seen > self.last[queries, None])
        bias = torch.zeros(masked.shape, dtype=dtype, device=masked.device)
        return bias.masked_fill_(masked, float("-inf"))[None, None]

    def block_mask(self, keys: int) -> BlockMask:
        """The mask for FlexAttention over `keys` keys, from the ends of the intervals.

        No [t, keys] matrix is formed.
        """
        t = len(self.first)
        whole = -(-t // BLOCK) * BLOCK  # rounded up; copies of the last query fill its block
        padded = torch.arange(whole, device=self.first.device).clamp(max=t - 1)
        first = self.first[padded].view(-1, BLOCK)  # [query blocks, BLOCK]
        last = self.last[padded].view(-1, BLOCK)  # [query blocks, BLOCK]
        begin = torch.arange(0, keys, BLOCK, device=first.device)  # [key blocks]
        end = (begin + BLOCK).clamp(max=keys) - 1  # [key blocks], included

        # [query blocks, key blocks]: any query sees any key, and all queries see all keys
        touched = begin <= last.amax(1, keepdim=True)
        touched &= end >= first.amin(1, keepdim=True)
        full = begin >= first.amax(1, keepdim=True)
        full &= end <= last.amin(1, keepdim=True)
        full &= end - begin == BLOCK - 1  # not one that ends early
        own_first = self.first
        own_last = self.last

        def sees(
            b: Tensor,
            head: Tensor,
            query: Tensor,
            key: Tensor,
        ) -> Tensor:
            return (key >= own_first[query]) & (key <= own_last[query])

        count, partial = _listed(touched & ~full)
        full_count, complete = _listed(full)
        return BlockMask.from_kv_blocks(
            count,
            partial,
            full_count,
            complete,
            BLOCK,
            sees,
            (t, keys),
        )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks are chosen for each query block, and their numbers, chosen ones first.

    Args:
        chosen: [query blocks, key blocks] bool.

    Returns:
        [1, 1, query blocks] and [1, 1, query blocks, key blocks], int32 both.
    """
    numbers = chosen.to(torch.int32)
    order = numbers.argsort(
        dim=1,
        descending=True,
        stable=True,
    )
    return chosen.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]


def _heads_first(x: Tensor) -> Tensor:
    """[n, heads, e] -> [1, heads, n, e], as the flash kernel reads it."""
    return x.transpose(0, 1)[None]


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
        block, block_lse = cpu_flash(  # [1, heads, queries, e], [1, heads, queries]
            _heads_first(query[queries]),
            _heads_first(key[keys]),
            _heads_first(value[keys]),
            attn_mask=spans.bias(queries, keys, query.dtype),
        )
        out[queries] = block[0].transpose(0, 1)
        lse[queries] = block_lse[0].transpose(0, 1)
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
        query_grad, key_grad, value_grad = cpu_flash_backward(  # [1, heads, n, e] each
            _heads_first(grad[queries]),
            _heads_first(query[queries]),
            _heads_first(key[keys]),
            _heads_first(value[keys]),
            _heads_first(out[queries]),
            lse[queries].t()[None].contiguous(),
            0.0,  # no dropout
            False,  # not causal: the mask says what is seen
            attn_mask=spans.bias(queries, keys, query.dtype),
        )
        of_query[queries] = query_grad[0].transpose(0, 1)
        of_key[keys] += key_grad[0].transpose(0, 1)
        of_value[keys] += value_grad[0].transpose(0, 1)
    return of_query, of_key, of_value


# -- own keys, and both parts under one softmax ----------------------------------------------------


Tensors = Sequence[Tensor]
Pair = tuple[Tensor, Tensor]


def _own_rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """[m, kv_heads, e] -> [t, kv_heads, 1, e], each query's own row."""
    if rows is not None:
        tensor = tensor[rows]
    return tensor.unsqueeze(2)


class _Paths(NamedTuple):
    """Own keys of training-time test.

    `tensors` are the key and the value [m, kv_heads, e] of each later depth in turn.
    """

    rows: Sequence[Tensor | None]  # [t] int64 per depth, each query's own row; None if in order

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
        t, heads, e = query.shape  # t may be 0
        kv_heads = tensors[0].shape[1]
        group = heads // kv_heads
        grouped = query.reshape(t, kv_heads, group, e)

        # Scores of each depth's own key.
        products = []
        for key, rows in zip(tensors[::2], self.rows, strict=True):
            products.append((grouped * _own_rows(key, rows)).sum(-1))  # [t, kv_heads, group]
        exact = torch.promote_types(query.dtype, torch.float32)
        scores = torch.stack(products, dim=-1).flatten(1, 2)  # [t, heads, k]
        scores = scores.to(exact) * e**-0.5
        lse = torch.logaddexp(base_lse, scores.logsumexp(-1))  # [t, heads]

        # The base's share of the softmax, and the own values by their weights.
        share = (base_lse - lse).exp().unsqueeze(-1).to(base.dtype)  # [t, heads, 1]
        out = (base * share).reshape(t, kv_heads, group, e)
        weights = (scores - lse.unsqueeze(-1)).exp().to(base.dtype)  # [t, heads, k]
        weights = weights.view(t, kv_heads, group, 1, len(products))
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
        t, heads, e = query.shape
        kv_heads = tensors[0].shape[1]
        group = heads // kv_heads
        weights = (scores - lse.unsqueeze(-1)).exp()  # [t, heads, k]
        delta = (grad * out).sum(-1)  # [t, heads] of a softmax's backward
        grad_groups = grad.view(t, kv_heads, group, e)
        query_groups = query.view(t, kv_heads, group, e)
        into = into.view(t, kv_heads, group, e)
        grads = []
        for i, rows in enumerate(self.rows):
            key = tensors[2 * i]
            value = tensors[2 * i + 1]
            weight = weights[..., i].to(grad.dtype)  # [t, heads]
            weight_grad = (grad_groups * _own_rows(value, rows)).sum(-1).view(t, heads)
            score_grad = weight * (weight_grad - delta) * e**-0.5  # [t, heads]
            change = score_grad.view(t, kv_heads, group, 1)
            into += change * _own_rows(key, rows)
            key_grad = (change * query_groups).sum(2)  # [t, kv_heads, e]
            value_grad = (weight.view(t, kv_heads, group, 1) * grad_groups).sum(2)
            if rows is not None:
                # Rows that no query reads have no gradient.
                key_grad = torch.zeros_like(key).index_copy(0, rows, key_grad)
                value_grad = torch.zeros_like(key).index_copy(
                    0,
                    rows,
                    value_grad,
                )
            grads.append(key_grad)
            grads.append(value_grad)
        return grads


class _Blocks(NamedTuple):
    """Own keys of drafted blocks.

    `tensors` are key and value [m * B, kv_heads, e], block after block, and perhaps sinks [heads].
    """

    blocks: int  # m
    mask: Tensor | None  # [A, B] float32, 0 where a query sees a key, else -inf; None: all of them

    def split(self, x: Tensor) -> Tensor:
        """[m * B, heads, ...] -> [m, heads, B, ...]."""
        return x.unflatten(0, (self.blocks, -1)).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """[m, heads, B, ...] -> [m * B, heads, ...]."""
        return x.transpose(1, 2).flatten(0, 1)

    def mask_like(self, query: Tensor) -> Tensor | None:
        return None if self.mask is None else self.mask.to(query.dtype)

    def merge(
        self,
        query: Tensor,
        base: Tensor,
        base_lse: Tensor,
        tensors: Tensors,
        flash: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries = self.split(query)  # [m, heads, A, e]
        key = self.split(tensors[0])  # [m, kv_heads, B, e]
        value = self.split(tensors[1])
        if flash:
            own, own_lse = cpu_flash(queries, key, value, attn_mask=self.mask_like(query))
        else:
            group = queries.shape[1] // key.shape[1]
            key = key.repeat_interleave(group, dim=1)  # [m, heads, B, e]
            value = value.repeat_interleave(group, dim=1)
            # One name for both, so that the products are freed before the weights are formed.
            scores = (queries @ key.transpose(-1, -2)).float()
            scores = scores * query.shape[2] ** -0.5  # [m, heads, A, B]
            if self.mask is not None:
                scores = scores + self.mask
            own_lse = scores.logsumexp(-1)
            own = (scores - own_lse.unsqueeze(-1)).exp().to(query.dtype) @ value  # [m, heads, A, e]
        own = self.join(own)  # [m * A, heads, e]
        own_lse = self.join(own_lse)  # [m * A, heads]
        lse = torch.logaddexp(base_lse, own_lse)
        if len(tensors) == 3:  # a sink takes its share of the softmax and has no value
            lse = torch.logaddexp(lse, tensors[2].to(lse.dtype))
        base_share = (base_lse - lse).exp().unsqueeze(-1).to(base.dtype)  # [m * A, heads, 1]
        own_share = (own_lse - lse).exp().unsqueeze(-1).to(base.dtype)
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
        query_grad, key_grad, value_grad = cpu_flash_backward(  # [m, heads, n, e] each
            self.split(grad),
            self.split(query),
            self.split(tensors[0]),
            self.split(tensors[1]),
            self.split(out),
            self.split(lse).contiguous(),
            0.0,  # no dropout
            False,  # the mask says what a query does not see
            attn_mask=self.mask_like(query),
        )
        self.split(into).add_(query_grad)
        grads = [self.join(key_grad), self.join(value_grad)]
        if len(tensors) == 3:
            weights = (tensors[2] - lse).exp()  # [m * A, heads]
            grads.append(-(weights * (grad * out).sum(-1)).sum(0).to(tensors[2].dtype))
        return grads


Own = _Paths | _Blocks


class _OnCpu(torch.autograd.Function):
    """Both parts under one softmax.

    Each backward takes the merged output and log-sum-exp, see `span_attention_backward`.
    """

    @staticmethod
    def forward(
        ctx,
        own: Own,
        spans: Spans,
        query,
        base_key,
        base_value,
        *tensors: Tensor,
    ):
        base, base_lse = span_attention(query, base_key, base_value, spans)
        out, lse, scores = own.merge(
            query,
            base,
            base_lse,
            tensors,
            flash=True,
        )
        ctx.own = own
        ctx.spans = spans
        ctx.save_for_backward(
            query,
            base_key,
            base_value,
            out,
            lse,
            scores,
            *tensors,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        query, base_key, base_value, out, lse, scores, *tensors = ctx.saved_tensors
        grad = grad.contiguous()
        query_grad, key_grad, value_grad = span_attention_backward(
            grad,
            query,
            base_key,
            base_value,
            out,
            lse,
            ctx.spans,
        )
        # This adds to the query's gradient.
        own = ctx.own.backward(
            grad,
            query_grad,
            query,
            out,
            lse,
            scores,
            tensors,
        )
        return None, None, query_grad, key_grad, value_grad, *own


def narrowed(
    query: Tensor,
    base: Pair,
    tensors: Tensors,
) -> tuple[Tensor, Pair, Tensors]:
    """All in autocast's dtype, if it is on: float32 rotary tables or norms may have widened some."""
    kind = query.device.type
    if not torch.is_autocast_enabled(kind):
        return query, base, tensors
    dtype = torch.get_autocast_dtype(kind)
    key, value = base
    converted = [tensor.to(dtype) for tensor in tensors]
    return query.to(dtype), (key.to(dtype), value.to(dtype)), converted


@wrap_torch_function(lambda own, spans, query, *rest: (query,))
def attend_spans(
    own: Own,
    spans: Spans,
    query: Tensor,
    base: Pair,
    tensors: Tensors,
    flex: Flex | None = None,
) -> Tensor:
    """Attention of both parts, [t, heads, e].

    It runs by flash attention on a CPU; elsewhere, or by a given `flex`, with torch's gradients.
    `drafttrain plan` overrides it.
    """
    if flex is None and (query.device.type == "cpu" or not len(query)):
        # The CPU's flash attention is faster in float32 than in bfloat16.
        wide = [_widened(x) for x in (query, *base, *tensors)]
        return _OnCpu.apply(own, spans, *wide).to(query.dtype)
    query, base, tensors = narrowed(query, base, tensors)
    key, value = base
    base_out, base_lse = span_attention_gpu(query, key, value, spans, flex)
    out, _, _ = own.merge(query, base_out, base_lse, tensors, flash=False)
    return out


def _widened(x: Tensor) -> Tensor:
    """The tensor in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# -- drafted blocks --------------------------------------------------------------------------------


def block_attention(
    query: Tensor,
    own: Tensors,
    base: Pair,
    spans: Spans,
    window: int = 0,
    causal: bool = False,
) -> Tensor:
    """Attention of m blocks of B tokens, whose last A tokens are queries.

    Args:
        query: [m * A, heads, e]; own: keys and values [m * B, kv_heads, e], block after block, and
            perhaps sinks [heads] (`AttentionForm`).
        base: keys and values [T, kv_heads, e] of the context.
        spans: the context interval of each block, none of them empty.
        window: positions that a query sees, its own included, 0 for all; larger than B, so that a
            block sees all of itself.
        causal: a query sees no later token of its block.

    Returns:
        [m * A, heads * e].
    """
    blocks = len(spans.last)
    if not blocks:
        # Other ranks have blocks and share these weights, so they need a gradient of zero here.
        zero = 0 * sum(x.sum() for x in (*own, *base))
        return query.flatten(1) + zero
    per = len(query) // blocks  # A
    size = len(own[0]) // blocks  # B
    first = spans.first.repeat_interleave(per)  # [m * A]
    last = spans.last.repeat_interleave(per)
    begin = spans.begin.repeat_interleave(per)
    if window:  # token j of a block stands j + 1 behind the block's last context token
        j = torch.arange(size - per, size, device=query.device).repeat(blocks)
        first = torch.maximum(first, last + j + 2 - window)
    mask = None
    if causal:
        later = torch.full((per, size), -torch.inf, dtype=torch.float32, device=query.device)
        mask = later.triu(size - per + 1)
    blocked = _Blocks(blocks, mask)
    each = Spans(first, last, begin)
    return attend_spans(blocked, each, query, base, own).flatten(1)


# -- paths of training-time test -------------------------------------------------------------------


class PathAttention:
    """One layer's memory between depths: the keys of the first depth, and each anchor's path since.

    Args:
        begin: [T] int64, the first token of each first-depth token's document. Documents follow
            each other.
        window: visible positions, own included; 0 for all. It must exceed the depth, so that an
            anchor sees itself.
    """

    def __init__(self, begin: Tensor, window: int = 0):
        self.begin = begin
        self.window = window
        self.anchors: list[Tensor] = []  # [t] int64 of each depth
        self.held: list[Tensor] = []  # key and value [t, kv_heads, e] of each depth in turn

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
        begin = self.begin[own]  # [t]
        first = begin  # of the interval of first-depth keys that each query sees
        if self.window:
            # At depth k a query stands k positions behind its anchor.
            first = torch.maximum(begin, own + len(self.anchors) - self.window + 1)
        spans = Spans(first, own, begin)
        rows: list[Tensor | None] = []
        for anchors in self.anchors[1:]:
            in_order = len(anchors) == len(own)
            rows.append(None if in_order else torch.searchsorted(anchors, own))
        if self.anchors:  # the new keys of a later depth are in order
            rows.append(None)
        held = list(self.held)

        def attend(
            query: Tensor,
            key: Tensor,
            value: Tensor,
        ) -> Tensor:
            fresh[:] = key, value
            base_key, base_value, *paths = (*held, key, value)
            own_keys = _Paths(rows)
            out = attend_spans(own_keys, spans, query, (base_key, base_value), paths)
            return out.flatten(1)  # [t, heads * e]

        return attend

    def remember(
        self,
        own: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> None:
        """Keeps a depth's keys and values; queries of later depths must be anchors among `own`."""
        self.anchors.append(own)
        self.held += (key, value)
