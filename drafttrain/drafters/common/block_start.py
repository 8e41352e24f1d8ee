"""Closed-form start of block-parallel drafters: the best linear prediction, in the first layer's attention.

A mask carries no information on what to predict, so attention must first find the two places that do: the last token, at the
start of the block, and the newest feature, at the end of the context. Least squares over some data gives the map

    y_{t+1}  ~  E embed(x_{t+1}) + A unit(fc features_t)        y: the target's last hidden state, scaled to RMS 1

which the layer's attention then computes. All masks have one constant query, given by their embedding. Keys are plus or minus
one constant vector, by the sign of a linear probe (heads are normed): `token` heads match the block's token, `context` heads
match features. Rotary positions do the rest: token heads use the slowest rotation only, so distance does not matter; context
heads use all rotations at once, whose mean cosine falls like the logarithm of the distance, so their weights fall like a power
of it and the newest feature dominates. MLPs and upper layers start at zero. All depths start with the prediction of the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from drafttrain.batch import Batch
from drafttrain.drafters.base import Source
from drafttrain.drafters.common.layers import rotate
from drafttrain.drafters.common.linear_start import RIDGE, LeastSquares, anchor_rows, set_temperature, store_map, unit

# Context weights fall with the distance to this power.
POWER = 8.0
# Scores of token heads: plus this on the block's token, minus this elsewhere.
SCORE = 8.0
# RMS of a learned mask, small against the prediction that attention adds to it.
MASK = 0.1


@torch.no_grad()
def block_start(drafter: Any, batches: Iterable[Batch], source: Source) -> float:
    """Overwrites fc, the first layer's attention, the outputs of all other modules, a learned mask, the final norm's scale.

    Args:
        drafter: a `BlockDrafter`, bound to its target.
        batches: some of the training data, on its device; read twice. source: as in training.

    Returns:
        Share of variance of y that the map explains, 0 to 1.
    """
    batches, h = list(batches), drafter.config.hidden_size
    joint, fitted, squares = LeastSquares(), LeastSquares(), 0.0
    for batch in batches:
        embeds, features, hidden = anchor_rows(drafter, batch, source)
        joint.add(torch.cat((unit(embeds), features), dim=-1), unit(hidden))
        squares += float(hidden.square().mean(-1).sum())
    drafter.fc.weight.copy_(_solve(joint)[:, h:])
    drafter.hidden_norm.weight.fill_(1.0)
    mean = torch.zeros(2 * h, device=drafter.device)
    for batch in batches:
        embeds, features, hidden = anchor_rows(drafter, batch, source)
        both = torch.cat((unit(embeds), drafter.fuse(features).float()), dim=-1)
        fitted.add(both, unit(hidden))
        mean += both.sum(0)
    maps, covariance = _solve(fitted), fitted.xx / fitted.count
    explained = float(((maps @ covariance) * maps).sum() / h)

    if drafter.mask is not None:
        drafter.mask.copy_(MASK * torch.randn(h, generator=torch.Generator().manual_seed(0)))
    for layer in drafter.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    drafter.layers[0].input_layernorm.weight.fill_(1.0)
    _set_attention(drafter, maps, covariance, mean / fitted.count)
    drafter.norm.weight.fill_((squares / joint.count) ** 0.5 * drafter.logit_scale)
    training = drafter.training
    drafter.eval()  # the same blocks, all of them, at every temperature
    set_temperature(drafter, batches[0], source, drafter.norm.weight)
    drafter.train(training)
    return explained


def _solve(fit: LeastSquares) -> Tensor:
    """[o, i]; the ridge is a share of each input's own power: features differ by orders of magnitude."""
    return torch.linalg.solve(fit.xx + RIDGE * torch.diag(fit.xx.diagonal() + 1e-6), fit.xy).T


def _set_attention(drafter: Any, maps: Tensor, covariance: Tensor, mean: Tensor) -> None:
    """Half the key/value heads (rounded up) read the block's token, the others the newest context.

    Args:
        maps: [h, 2h] E and A; covariance: [2h, 2h] second moments of what they read; mean: [2h] of it.
    """
    attention, rotary, h = drafter.layers[0].self_attn, drafter.rotary, drafter.config.hidden_size
    e, kv, group = attention.head_dim, attention.kv_heads, attention.heads // attention.kv_heads
    mask = unit(drafter.mask_embedding().float())
    token, context = slice(0, h), slice(h, 2 * h)
    gram = covariance[token, token] + covariance[context, context] + torch.outer(mask, mask)
    gram += RIDGE * gram.diagonal().mean() * torch.eye(h, device=gram.device)
    tokens = -(-kv // 2)
    half = rotary.width // 2
    slow, every = torch.zeros(e, device=gram.device), torch.zeros(e, device=gram.device)
    slow[half - 1], every[:half] = e**0.5, (e / half) ** 0.5
    strength = POWER * math.log(rotary.parameters["rope_theta"])
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_((strength / e**0.5) ** 0.5)
    # Queries of token heads are rotated away from their keys, into a plane where the keys are zero, until the score fits.
    aside = torch.zeros_like(slow)
    aside[0] = e**0.5
    share = min(1.0, SCORE / strength) if half > 1 else 1.0
    newest = rotate(every[None, None], *rotary.compute(torch.tensor([-1], device=gram.device), torch.float32))[0, 0]
    for part, heads, key, query, sign in (
        (token, range(tokens), slow, share * slow + (1 - share**2) ** 0.5 * aside, 1.0),
        (context, range(tokens, kv), every, newest, -1.0),
    ):
        probe = torch.linalg.solve(gram, sign * (mean[token] - mean[context]) - mask)
        for head in heads:
            rows = slice(head * e, (head + 1) * e)
            attention.k_proj.weight[rows] = torch.outer(key, probe)
            attention.q_proj.weight.view(kv, group, e, h)[head, 0] = torch.outer(query, mask / h)
        store_map(attention, maps[:, part], covariance[part, part], heads)
