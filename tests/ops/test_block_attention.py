"""Attention of blocks against one softmax under a dense mask over context and blocks."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from drafttrain.ops.path_attention import Spans, block_attention

LENGTHS = (5, 300, 1, 9)  # documents, one longer than a call of the kernel


def case(size, asked, share, seed=0, heads=4, kv=2, e=8, dtype=torch.float64):
    """Queries, keys and values of blocks and context (leaves), and the blocks' spans."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS)
    begin = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    own = (torch.rand(len(begin), generator=generator) < share).nonzero().squeeze(1)
    make = lambda n, h: torch.randn(n, h, e, generator=generator, dtype=dtype).requires_grad_()  # noqa: E731
    sizes = (len(own) * asked, heads), *[(len(own) * size, kv)] * 2, *[(len(begin), kv)] * 2
    return [make(*each) for each in sizes], Spans(begin[own], own, begin[own])


def textbook(query, key, value, base, spans, window=0, causal=False, sinks=None):
    base_key, base_value = base
    heads, e = query.shape[1:]
    blocks = len(spans.last)
    kv = key.shape[1]
    of_query = torch.arange(blocks).repeat_interleave(len(query) // blocks)
    of_key = torch.arange(blocks).repeat_interleave(len(key) // blocks)
    at = torch.arange(len(base_key))
    context = (at >= spans.first[of_query, None]) & (at <= spans.last[of_query, None])
    if window:  # by distance: a block begins right behind its last context token
        place = (
            spans.last[:, None] + 1 + torch.arange(len(key) // blocks)[-(len(query) // blocks) :]
        )  # [m, A]
        context &= place.flatten()[:, None] - at < window
    own = of_query[:, None] == of_key
    if causal:
        size = len(key) // blocks
        place_of_key = torch.arange(size).repeat(blocks)
        place_of_query = torch.arange(size)[-(len(query) // blocks) :].repeat(blocks)
        own &= place_of_key <= place_of_query[:, None]
    mask = torch.cat((context, own), dim=1)
    keys, values = (
        torch.cat(x).repeat_interleave(heads // kv, 1)
        for x in ((base_key, key), (base_value, value))
    )
    scores = torch.einsum("the,she->hts", query, keys) * e**-0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:  # a further column without a value
        column = sinks[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, column), dim=-1)
        values = torch.cat((values, torch.zeros_like(values[:1])))
    weights = scores.softmax(-1)
    return torch.einsum("hts,she->the", weights, values).flatten(1)


def outputs(function, leaves, spans, window=0, causal=False):
    """leaves: query, key, value, the context's key and value, and perhaps sinks."""
    for leaf in leaves:
        leaf.grad = None
    sinks = leaves[5] if len(leaves) > 5 else None
    options = {"window": window, "causal": causal, "sinks": sinks}
    out = function(*leaves[:3], leaves[3:5], spans, **options)
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out, *(leaf.grad for leaf in leaves)]


@pytest.mark.thorough
@pytest.mark.parametrize("window", [0, 6, 150])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "asked", "share"), [(4, 4, 1.0), (5, 4, 0.2), (2, 1, 0.5)])
def test_outputs_and_gradients_are_the_textbooks(size, asked, share, causal, window):
    leaves, spans = case(size, asked, share)
    functions = (block_attention, textbook)
    both = (outputs(function, leaves, spans, window, causal) for function in functions)
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def with_sinks(leaves):
    generator = torch.Generator().manual_seed(1)
    sinks = torch.randn(4, generator=generator, dtype=leaves[0].dtype)
    return [*leaves, sinks.requires_grad_()]


@pytest.mark.parametrize("causal", [False, True])
def test_sinks_take_their_share_of_the_softmax(causal):
    leaves, spans = case(5, 4, 0.2)
    leaves = with_sinks(leaves)
    functions = (block_attention, textbook)
    both = [outputs(function, leaves, spans, 6, causal) for function in functions]
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    assert both[0][-1].all()
    plain = outputs(block_attention, leaves[:5], spans, 6, causal)[0]
    assert (plain - both[0][0]).abs().max() > 1e-2


def test_no_block_at_all_still_reaches_every_tensor():
    leaves, spans = case(4, 3, 0.0)
    leaves = with_sinks(leaves)
    assert all(not grad.any() for grad in outputs(block_attention, leaves, spans)[1:])


@pytest.mark.thorough
@pytest.mark.parametrize(("window", "causal"), [(0, False), (6, True)])
def test_the_form_for_gpus_gives_the_same(window, causal):
    """FlexAttention as torch defines it, uncompiled; its gradients exist on GPUs only."""
    leaves, spans = case(5, 4, 0.2, e=16, dtype=torch.float32)
    with torch.no_grad():
        form = {"window": window, "causal": causal}
        leaves = [leaf.detach() for leaf in leaves]
        got = block_attention(*leaves[:3], leaves[3:], spans, flex_attention, **form)
        torch.testing.assert_close(
            got, block_attention(*leaves[:3], leaves[3:], spans, **form), rtol=1e-5, atol=1e-5
        )
