"""Closed-form start of drafters with attention layers: the best linear drafter, before the first gradient step.

A drafter whose layer reads (state, token embedding) and adds to the state must first learn to predict the next token instead
of the token it reads. That takes hundreds of steps from a random start, because the embedding reaches the output through
attention alone. Least squares finds it in one pass over some data:

    state_t    =  fc features_t                       ~  y_t        y: the target's last hidden state, scaled to RMS 1
    out_t      =  A state_t + E embed(x_{t+1})        ~  y_{t+1}    the same A and E at every depth

`fc` is the first map. The second goes through attention in which each token sees itself: queries and keys are one random
projection of the input, so that a token's score is highest with its own key; values and the output projection hold
[E, A - rho I], where rho I is the residual's share. The MLP starts at zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.batch import Batch, anchors_by_depth
from drafttrain.drafters.base import Source, StepInputs
from drafttrain.drafters.common.layer_model import LayerDrafter
from drafttrain.drafters.common.layers import Attention
from drafttrain.drafters.common.trainable import TrainableDrafter

# Self scores of about 64 * SHARPNESS^2 / 8 at head size 64: high enough to select the own key among a few hundred, low
# enough for gradients to move attention elsewhere.
SHARPNESS = 1.3
RIDGE = 1e-2


def unit(x: Tensor) -> Tensor:
    """Scales rows to RMS 1, as an RMS norm without weights does."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class LeastSquares:
    """Ridge regression y ~ W x from batches, in float32 normal equations."""

    def __init__(self) -> None:
        self.xx, self.xy = torch.empty(0), torch.empty(0)  # [i, i], [i, o] sums
        self.count = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """x [n, i], y [n, o]."""
        xx, xy = x.T @ x, x.T @ y
        self.xx, self.xy = (self.xx + xx, self.xy + xy) if self.xx.numel() else (xx, xy)
        self.count += len(x)

    def solve(self, each: bool = False) -> Tensor:
        """[o, i]. each: scale the ridge by every input's own power, for inputs of different sizes."""
        power = self.xx.diagonal()
        mean = power.mean().expand_as(power)
        ridge = RIDGE * (torch.maximum(power, 1e-3 * mean) if each else mean)
        return torch.linalg.solve(self.xx + ridge.diag(), self.xy).T


@torch.no_grad()
def linear_start(drafter: Any, batches: Iterable[Batch], source: Source) -> float:
    """Overwrites fc, attention, MLP output and the scale of the final norm.

    Layers above the middle one start with zero output projections.

    Args:
        drafter: an `Eagle3` or a subclass, bound to its target, its head already set.
        batches: some of the training data, on the drafter's device; read twice. source: as in training.

    Returns:
        Share of variance of y that the map explains, 0 to 1.
    """
    batches = list(batches)
    project = _projection(drafter, batches, source)  # [target h, h]
    first, second = LeastSquares(), LeastSquares()
    squares, power = 0.0, 0.0
    for batch in batches:
        output, rows, row_of = source(batch)
        hidden = rows.hidden.float()
        y = unit(hidden) @ project
        squares += float((hidden @ project).square().mean(-1).sum())
        power += float(y.square().mean(-1).sum())
        first.add(drafter.norm_features(output.features[row_of >= 0]).float(), y)
    fc = first.solve()  # [h, f * target h]
    states = 0.0
    for batch in batches:
        embeds, features, hidden = anchor_rows(drafter, batch, source)
        state = drafter.norm_features(features).float() @ fc.T
        states += float(state.square().mean(-1).sum())
        second.add(torch.cat((unit(embeds), unit(state)), dim=-1), unit(hidden) @ project)
    maps, covariance = second.solve(), second.xx / second.count  # [h, target h + h] and its square
    rho = float(((maps @ covariance) * maps).sum() / len(maps)) ** 0.5
    config, middle = drafter.config, drafter.midlayer
    drafter.fc.weight.copy_(fc * rho / (states / second.count) ** 0.5)
    assert middle.hidden_norm is not None
    middle.hidden_norm.weight.fill_(1.0)
    for layer in drafter.decoder_layers:
        _zero(layer.mlp.down_proj)
        if layer is not middle:
            _zero(layer.self_attn.o_proj)
    _set_attention(middle.self_attn, maps, covariance, 1.0 if config.norm_before_residual else rho)
    scale = (squares / first.count) ** 0.5
    if config.norm_output:  # the next depth's input keeps the size that the map expects, so the head takes the scale
        drafter.norm.weight.fill_(rho)
        drafter.lm_head.weight.mul_(scale / rho)
    else:
        drafter.norm.weight.fill_(scale)
    set_temperature(drafter, batches[0], source, drafter.lm_head.weight if config.norm_output else drafter.norm.weight)
    return rho**2 / (power / first.count)


def _projection(drafter: Any, batches: list[Batch], source: Source) -> Tensor:
    """[target h, h], from the target's last state to the drafter's width; the head is set to match.

    A narrower drafter takes the directions of most variance, a wider one leaves columns empty.
    """
    h, wide = drafter.config.hidden_size, drafter.config.target_hidden_size
    if h == wide:
        return torch.eye(h, device=drafter.device)
    covariance = torch.zeros(wide, wide, device=drafter.device)
    for batch in batches:
        _, rows, _ = source(batch)
        y = unit(rows.hidden.float())
        covariance += y.T @ y
    project = torch.zeros(wide, h, device=drafter.device)
    directions = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :h]  # eigenvalues come in ascending order
    project[:, : directions.shape[1]] = directions
    drafter.lm_head.weight.copy_(rows.weight.float() @ project)
    return project


