"""A start in closed form: the best linear drafter, put into an attention layer before the first gradient step.

A drafter whose layer reads (state, token embedding) and adds to the state has to learn, first of all, to stop predicting
the token it is reading and to predict the next one. That costs hundreds of steps when nothing points the way, since the
embedding reaches the output through attention alone. Least squares gives it in one pass over some data:

    state_t    =  fc features_t                       ~  y_t        y: the target's last hidden state, scaled to RMS 1
    out_t      =  A state_t + E embed(x_{t+1})        ~  y_{t+1}    the same A and E at every depth

`fc` is the first map. The second goes through attention that looks at itself: queries and keys are one random projection
of the input, so that each token's score is highest with its own key; values and the output projection hold
[E, A - rho I], where rho I is what the residual brings already. The MLP starts at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from drafttrain.batch import Batch
from drafttrain.drafters.common.shared import anchors_by_depth
from drafttrain.losses import TargetRows

# What the training loop can say about a batch: target output, needed rows, row of each position.
Source = Callable[[Batch], tuple[Tensor, TargetRows, Tensor]]

# Self scores of about 64 * SHARPNESS^2 / 8 at head size 64: high enough to single the own key out among a few hundred,
# low enough for gradients to move attention elsewhere.
SHARPNESS = 1.3
RIDGE = 1e-2


def unit(x: Tensor) -> Tensor:
    """Scales rows to RMS 1, as an RMS norm without weights does."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class LeastSquares:
    """Ridge regression y ~ W x from batches, in float32 normal equations."""

    def __init__(self) -> None:
        self.xx: Tensor | None = None
        self.xy: Tensor | None = None
        self.count = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """x [n, i], y [n, o]."""
        xx, xy = x.T @ x, x.T @ y
        self.xx = xx if self.xx is None else self.xx + xx
        self.xy = xy if self.xy is None else self.xy + xy
        self.count += len(x)

    def solve(self, each: bool = False) -> Tensor:
        """[o, i]. each: a ridge by every input's own power, where inputs are of different sizes."""
        assert self.xx is not None and self.xy is not None
        power = self.xx.diagonal()
        mean = power.mean().expand_as(power)
        ridge = RIDGE * (torch.maximum(power, 1e-3 * mean) if each else mean)
        return torch.linalg.solve(self.xx + ridge.diag(), self.xy).T


@torch.no_grad()
def linear_start(drafter: Any, batches: Iterable[Batch], source: Source) -> float:
    """Overwrites fc, attention, MLP output and the scale of the final norm of a drafter with `fc`, `midlayer`, `norm`.

    Layers above the middle one start silent: their output projections are zero.

    Args:
        drafter: bound to its target; of the target's width, its head already set.
        batches: some of the training data, on the drafter's device; read twice. source: as in training.

    Returns:
        Share of variance of y that the map explains, 0 to 1.
    """
    batches = list(batches)
    project = _projection(drafter, batches, source)
    first, second = LeastSquares(), LeastSquares()
    squares, power = 0.0, 0.0
    for batch in batches:
        features, rows, row_of = source(batch)
        hidden = rows.hidden.float()
        y = unit(hidden) @ project
        squares += float((hidden @ project).square().mean(-1).sum())
        power += float(y.square().mean(-1).sum())
        first.add(drafter.norm_features(features[row_of >= 0]).float(), y)
    fc = first.solve()
    states = 0.0
    for batch in batches:
        features, rows, row_of = source(batch)
        anchors = anchors_by_depth(batch.response_mask, 1)[0]
        state = drafter.norm_features(features.flatten(0, 1)[anchors]).float() @ fc.T
        states += float(state.square().mean(-1).sum())
        embeds = drafter.embed(batch.input_ids).flatten(0, 1)[anchors + 1].float()
        y = unit(rows.hidden[row_of.flatten()[anchors + 1]].float()) @ project
        second.add(torch.cat((unit(embeds), unit(state)), dim=-1), y)
    assert second.xx is not None
    maps, covariance = second.solve(), second.xx / second.count
    rho = float(((maps @ covariance) * maps).sum() / len(maps)) ** 0.5
    config = drafter.config
    drafter.fc.weight.copy_(fc * rho / (states / second.count) ** 0.5)
    drafter.midlayer.hidden_norm.weight.fill_(1.0)
    for layer in drafter.decoder_layers:
        _silence(layer.mlp.down_proj)
        if layer is not drafter.midlayer:
            _silence(layer.self_attn.o_proj)
    _set_attention(drafter.midlayer.self_attn, maps, covariance, 1.0 if config.norm_before_residual else rho)
    scale = (squares / first.count) ** 0.5
    if (
        config.norm_output
    ):  # what the next depth reads must keep the size that the map expects, so the head takes the scale
        drafter.norm.weight.fill_(rho)
        drafter.lm_head.weight.mul_(scale / rho)
    else:
        drafter.norm.weight.fill_(scale)
    set_temperature(drafter, batches[0], source, drafter.lm_head.weight if config.norm_output else drafter.norm.weight)
    return rho**2 / (power / first.count)


