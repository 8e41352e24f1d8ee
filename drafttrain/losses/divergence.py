"""Divergences between a target row p and a drafter row q = softmax(z / T), each with its gradient in z / T.

Every function maps a chunk of row pairs to (value [c], gradient [c, d]). With q a softmax, the gradient of any value D is
q * (D' - sum(q * D')) where D' is dD/dq; each function states its own short form.

A drafter may know only some of the target's tokens. Divergences proper (kl, reverse_kl, js) compare q with p renormalised
on them, the nearest thing that the drafter can say. Losses of acceptance (tv, tvd++, lk_alpha, lk_lambda) read the full p:
verification accepts with min(1, p / q) of the full p, so sum min(p, q) is then the very rate that decoding will see. Both
have their optimum at the renormalised p.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from drafttrain.losses.targets import Targets

# Floor of what is divided by: an acceptance this small no longer scales the gradient up.
_TINY = 1e-12


class Rows:
    """A chunk of aligned distributions over the kept vocabulary, float32 or wider; the target's part is formed when asked for.

    Attributes:
        z: [c, d] drafter logits, divided by the temperature; q: [c, d] their softmax; log_z: [c] their logsumexp.
        p: [c, d] target, renormalised on the kept tokens; entropy: [c] of it.
        full: [c, d] the target's probabilities as they are, so that rows add up to at most 1.
        alpha: [c] sum min(full, q), the chance that a sampled draft token is accepted.
        sampled: [c] int64, drafter id of the data's own next token, -1 where the drafter cannot say it.
    """

    def __init__(self, z: Tensor, targets: Targets, index: Tensor, temperature: float):
        self.z = z if temperature == 1 else z / temperature
        self.log_z = self.z.logsumexp(-1)
        self.q = (self.z - self.log_z.unsqueeze(1)).exp_()
        self._targets, self._index, self._temperature = targets, index, temperature

    @cached_property
    def _kept(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._targets.kept(self._index, self._temperature, self)

    @property
    def p(self) -> Tensor:
        return self._kept[0]

    @property
    def entropy(self) -> Tensor:
        return self._kept[1]

    def log_p(self) -> Tensor:
        """[c, d] log p, for the divergences that need it."""
        logits = self._targets.logits(self._index, self)
        return (logits if self._temperature == 1 else logits / self._temperature) - self._kept[2].unsqueeze(1)

    def log_q(self) -> Tensor:
        return self.z - self.log_z.unsqueeze(1)

    @cached_property
    def _share(self) -> Tensor:
        """[c, 1] mass of the full distribution on the kept tokens."""
        return (self._kept[2] - self._targets.full_log_z(self._index, self._temperature)).exp().unsqueeze(1)

    @cached_property
    def full(self) -> Tensor:
        return self.p * self._share

    @cached_property
    def alpha(self) -> Tensor:
        return torch.minimum(self.full, self.q).sum(-1)

    def final_alpha(self) -> Tensor:
        """alpha, when p is needed no more: without another [c, d] matrix."""
        if "full" not in self.__dict__:
            self.full = self.p.mul_(self._share)
        return self.alpha

    @property
    def sampled(self) -> Tensor:
        return self._targets.sampled_at(self._index)


Divergence = Callable[[Rows, float], tuple[Tensor, Tensor]]


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise product sums [c] without a [c, d] temporary."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).flatten()


def forward_kl(rows: Rows, _: float = 0) -> tuple[Tensor, Tensor]:
    """sum p (log p - log q): cover everything the target might say. Gradient q - p."""
    return rows.log_z - dot(rows.p, rows.z) - rows.entropy, rows.q - rows.p


def reverse_kl(rows: Rows, _: float = 0) -> tuple[Tensor, Tensor]:
    """sum q (log q - log p): stay where the target is sure. Gradient q * (log q/p - value)."""
    ratio = rows.log_q().sub_(rows.log_p())
    value = dot(rows.q, ratio)
    return value, ratio.sub_(value.unsqueeze(1)).mul_(rows.q)


def jensen_shannon(rows: Rows, beta: float) -> tuple[Tensor, Tensor]:
    """beta KL(p | m) + (1 - beta) KL(q | m) with m = beta p + (1 - beta) q: between the two KLs, bounded.

    Gradient (1 - beta) q * (log q/m - KL(q | m)). Source: generalised JSD of Agarwal et al. 2024, arXiv 2306.13649.
    """
    log_p, log_q = rows.log_p(), rows.log_q()
    # In logs: where p and q both round to zero, so would m.
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    from_p = dot(rows.p, log_p.sub_(log_m))
    ratio = log_q.sub_(log_m)
    from_q = dot(rows.q, ratio)
    return beta * from_p + (1 - beta) * from_q, ratio.sub_(from_q.unsqueeze(1)).mul_(rows.q).mul_(1 - beta)


def total_variation(rows: Rows, _: float = 0) -> tuple[Tensor, Tensor]:
    """1 - sum min(p, q): the chance that a sampled draft token is rejected. Gradient q * (mu - r), r = 1[q < p], mu = sum q r."""
    return 1 - rows.alpha, _rewarded(rows)[0]


def _rewarded(rows: Rows) -> tuple[Tensor, Tensor]:
    """The gradient of total variation [c, d], and mu [c], the mean of the reward r under q."""
    reward = (rows.q < rows.full).to(rows.q.dtype)
    mean = dot(rows.q, reward)
    return reward.neg_().add_(mean.unsqueeze(1)).mul_(rows.q), mean


def total_variation_normalised(rows: Rows, _: float = 0) -> tuple[Tensor, Tensor]:
    """Total variation whose gradient is a policy gradient with normalised rewards: q * (mu - r) / sigma.

    Seen from q as a policy, r is the reward of saying a token; mu and sigma are its mean and deviation under q. They are
    taken exactly, over the row's whole vocabulary, so no token's gradient depends on its batch. The value is total variation's.
    Source: TVD++ of Goel et al. 2024, arXiv 2403.00858.
    """
    grad, mean = _rewarded(rows)
    return 1 - rows.alpha, grad.mul_((mean * (1 - mean)).clamp(min=_TINY).rsqrt().unsqueeze(1))


def negative_log_acceptance(rows: Rows, _: float = 0) -> tuple[Tensor, Tensor]:
    """-log alpha. Gradient: total variation's, divided by alpha, so it does not vanish where little is accepted yet.

    Source: LK-alpha of Samarin et al. 2026, arXiv 2602.23881.
    """
    alpha = rows.alpha.clamp(min=_TINY)
    return -alpha.log(), _rewarded(rows)[0].div_(alpha.unsqueeze(1))


def kl_then_acceptance(rows: Rows, eta: float) -> tuple[Tensor, Tensor]:
    """lam KL + (1 - lam) TV with lam = exp(-eta alpha), held constant in the gradient: KL first, acceptance once it is fair.

    lam is each token's own. Source: LK-lambda of Samarin et al. 2026, arXiv 2602.23881, where eta is 3.
    """
    lam = (-eta * rows.alpha).exp()
    (kl, kl_grad), (tv, tv_grad) = forward_kl(rows), total_variation(rows)
    grad = kl_grad.mul_(lam.unsqueeze(1)).addcmul_(tv_grad, (1 - lam).unsqueeze(1))
    return lam * kl + (1 - lam) * tv, grad


def cross_entropy(rows: Rows, _: float = 0) -> tuple[Tensor, Tensor]:
    """-log q of the data's own next token. Gradient q - onehot. Nothing where the drafter cannot say that token."""
    sayable = rows.sampled >= 0
    chosen = rows.sampled.clamp(min=0).unsqueeze(1)
    grad = rows.q.scatter_add(1, chosen, rows.q.new_full(chosen.shape, -1.0))
    value = rows.log_z - rows.z.gather(1, chosen).squeeze(1)
    return value * sayable, grad.mul_(sayable.unsqueeze(1))


DIVERGENCES: dict[str, Divergence] = {
    "kl": forward_kl,
    "reverse_kl": reverse_kl,
    "js": jensen_shannon,
    "tv": total_variation,
    "tvd++": total_variation_normalised,
    "lk_alpha": negative_log_acceptance,
    "lk_lambda": kl_then_acceptance,
    "ce": cross_entropy,
}