def _zero(linear: nn.Linear) -> None:
    for parameter in linear.parameters():
        parameter.zero_()


def _set_attention(attention: Attention, maps: Tensor, covariance: Tensor, residual: float) -> None:
    """Stores x -> maps x, less the residual's share of x, in heads that attend to their own token; other heads give zero."""
    h, width = maps.shape
    e, heads, kv = attention.head_dim, attention.heads, attention.kv_heads
    wanted = maps.clone()
    wanted[:, width - h :] -= residual * torch.eye(h, device=maps.device)
    used = range(min(kv, -(-h // e)))  # key/value heads that carry the map
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        if linear.bias is not None:
            linear.bias.zero_()
    for norm in (attention.q_norm, attention.k_norm):
        for weight in norm.parameters():  # head norms remove the probe's length, so their weights carry the sharpness
            weight.fill_(SHARPNESS * (64 / e) ** 0.25)
    attention.o_proj.weight.zero_()
    store_map(attention, wanted, covariance, used)
    generator = torch.Generator().manual_seed(0)
    for head in used:
        probe = torch.randn(e, width, generator=generator) * SHARPNESS * (64 / e) ** 0.25 / width**0.5
        attention.k_proj.weight[head * e : (head + 1) * e] = probe
        attention.q_proj.weight.view(kv, heads // kv, e, width)[head] = probe


def store_map(attention: Attention, wanted: Tensor, covariance: Tensor, heads: range) -> None:
    """Stores x -> wanted x in the values and outputs of key/value heads.

    The directions that matter most for this data come first, so that few heads lose as little as possible.

    Args:
        wanted: [h, i]; covariance: [i, i] second moments of x.
    """
    (h, width), e, group = wanted.shape, attention.head_dim, attention.heads // attention.kv_heads
    ridge = 1e-4 * covariance.diagonal().mean() * torch.eye(width, device=wanted.device)
    directions = torch.linalg.svd(wanted @ torch.linalg.cholesky(covariance + ridge)).U  # [h, h]
    out = attention.o_proj.weight.view(h, attention.heads, e)
    for place, head in enumerate(heads):
        part = directions[:, place * e : (place + 1) * e]  # [h, e], fewer columns at the end
        attention.v_proj.weight[head * e : head * e + part.shape[1]] = part.T @ wanted
        attention.v_proj.weight[head * e + part.shape[1] : (head + 1) * e] = 0
        out[:, head * group, : part.shape[1]] = part


def anchor_rows(drafter: TrainableDrafter, batch: Batch, source: Source) -> tuple[Tensor, Tensor, Tensor]:
    """Regression data at every anchor t, float32: embedding of x_{t+1} [n, h], features_t [n, f*h], last state at t+1 [n, h]."""
    output, rows, row_of = source(batch)
    anchors = anchors_by_depth(batch.response_mask, 1)[0]
    embeds = drafter.embed(batch.input_ids.flatten()[anchors + 1])
    hidden = rows.hidden[row_of.flatten()[anchors + 1]]
    return embeds.float(), output.features.flatten(0, 1)[anchors].float(), hidden.float()


@torch.no_grad()
def projection_start(
    drafter: LayerDrafter, projections: Sequence[nn.Linear], batches: Iterable[Batch], source: Source, normed: bool
) -> tuple[float, float]:
    """The start of kinds whose projection reads (token embedding, state) before the layers: it takes the whole map.

        projection [embed(x_{t+1}), f_t]  ~  f_{t+1}

    The layers start with zero output projections.

    Args:
        drafter: bound to its target; reads the target's last state. projections: linear layers that all take the map.
        batches: some of the training data, on the drafter's device. source: as in training.
        normed: embedding, state and prediction are scaled to RMS 1.

    Returns:
        Share of variance of f that the map explains, 0 to 1, and the RMS of f.
    """
    fit, sizes, power, squares = LeastSquares(), list[Tensor](), 0.0, 0.0
    for batch in batches:
        *parts, y = anchor_rows(drafter, batch, source)
        squares += float(y.square().mean(-1).sum())
        if normed:
            y, *parts = (unit(part) for part in (y, *parts))
        # Inputs of about one size, so that the ridge does not decide between them.
        sizes = sizes or [part.square().mean().sqrt() for part in parts]
        power += float(y.square().mean(-1).sum())
        fit.add(torch.cat([part / size for part, size in zip(parts, sizes, strict=True)], dim=-1), y)
    maps = fit.solve()  # [h, 2h]
    explained = float(((maps @ fit.xx) * maps).sum()) / len(maps) / power
    left, right = maps.chunk(2, dim=1)
    for projection in projections:
        projection.weight.copy_(torch.cat((left / sizes[0], right / sizes[1]), dim=1))
    for layer in drafter.decoder_layers:
        _zero(layer.mlp.down_proj)
        _zero(layer.self_attn.o_proj)
    return explained, (squares / fit.count) ** 0.5


def set_temperature(drafter: TrainableDrafter, batch: Batch, source: Source, scaled: Tensor) -> None:
    """Scales the logits to the lowest loss on two rows: the RMS of a linear prediction does not give its certainty.

    Args:
        scaled: the weight that scales the logits.
    """
    part = batch.first_rows(2)
    inputs = StepInputs(part, drafter.embed(part.input_ids), *source(part), count=1.0, measure=False)
    weight, best = scaled.clone(), (float("inf"), 1.0)
    for factor in (0.25, 0.35, 0.5, 0.65, 0.8, 1.0):
        scaled.copy_(weight * factor)
        best = min(best, (float(drafter(inputs).loss), factor))
    scaled.copy_(weight * best[1])
