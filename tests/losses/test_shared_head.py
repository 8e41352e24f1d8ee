"""A head that several depths read: one gradient for all of them, and no copy of a frozen head in another dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from drafttrain.losses import SharedHead, TargetRows, divergence, linear_divergence
from drafttrain.losses.divergence import products, products_backward


def make(tokens=6, width=8, words=50, depths=3):
    generator = torch.Generator().manual_seed(0)
    states, head = (torch.randn(n, width, generator=generator) for n in (tokens, words))
    logits = states @ head.T
    rows = TargetRows(states, head, logits.logsumexp(-1), logits.argmax(-1))
    reads = [
        torch.randn(tokens, width, generator=generator).requires_grad_() for _ in range(depths)
    ]
    weight = torch.randn(words, width, generator=generator).requires_grad_()
    return rows, reads, weight, torch.arange(tokens), torch.rand(tokens, generator=generator)


def test_depths_share_one_gradient_matrix():
    rows, reads, weight, index, shares = make()
    apart = torch.stack(
        [linear_divergence(x, weight, rows, index, shares).loss for x in reads]
    ).sum()
    want = torch.autograd.grad(3.0 * apart, (weight, *reads))
    kept: list[torch.Tensor] = []

    def note(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        head = SharedHead(weight)
        together = (
            torch.stack([linear_divergence(x, head, rows, index, shares).loss for x in reads]).sum()
            + head.term()
        )
    got = torch.autograd.grad(3.0 * together, (weight, *reads))
    assert sum(saved.shape == weight.shape for saved in kept) == 1, "not one per depth"
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(got, want)


def test_a_frozen_head_has_no_gradient():
    rows, reads, weight, index, shares = make()
    head = SharedHead(weight.detach())
    loss = linear_divergence(reads[0], head, rows, index, shares).loss + head.term()
    loss.backward()
    assert reads[0].grad is not None and weight.grad is None


class Largest(TorchDispatchMode):
    """Notes the numbers of the largest tensor that a conversion makes."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.count = max(self.count, out.numel())
        return out


@pytest.mark.parametrize("words", [64, 51])
def test_a_narrow_head_is_converted_part_by_part(monkeypatch, words):
    monkeypatch.setattr(divergence, "_CONVERTED", 10 * 8)
    rows = torch.randn(5, 8)
    grad = torch.randn(5, words)
    weight = torch.randn(words, 8).bfloat16()
    with Largest() as largest:
        got = products(rows, weight)
        back = products_backward(grad, weight)
    assert largest.count == 10 * 8
    torch.testing.assert_close(got, F.linear(rows, weight.float()))
    torch.testing.assert_close(back, grad @ weight.float())


def test_autocast_narrows_the_products_and_nothing_else():
    rows, reads, weight, index, shares = make(tokens=40, words=200)
    want = linear_divergence(reads[0], weight, rows, index, shares)
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_divergence(reads[0], weight, rows, index, shares)
        rounded = linear_divergence(reads[0].bfloat16(), weight.bfloat16(), rows, index, shares)
    assert got.values.dtype == torch.float32 and torch.equal(got.values, rounded.values)
    assert not torch.equal(got.values, want.values)
    torch.testing.assert_close(got.values, want.values, atol=0.05, rtol=0.02)
    mine, theirs = (torch.autograd.grad(out.loss, (reads[0], weight)) for out in (got, want))
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == torch.float32 and (a - b).norm() < 0.02 * b.norm()
