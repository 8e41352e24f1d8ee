"""How drafters start: weights copied from the target, and weights solved in closed form.

A drafter whose attention layer reads (state, token embedding) and adds to the state must first
learn to predict the next token instead of the token it reads. That takes hundreds of steps from a
random start, because the embedding reaches the output through attention alone. Least squares finds
the best linear drafter in one pass over some data:

    state_t    =  fc features_t                       ~  y_t        y: the target's last hidden state, scaled to RMS 1
    out_t      =  A state_t + E embed(x_{t+1})        ~  y_{t+1}    the same A and E at every depth

`fc` is the first map. The second goes through attention in which each token sees itself: queries
and keys are one random projection of the input, so that a token's score is highest with its own
key; values and the output projection hold [E, A - rho I], where rho I is the residual's share. The
MLP starts at zero.

Block-parallel drafters (`block_start`) start with a linear prediction in their first layer's
attention. A mask carries no information on what to predict, so attention must first find the two
places that do: the last token, at the start of the block, and the newest feature, at the end of the
context. Least squares over some data gives the map

    y_{t+1}  ~  E embed(x_{t+1}) + A unit(fc features_t)        y: the target's last hidden state, scaled to RMS 1

which the layer's attention then computes. All masks have one constant query, given by their
embedding. Keys are plus or minus one constant vector, by the sign of a linear probe (heads are
normed): `token` heads match the block's token, `context` heads match features. Rotary positions do
the rest. Token heads use the slowest rotation only, so distance does not matter. Context heads use
all rotations at once, whose mean cosine falls like the logarithm of the distance: their weights
fall like a power of it, and the newest feature dominates. MLPs and upper layers start at zero. All
depths start with the prediction of the first.

Every start reads some of the training data, on the drafter's device and perhaps twice, for a
drafter that is bound to its target. It returns the share of variance of y that the map explains, 0
to 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import RMSNorm

from drafttrain.batch import Batch, anchors_by_depth
from drafttrain.drafters.base import Source, StepInputs
from drafttrain.drafters.common.layer_model import LayerDrafter
from drafttrain.drafters.common.layers import Attention, DraftLayer, rotate
from drafttrain.drafters.common.trainable import DecoderDrafter, TrainableDrafter
from drafttrain.target import Target

# Self scores of about 64 * SHARPNESS^2 / 8 at head size 64: high enough to select the own key among
# a few hundred, low enough for gradients to move attention elsewhere.
SHARPNESS = 1.3
RIDGE = 1e-2
# Context weights fall with the distance to this power.
POWER = 8.0
# Scores of token heads: plus this on the block's token, minus this elsewhere.
SCORE = 8.0
# RMS of a learned mask, small against the prediction that attention adds to it.
MASK = 0.1


def norm_weight(module: nn.Module) -> Tensor | None:
    """The factors that an RMS norm applies; None for another kind of norm."""
    if "RMSNorm" not in type(module).__name__:
        return None
    # Some families store the factors minus one, so read what the norm does to ones.
    weight = next(module.parameters())
    return module(torch.ones_like(weight)).detach()


def copy_norm(ours: RMSNorm, theirs: nn.Module | None) -> bool:
    """Copies an RMS norm's factors; False if theirs is missing or of another kind or size."""
    if theirs is None:
        return False
    weight = norm_weight(theirs)
    if weight is None or weight.shape != ours.weight.shape:
        return False
    ours.weight.data.copy_(weight)
    return True


def copy_linear(ours: nn.Linear, theirs: Any, head_dim: int = 0) -> bool:
    """Copies a projection.

    A wider input takes it in its last columns; the others get small random weights. With head_dim,
    fewer key or value heads than ours are repeated per group, which leaves attention unchanged.

    Returns:
        False, with ours unchanged, if theirs is missing or does not fit.
    """
    if theirs is None:
        return False
    weight = theirs.weight.detach().to(ours.weight.dtype)  # [out, in]
    bias = getattr(theirs, "bias", None)
    outs, width = ours.weight.shape
    if head_dim and outs % weight.shape[0] == 0 and weight.shape[0] % head_dim == 0:
        times = outs // weight.shape[0]
        heads = weight.view(-1, head_dim, weight.shape[1])  # [heads, e, in]
        weight = heads.repeat_interleave(times, dim=0).flatten(0, 1)
        if bias is not None:
            bias = bias.view(-1, head_dim).repeat_interleave(times, dim=0).flatten()
    if weight.shape[0] != outs or weight.shape[1] > width:
        return False
    # The columns before, if ours has more; none otherwise.
    ours.weight.data[:, : -weight.shape[1]] *= 0.1
    ours.weight.data[:, -weight.shape[1] :] = weight
    if ours.bias is not None and bias is not None:
        ours.bias.data.copy_(bias)
    return True


