"""Divergences between a target row p and a drafter row q = softmax(z), each with its gradient in z.

Every function maps a chunk of row pairs to (value [c], gradient [c, d]). With q = softmax(z), the gradient of any value D
is q * (D' - sum(q * D')) where D' is dD/dq; each function states its own short form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Rows:
    """A chunk of aligned distributions over the kept vocabulary, float32.

    Attributes:
        p: [c, d] target, renormalised on the kept tokens; entropy: [c] of it.
        z: [c, d] drafter logits; q: [c, d] their softmax; log_z: [c] their logsumexp.
        log_p: gives [c, d] log p; called only by the divergences that need it.
    """

    p: Tensor
    entropy: Tensor
    z: Tensor
    q: Tensor
    log_z: Tensor
    log_p: Callable[[], Tensor]


Divergence = Callable[[Rows], tuple[Tensor, Tensor]]


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise product sums [c] without a [c, d] temporary."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).flatten()


def forward_kl(rows: Rows) -> tuple[Tensor, Tensor]:
    """sum p (log p - log q): cover everything the target might say. Gradient q - p."""
    return rows.log_z - dot(rows.p, rows.z) - rows.entropy, rows.q - rows.p


def reverse_kl(rows: Rows) -> tuple[Tensor, Tensor]:
    """sum q (log q - log p): stay where the target is sure. Gradient q * (log q/p - value)."""
    ratio = rows.z - rows.log_z.unsqueeze(1) - rows.log_p()
    value = dot(rows.q, ratio)
    return value, rows.q * (ratio - value.unsqueeze(1))


def total_variation(rows: Rows) -> tuple[Tensor, Tensor]:
    """1 - sum min(p, q): the probability that a sampled draft token is rejected. Gradient q * (sum(q 1[q<p]) - 1[q<p])."""
    below = (rows.q < rows.p).to(rows.q.dtype)
    value = 1 - torch.minimum(rows.p, rows.q).sum(-1)
    return value, rows.q * (dot(rows.q, below).unsqueeze(1) - below)


DIVERGENCES: dict[str, Divergence] = {
    "kl": forward_kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
}
