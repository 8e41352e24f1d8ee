"""Divergences between a target row p and a drafter row q, each with its gradient in the drafter's logits.

Every function maps (p, log_p, q, log_q), float32 [c, d] with rows that sum to one, to (value [c], gradient [c, d]). With
q = softmax(z), the gradient of any value D is q * (D' - sum(q * D')) where D' is dD/dq; each function states its own
short form. Values that a test compares with autograd in float64 live nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _safe_log(p: Tensor, log_p: Tensor) -> Tensor:
    """log p with 0 where p underflowed, so that 0 * log 0 counts as 0."""
    return torch.where(p > 0, log_p, torch.zeros_like(log_p))


def forward_kl(p: Tensor, log_p: Tensor, q: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """sum p (log p - log q): cover everything the target might say. Gradient q - p."""
    return (p * (_safe_log(p, log_p) - log_q)).sum(-1), q - p


def reverse_kl(p: Tensor, log_p: Tensor, q: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """sum q (log q - log p): stay where the target is sure. Gradient q * (log q/p - value)."""
    ratio = _safe_log(q, log_q) - log_p.clamp_min(-100.0)
    value = (q * ratio).sum(-1)
    return value, q * (ratio - value.unsqueeze(-1))


def total_variation(p: Tensor, log_p: Tensor, q: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """1 - sum min(p, q): the probability that a sampled draft token is rejected. Gradient q * (sum(q 1[q<p]) - 1[q<p])."""
    below = (q < p).to(q.dtype)
    value = 1 - torch.minimum(p, q).sum(-1)
    return value, q * ((q * below).sum(-1, keepdim=True) - below)


DIVERGENCES: dict[str, Divergence] = {
    "kl": forward_kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
}