def copy_layer(ours: DraftLayer, theirs: nn.Module) -> list[str]:
    """Copies the parts of a target's layer that have the same form as ours; returns their names.

    The `hidden_norm` of a layer that has one takes their input norm.
    """
    others = dict(theirs.named_modules())
    # Families with four norms per layer name the norm before the MLP differently.
    if "pre_feedforward_layernorm" in others:
        others["post_attention_layernorm"] = others["pre_feedforward_layernorm"]
    if ours.hidden_norm is not None:  # ours norms an embedding before
        others["hidden_norm"] = others.pop("input_layernorm", None)
    copied = []
    for name, own in ours.named_modules():
        other = others.get(name)
        done = False
        if isinstance(own, RMSNorm):
            done = copy_norm(own, other)
        elif isinstance(own, nn.Linear):
            repeated = 0
            if name.endswith(("k_proj", "v_proj")):
                repeated = ours.self_attn.head_dim
            done = copy_linear(own, other, repeated)
        if done:
            copied.append(name)
    return copied


def copy_last_layers(ours: Sequence[DraftLayer], theirs: Sequence[nn.Module]) -> list[list[str]]:
    """Copies a target's last layers (`Target.last_layers`) into our last ones.

    Returns:
        The names of the copied parts, per layer.
    """
    ours = ours[len(ours) - len(theirs) :]
    return [copy_layer(layer, other) for layer, other in zip(ours, theirs, strict=True)]


def final_norm(target: Target) -> nn.Module | None:
    """The norm behind the target's last layer; None in families that have none."""
    return getattr(target.body, "norm", None)


def copy_ends(drafter: DecoderDrafter, target: Target) -> list[str]:
    """Copies the target's final norm to a drafter's, and its head rows into a head of its own.

    Returns the names of what it copied.
    """
    names = []
    if drafter.lm_head is not None:
        drafter.lm_head.weight.copy_(drafter.head_rows(target))
        names.append("lm_head")
    if copy_norm(drafter.norm, final_norm(target)):  # type: ignore[arg-type]  # an RMS norm
        names.append("norm")
    return names


def identity_on_last(linear: nn.Linear) -> None:
    """Makes a projection the identity on its last columns, and small and random on the others."""
    linear.weight.mul_(0.1)
    linear.weight[:, -linear.out_features :].add_(torch.eye(linear.out_features))


