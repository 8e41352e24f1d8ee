"""The chunked divergence against plain autograd in float64, and acceptance under a pruned vocabulary."""

from __future__ import annotations

import pytest
import torch

from drafttrain.losses import DIVERGENCES, TargetRows, linear_divergence


def plain(name: str, z: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    p, q = target_logits.softmax(-1), z.softmax(-1)
    log_p, log_q = target_logits.log_softmax(-1), z.log_softmax(-1)
    return {
        "kl": (p * (log_p - log_q)).sum(-1),
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "tv": 0.5 * (p - q).abs().sum(-1),
    }[name]


def make(tokens: int = 13, rows: int = 9, hidden: int = 6, kept: int = 17, full: int = 29):
    generator = torch.Generator().manual_seed(1)
    double = {"generator": generator, "dtype": torch.float64}
    head = torch.randn(full, hidden, **double)
    states = torch.randn(rows, hidden, **double)
    kept_ids = torch.randperm(full, generator=generator)[:kept].sort().values
    logits = states @ head.T
    to_drafter = torch.full((full,), -1)
    to_drafter[kept_ids] = torch.arange(kept)
    target = TargetRows(states, head[kept_ids], logits.logsumexp(-1), to_drafter[logits.argmax(-1)], lambda x: x)
    x = torch.randn(tokens, hidden, **double).requires_grad_()
    w = torch.randn(kept, hidden, **double).requires_grad_()
    index = torch.randint(0, rows, (tokens,), generator=generator)
    weight = torch.rand(tokens, **double)
    return x, w, target, index, weight, logits, kept_ids


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_value_and_gradients_match_autograd(name, chunk):
    x, w, target, index, weight, _, _ = make()
    ours = linear_divergence(x, w, target, index, weight, name, chunk)
    (3.0 * ours.loss).backward()  # a factor other than one, as gradient scaling brings
    got = x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    values = plain(name, x @ w.T, target.logits(index))
    (3.0 * (values * weight).sum()).backward()
    torch.testing.assert_close(ours.values.double(), values.detach(), rtol=1e-5, atol=1e-6)
    # The chunked form computes in float32, as models do.
    torch.testing.assert_close(got[0], x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[1], w.grad, rtol=1e-4, atol=1e-5)


def test_acceptance_uses_the_full_target_distribution():
    x, w, target, index, weight, logits, kept_ids = make()
    out = linear_divergence(x, w, target, index, weight)
    p = logits[index].softmax(-1)
    q = torch.zeros_like(p)
    q[:, kept_ids] = (x @ w.T).softmax(-1).detach()
    torch.testing.assert_close(out.alpha.double(), torch.minimum(p, q).sum(-1), rtol=1e-4, atol=1e-6)
    expected = logits[index].argmax(-1) == kept_ids[(x @ w.T).argmax(-1)]
    assert torch.equal(out.agree, expected)
    # Some target choice lies outside the kept vocabulary here, and must count as a miss.
    assert (target.argmax[index] == -1).any() and not out.agree[target.argmax[index] == -1].any()


def test_identical_distributions_have_no_loss_and_full_acceptance():
    _, _, target, index, weight, _, _ = make(kept=29, full=29)
    same = linear_divergence(target.hidden[index].clone().requires_grad_(), target.weight, target, index, weight)
    assert same.loss.abs() < 1e-6 and torch.allclose(same.alpha, torch.ones_like(same.alpha), atol=1e-5)
    assert same.agree.all()
