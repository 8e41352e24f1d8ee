"""Attention of blocks against one softmax under a dense mask over context and blocks."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from drafttrain.ops import path_attention as ops
from drafttrain.ops.path_attention import Spans, block_attention
from tests.ops.textbook_blocks import textbook

LENGTHS = (5, 300, 1, 9)  # documents, one longer than a call of the kernel


def case(size, asked, share, seed=0, heads=4, kv=2, e=8, dtype=torch.float64):
    """Queries, keys and values of the context, those of the blocks and sinks (leaves), and the blocks' spans."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS)
    begin = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    own = (torch.rand(len(begin), generator=generator) < share).nonzero().squeeze(1)
    make = lambda n, h: torch.randn(n, h, e, generator=generator, dtype=dtype).requires_grad_()  # noqa: E731
    sizes = (len(own) * asked, heads), *[(len(begin), kv)] * 2, *[(len(own) * size, kv)] * 2
    leaves = [make(*each) for each in sizes]
    leaves.append(torch.randn(heads, generator=generator, dtype=dtype).requires_grad_())
    return leaves, Spans(begin[own], own, begin[own])


def outputs(function, leaves, spans, window=0, causal=False):
    for leaf in leaves:
        leaf.grad = None
    out = function(leaves[0], leaves[3:], leaves[1:3], spans, window=window, causal=causal)
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out, *(leaf.grad for leaf in leaves)]


@pytest.mark.thorough
@pytest.mark.parametrize("window", [0, 6, 150])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "asked", "share"), [(4, 4, 1.0), (5, 4, 0.2), (2, 1, 0.5)])
def test_outputs_and_gradients_are_the_textbooks(size, asked, share, causal, window):
    leaves, spans = case(size, asked, share)
    leaves = leaves[: 5 + causal]  # sinks beside causal blocks
    functions = (block_attention, textbook)
    both = (outputs(function, leaves, spans, window, causal) for function in functions)
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_no_block_at_all_still_reaches_every_tensor():
    leaves, spans = case(4, 3, 0.0)
    assert all(not grad.any() for grad in outputs(block_attention, leaves, spans)[1:])


@pytest.mark.thorough
@pytest.mark.parametrize(("window", "causal"), [(0, False), (6, True)])
def test_the_form_for_gpus_gives_the_same(window, causal, monkeypatch):
    """FlexAttention as torch defines it, uncompiled; its gradients exist on GPUs only."""
    leaves, spans = case(5, 4, 0.2, e=16, dtype=torch.float32)
    with torch.no_grad():
        form = {"window": window, "causal": causal}
        leaves = [leaf.detach() for leaf in leaves]
        parts = (leaves[0], leaves[3:], leaves[1:3], spans)
        wanted = block_attention(*parts, **form)
        attend = ops.attend_spans
        monkeypatch.setattr(ops, "attend_spans", lambda *parts: attend(*parts, flex_attention))
        got = block_attention(*parts, **form)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