def unit(x: Tensor) -> Tensor:
    """Scales rows to RMS 1, as an RMS norm without weights does."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class LeastSquares:
    """Ridge regression y ~ W x from batches, in float32 normal equations."""

    def __init__(self) -> None:
        self.xx = torch.empty(0)  # [i, i] sum of x x'
        self.xy = torch.empty(0)  # [i, o] sum of x y'
        self.power = 0.0  # sum of y' y
        self.count = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """x [n, i], y [n, o]."""
        xx = x.T @ x
        xy = x.T @ y
        if self.xx.numel():
            self.xx = self.xx + xx
            self.xy = self.xy + xy
        else:
            self.xx = xx
            self.xy = xy
        self.power += float(y.square().sum())
        self.count += len(x)

    def explained(self, maps: Tensor) -> float:
        """Share of the power of y that predictions m x have, those of maps [o, i]."""
        return float(((maps @ self.xx) * maps).sum()) / self.power

    def solve(self, least: float | None = None) -> Tensor:
        """[o, i]. The ridge is a share of the inputs' mean power. With `least` it is one of each
        input's own power, which differ by orders of magnitude, but at least of this part of the mean.
        """
        power = self.xx.diagonal()  # [i]
        scale = power.mean().expand_as(power)
        if least is not None:
            scale = torch.maximum(power, least * scale) + 1e-6
        return torch.linalg.solve(self.xx + (RIDGE * scale).diag(), self.xy).T


@torch.no_grad()
def linear_start(drafter: Any, batches: list[Batch], source: Source) -> float:
    """The start of an `Eagle3` whose head is set.

    It overwrites fc, attention, the MLP's output and the scale of the final norm.
    """
    project = _projection(drafter, batches, source)  # [target h, h]

    # The first map, from features to states.
    first = LeastSquares()
    squares = 0.0
    for batch in batches:
        features, rows, row_of = source(batch)
        hidden = rows.hidden.float()  # [n, target h]
        y = unit(hidden) @ project  # [n, h]
        squares += float((hidden @ project).square().mean(-1).sum())  # of the states as they are
        first.add(drafter.norm_features(features[row_of >= 0]).float(), y)
    fc = first.solve()  # [h, f * target h]

    # The second map, from embeddings and states to the next states.
    second = LeastSquares()
    states = 0.0
    for batch in batches:
        embeds, features, hidden = anchor_rows(drafter, batch, source)
        state = drafter.norm_features(features).float() @ fc.T
        states += float(state.square().mean(-1).sum())
        read = torch.cat((unit(embeds), unit(state)), dim=-1)  # [n, i]
        second.add(read, unit(hidden) @ project)
    maps = second.solve()  # [h, i] with i = target h + h
    covariance = second.xx / second.count  # [i, i]
    # The mean square of predictions m x is that of m C m' over the rows of the map.
    rho = float(((maps @ covariance) * maps).sum() / len(maps)) ** 0.5  # their RMS

    # Store the maps in the drafter.
    config = drafter.config
    middle = drafter.midlayer
    drafter.fc.weight.copy_(fc * rho / (states / second.count) ** 0.5)  # gives states the RMS rho
    assert middle.hidden_norm is not None
    middle.hidden_norm.weight.fill_(1.0)
    _zero_outputs(drafter.decoder_layers)
    residual = 1.0 if config.norm_before_residual else rho
    _set_attention(middle.self_attn, maps, covariance, residual)
    scale = (squares / first.count) ** 0.5
    if config.norm_output:
        # The next depth's input keeps the size that the map expects, so the head takes the scale.
        drafter.norm.weight.fill_(rho)
        drafter.lm_head.weight.mul_(scale / rho)
        scaled = drafter.lm_head.weight
    else:
        drafter.norm.weight.fill_(scale)
        scaled = drafter.norm.weight
    set_temperature(drafter, batches[0], source, scaled)
    return second.explained(maps)


def _projection(drafter: Any, batches: list[Batch], source: Source) -> Tensor:
    """[target h, h], from the target's last state to the drafter's width; the head is set to match.

    A narrower drafter takes the directions of most variance, a wider one leaves columns empty.
    """
    h = drafter.config.hidden_size
    wide = drafter.config.target_hidden_size
    if h == wide:
        return torch.eye(h, device=drafter.device)
    covariance = torch.zeros(wide, wide, device=drafter.device)  # of the target's last states
    for batch in batches:
        _, rows, _ = source(batch)
        y = unit(rows.hidden.float())
        covariance += y.T @ y
    # Eigenvalues come in ascending order, so the last directions have most variance.
    directions = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :h]
    project = torch.zeros(wide, h, device=drafter.device)
    project[:, : directions.shape[1]] = directions
    drafter.lm_head.weight.copy_(rows.weight.float() @ project)
    return project


def _zero_outputs(layers: Iterable[Any]) -> None:
    """Makes decoder layers pass on their input: attention and MLP add nothing."""
    for layer in layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            for parameter in linear.parameters():
                parameter.zero_()


def _set_attention(
    attention: Attention,
    maps: Tensor,
    covariance: Tensor,
    residual: float,
) -> None:
    """Stores x -> maps x, less the residual's share of x, in heads that attend to their own token.

    The outputs of the other heads are 0.
    """
    h, width = maps.shape
    e = attention.head_dim
    heads = attention.heads
    kv = attention.kv_heads
    wanted = maps.clone()
    wanted[:, width - h :] -= residual * torch.eye(h, device=maps.device)
    used = range(min(kv, -(-h // e)))  # key/value heads that carry the map
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        if linear.bias is not None:
            linear.bias.zero_()
    # Head norms remove the probe's length, so their weights carry the sharpness. The factor of e
    # makes a token's score with its own key 8 SHARPNESS^2 at every head size.
    for norm in (attention.q_norm, attention.k_norm):
        for weight in norm.parameters():
            weight.fill_(SHARPNESS * (64 / e) ** 0.25)
    store_map(attention, wanted, covariance, used)

    # Queries and keys are one random projection, so each token's own key scores highest.
    generator = torch.Generator().manual_seed(0)
    for head in used:
        probe = torch.randn(e, width, generator=generator)
        probe = probe * SHARPNESS * (64 / e) ** 0.25 / width**0.5
        attention.k_proj.weight[head * e : (head + 1) * e] = probe
        attention.q_proj.weight.view(kv, heads // kv, e, width)[head] = probe


def store_map(
    attention: Attention,
    wanted: Tensor,
    covariance: Tensor,
    heads: range,
) -> None:
    """Stores x -> wanted x in the values and outputs of key/value heads.

    The directions that matter most for this data come first, so that few heads lose as little as
    possible.

    Args:
        wanted: [h, i]; covariance: [i, i] second moments of x.
    """
    h, width = wanted.shape
    e = attention.head_dim
    group = attention.heads // attention.kv_heads  # query heads per key/value head
    ridge = 1e-4 * covariance.diagonal().mean() * torch.eye(width, device=wanted.device)
    factor = wanted @ torch.linalg.cholesky(covariance + ridge)  # [h, i]
    # Its left singular vectors. A singular value decomposition of 4096 x 4096 takes a GPU minutes.
    ascending = torch.linalg.eigh(factor @ factor.T).eigenvectors  # [h, h]
    directions = ascending.flip(1)
    out = attention.o_proj.weight.view(h, attention.heads, e)
    for place, head in enumerate(heads):
        part = directions[:, place * e : (place + 1) * e]  # [h, e], fewer columns at the end
        used = part.shape[1]
        attention.v_proj.weight[head * e : head * e + used] = part.T @ wanted
        attention.v_proj.weight[head * e + used : (head + 1) * e] = 0
        out[:, head * group, :used] = part  # the group's other query heads add 0


def anchor_rows(
    drafter: TrainableDrafter,
    batch: Batch,
    source: Source,
) -> tuple[Tensor, Tensor, Tensor]:
    """Regression data at every anchor t, float32.

    Returns:
        The embedding of x_{t+1} [n, h], the features at t [n, f*h] and the target's last state at
        t+1 [n, h].
    """
    features, rows, row_of = source(batch)
    anchors = anchors_by_depth(batch.response_mask, 1)[0]  # [n] int64 flat positions
    embeds = drafter.embed(batch.input_ids.flatten()[anchors + 1])
    hidden = rows.hidden[row_of.flatten()[anchors + 1]]
    return embeds.float(), features.flatten(0, 1)[anchors].float(), hidden.float()


@torch.no_grad()
def projection_start(
    drafter: LayerDrafter,
    projections: Sequence[nn.Linear],
    batches: Iterable[Batch],
    source: Source,
    normed: bool,
) -> tuple[float, float]:
    """The start of kinds whose projections read (token embedding, state) before the layers.

    Each projection takes the whole map:

        projection [embed(x_{t+1}), f_t]  ~  f_{t+1}

    The layers start with zero output projections. normed: embedding, state and prediction are
    scaled to RMS 1.

    Returns:
        Share of variance of f that the map explains, 0 to 1, and the RMS of f.
    """
    fit = LeastSquares()
    sizes: tuple[Tensor, Tensor] | None = None  # RMS of embeddings and of states
    squares = 0.0
    for batch in batches:
        embeds, state, y = anchor_rows(drafter, batch, source)  # [n, h] each
        squares += float(y.square().mean(-1).sum())
        if normed:
            embeds = unit(embeds)
            state = unit(state)
            y = unit(y)
        # Inputs of about one size, so that the ridge does not decide between them.
        if sizes is None:
            sizes = (embeds.square().mean().sqrt(), state.square().mean().sqrt())
        fit.add(torch.cat((embeds / sizes[0], state / sizes[1]), dim=-1), y)
    assert sizes is not None, "there are batches"
    maps = fit.solve()  # [h, 2h]
    left, right = maps.chunk(2, dim=1)  # [h, h] each, of the scaled inputs
    weight = torch.cat((left / sizes[0], right / sizes[1]), dim=1)  # of inputs as they are
    for projection in projections:
        projection.weight.copy_(weight)
    _zero_outputs(drafter.decoder_layers)
    return fit.explained(maps), (squares / fit.count) ** 0.5


def set_temperature(
    drafter: TrainableDrafter,
    batch: Batch,
    source: Source,
    scaled: Tensor,
) -> None:
    """Scales the logits to the lowest loss on two rows.

    The RMS of a linear prediction does not give its certainty.

    Args:
        scaled: the weight that scales the logits.
    """
    part = batch.first_rows(2)
    embeds = drafter.embed(part.input_ids)
    features, rows, row_of = source(part)
    inputs = StepInputs(
        part,
        embeds,
        features,
        rows,
        row_of,
        total=1.0,
        measure=False,
    )
    weight = scaled.clone()
    # Loss and negative factor: of equal losses, as of rows without anchors, the largest factor's.
    best = (float("inf"), -1.0)
    for factor in (0.25, 0.35, 0.5, 0.65, 0.8, 1.0):
        scaled.copy_(weight * factor)
        best = min(best, (float(drafter(inputs).loss), -factor))
    scaled.copy_(weight * -best[1])


@torch.no_grad()
def block_start(drafter: Any, batches: list[Batch], source: Source) -> float:
    """The start of a `BlockDrafter`.

    It overwrites fc, the first layer's attention, the outputs of all other modules, a learned mask
    and the final norm's scale.
    """
    h = drafter.config.hidden_size

    # `fc` is the features' share of a joint map of embeddings and features.
    joint = LeastSquares()
    squares = 0.0
    for batch in batches:
        embeds, features, hidden = anchor_rows(drafter, batch, source)
        joint.add(torch.cat((unit(embeds), features), dim=-1), unit(hidden))
        squares += float(hidden.square().mean(-1).sum())
    drafter.fc.weight.copy_(joint.solve(least=0.0)[:, h:])
    drafter.hidden_norm.weight.fill_(1.0)

    # The map that attention computes, of embeddings and fused features.
    fitted = LeastSquares()
    mean = torch.zeros(2 * h, device=drafter.device)
    for batch in batches:
        embeds, features, hidden = anchor_rows(drafter, batch, source)
        both = torch.cat((unit(embeds), drafter.fuse(features).float()), dim=-1)
        fitted.add(both, unit(hidden))
        mean += both.sum(0)
    maps = fitted.solve(least=0.0)
    covariance = fitted.xx / fitted.count

    if drafter.mask is not None:
        drafter.mask.copy_(MASK * torch.randn(h, generator=torch.Generator().manual_seed(0)))
    _zero_outputs(drafter.layers)
    drafter.layers[0].input_layernorm.weight.fill_(1.0)
    _set_block_attention(drafter, maps, covariance, mean / fitted.count)
    drafter.norm.weight.fill_((squares / joint.count) ** 0.5 * drafter.logit_scale)
    training = drafter.training
    drafter.eval()  # the same blocks, all of them, at every temperature
    set_temperature(drafter, batches[0], source, drafter.norm.weight)
    drafter.train(training)
    return fitted.explained(maps)


def _set_block_attention(
    drafter: Any,
    maps: Tensor,
    covariance: Tensor,
    mean: Tensor,
) -> None:
    """Half the key/value heads (rounded up) read the block's token, the others the newest context.

    Args:
        maps: [h, 2h] E and A; covariance: [2h, 2h] second moments of what they read; mean: [2h] of
            it.
    """
    attention = drafter.layers[0].self_attn
    rotary = drafter.rotary
    h = drafter.config.hidden_size
    e = attention.head_dim
    kv = attention.kv_heads
    group = attention.heads // attention.kv_heads
    mask = unit(drafter.mask_embedding().float())  # [h]
    token = slice(0, h)
    context = slice(h, 2 * h)
    # [h, h] second moments of all that the keys read: tokens, context, masks
    gram = covariance[token, token] + covariance[context, context] + torch.outer(mask, mask)
    gram += RIDGE * gram.diagonal().mean() * torch.eye(h, device=gram.device)
    tokens = -(-kv // 2)  # number of token heads
    half = rotary.width // 2
    # [e] keys: on the slowest rotation only, and on all of them
    slow = torch.zeros(e, device=gram.device)
    slow[half - 1] = e**0.5
    every = torch.zeros(e, device=gram.device)
    every[:half] = (e / half) ** 0.5
    strength = POWER * math.log(rotary.parameters["rope_theta"])
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_((strength / e**0.5) ** 0.5)
    # Queries of token heads are rotated away from their keys, into a plane where the keys are zero,
    # until the score fits.
    aside = torch.zeros_like(slow)
    aside[0] = e**0.5
    share = 1.0
    if half > 1:  # with one rotation there is no other plane
        share = min(1.0, SCORE / strength)
    turned = share * slow + (1 - share**2) ** 0.5 * aside
    # Queries of context heads match the key at the position before.
    tables = rotary.tables(torch.tensor([-1], device=gram.device), torch.float32)
    newest = rotate(every[None, None], tables)[0, 0]
    for part, heads, key, query, sign in (
        (token, range(tokens), slow, turned, 1.0),
        (context, range(tokens, kv), every, newest, -1.0),
    ):
        # Least squares: `sign` on tokens, `-sign` on features, -1 on masks.
        probe = torch.linalg.solve(gram, sign * (mean[token] - mean[context]) - mask)
        for head in heads:
            rows = slice(head * e, (head + 1) * e)
            attention.k_proj.weight[rows] = torch.outer(key, probe)
            attention.q_proj.weight.view(kv, group, e, h)[head, 0] = torch.outer(query, mask / h)
        store_map(attention, maps[:, part], covariance[part, part], heads)
