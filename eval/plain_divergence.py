"""Plain reference of the losses, on full [t, d] logits with autograd. Tests and eval/bench_loss.py compare with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.losses.divergence import DivergenceOutput, wide
from drafttrain.losses.spec import Term, parse_loss


def plain_term(
    term: Term, z: Tensor, y: Tensor, full_log_z: Tensor, sampled: Tensor | None = None
) -> Tensor:
    """[t] values of one term, unweighted.

    Args:
        z: [t, d] drafter logits; y: [t, d] the target's, over the same tokens, both divided by the temperature.
        full_log_z: [t] logsumexp of the target's logits over its whole vocabulary, at that temperature.
        sampled: [t] int64 drafter ids of the data's next tokens, -1 for none.
    """
    log_q = z.log_softmax(-1)
    if term.name == "ce":
        assert sampled is not None
        return F.nll_loss(log_q, sampled, ignore_index=-1, reduction="none")
    log_p = y.log_softmax(-1)
    if term.name == "js":
        log_m = (term.parameter * log_p.exp() + (1 - term.parameter) * log_q.exp()).log()
        from_p = (log_p.exp() * (log_p - log_m)).sum(-1)
        from_q = (log_q.exp() * (log_q - log_m)).sum(-1)
        return term.parameter * from_p + (1 - term.parameter) * from_q
    if term.name == "reverse_kl":
        return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    if term.name == "kl":
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    q = log_q.exp()
    full = (y - full_log_z.unsqueeze(1)).exp()
    alpha = torch.minimum(full, q).sum(-1)
    if term.name == "tv":
        return 1 - alpha
    if term.name == "lk_alpha":
        return -alpha.log()
    if term.name == "lk_lambda":
        lam = torch.exp(-term.parameter * alpha.detach())
        kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
        return lam * kl + (1 - lam) * (1 - alpha)
    assert term.name == "tvd++"
    # The surrogate of the policy gradient, whose value is 0, shifted to the value of total variation.
    reward = (q < full).to(q.dtype).detach()
    mean = (q.detach() * reward).sum(-1, keepdim=True)
    advantage = (reward - mean) / (mean * (1 - mean)).clamp(min=1e-12).sqrt()
    surrogate = -(q * advantage).sum(-1)
    return surrogate - surrogate.detach() + (1 - alpha).detach()


def plain_divergence(
    hidden: Tensor,
    weight: Tensor,
    logits: Tensor,
    full_log_z: Tensor,
    row_weight: Tensor,
    loss: str = "kl",
    sampled: Tensor | None = None,
) -> DivergenceOutput:
    """`linear_divergence` with all logits in memory.

    Args:
        hidden: [t, h]; weight: [d, h]; logits: [t, d] the target's, over the kept tokens; row_weight: [t].
        full_log_z: [t] at temperature 1. Acceptance losses at other temperatures need the full vocabulary as kept tokens.
    """
    z = wide(F.linear(hidden, weight))
    values = hidden.new_zeros(())
    for term in parse_loss(loss).terms:
        if term.temperature == 1:
            value = plain_term(term, z, logits, full_log_z, sampled)
        else:
            y = logits / term.temperature
            value = plain_term(term, z / term.temperature, y, y.logsumexp(-1), sampled)
        values = values + term.weight * value
    return DivergenceOutput((values * row_weight).sum(), values.detach())