def _projection(drafter: Any, batches: list[Batch], source: Source) -> Tensor:
    """[target h, h]: how the target's last state is told in the drafter's width, whose head is then set to fit.

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


def _silence(linear: Any) -> None:
    for parameter in linear.parameters():
        parameter.zero_()


def _set_attention(attention: Any, maps: Tensor, covariance: Tensor, residual: float) -> None:
    """Puts x -> maps x, less the residual's share of x, into heads that attend to their own token; others start silent."""
    h, width = maps.shape
    e, heads, kv = attention.head_dim, attention.heads, attention.kv_heads
    wanted = maps.clone()
    wanted[:, width - h :] -= residual * torch.eye(h, device=maps.device)
    # The directions that matter most for this data come first, so that fewer value heads lose as little as possible.
    root = torch.linalg.cholesky(
        covariance + 1e-4 * covariance.diagonal().mean() * torch.eye(width, device=maps.device)
    )
    directions = torch.linalg.svd(wanted @ root).U  # [h, h]
    rank = min(h, kv * e)
    used = -(-rank // e)  # key/value heads that carry the map
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        if linear.bias is not None:
            linear.bias.zero_()
    for norm in (attention.q_norm, attention.k_norm):
        for weight in norm.parameters():  # normed heads forget the probe's length, so the norms bring the sharpness
            weight.fill_(SHARPNESS * (64 / e) ** 0.25)
    values = attention.v_proj.weight.new_zeros(used * e, width)
    values[:rank] = directions[:, :rank].T @ wanted
    attention.v_proj.weight[: used * e] = values
    out = attention.o_proj.weight.zero_().view(h, heads, e)
    group = heads // kv
    for head in range(used):
        part = directions[:, head * e : min((head + 1) * e, rank)]
        out[:, head * group, : part.shape[1]] = part
    generator = torch.Generator().manual_seed(0)
    for head in range(used):
        probe = torch.randn(e, width, generator=generator) * SHARPNESS * (64 / e) ** 0.25 / width**0.5
        rows = slice(head * e, (head + 1) * e)
        attention.k_proj.weight[rows] = probe
        attention.q_proj.weight.view(kv, group, e, width)[head] = probe


@torch.no_grad()
def projection_start(
    drafter: Any, projections: Sequence[Any], batches: Iterable[Batch], source: Source, normed: bool
) -> tuple[float, float]:
    """The same for kinds whose projection reads (token embedding, state) before the layers: it takes the whole map.

        projection [embed(x_{t+1}), f_t]  ~  f_{t+1}

    The layers start silent, as a residual that adds nothing.

    Args:
        drafter: bound to its target, reading its last state. projections: linear layers that all get the map.
        batches: some of the training data, on the drafter's device. source: as in training.
        normed: embedding, state and what is predicted are scaled to RMS 1.

    Returns:
        Share of variance of f that the map explains, 0 to 1, and the RMS of f.
    """
    fit, sizes, power, squares = LeastSquares(), list[Tensor](), 0.0, 0.0
    for batch in batches:
        features, rows, row_of = source(batch)
        anchors = anchors_by_depth(batch.response_mask, 1)[0]
        y = rows.hidden[row_of.flatten()[anchors + 1]].float()
        parts = [drafter.embed(batch.input_ids).flatten(0, 1)[anchors + 1].float()]
        parts.append(features.flatten(0, 1)[anchors].float())
        squares += float(y.square().mean(-1).sum())
        if normed:
            y, *parts = (unit(part) for part in (y, *parts))
        # Of about one size, so that the ridge does not decide between them.
        sizes = sizes or [part.square().mean().sqrt() for part in parts]
        power += float(y.square().mean(-1).sum())
        fit.add(torch.cat([part / size for part, size in zip(parts, sizes, strict=True)], dim=-1), y)
    assert fit.xx is not None
    maps = fit.solve()
    explained = float(((maps @ fit.xx) * maps).sum()) / len(maps) / power
    left, right = maps.chunk(2, dim=1)
    for projection in projections:
        projection.weight.copy_(torch.cat((left / sizes[0], right / sizes[1]), dim=1))
    for layer in drafter.decoder_layers:
        _silence(layer.mlp.down_proj)
        _silence(layer.self_attn.o_proj)
    return explained, (squares / fit.count) ** 0.5


def set_temperature(drafter: Any, batch: Batch, source: Source, scaled: Tensor) -> None:
    """Scales the logits so that the start's confidence fits: a prediction's RMS says nothing about its certainty.

    Args:
        scaled: the weight that does it.
    """
    part = batch.first_rows(2)
    features, targets, row_of = source(part)
    weight, best = scaled.clone(), (float("inf"), 1.0)
    for factor in (0.25, 0.35, 0.5, 0.65, 0.8, 1.0):
        scaled.copy_(weight * factor)
        loss = float(drafter(part, drafter.embed(part.input_ids), features, targets, row_of, 1.0, measure=False).loss)
        best = min(best, (loss, factor))
    scaled.copy_(weight * best[1])
