"""What trained kinds share besides blocks: binding to a target, starting from its weights, and which anchors count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.errors import UserError
from drafttrain.losses import DivergenceOutput
from drafttrain.target import Target


def bind_target(drafter: Any, target: Target) -> None:
    """Compares the drafter's record of its target with this one and gives it `embed`, the target's embedding.

    The embedding is attached as a plain function, so that it is neither trained, saved nor sharded with the drafter.

    Raises:
        UserError: trained for a target with another hidden size, depth, vocabulary or tokenizer.
    """
    recorded, actual = drafter.config.target, target.identity()
    for key in ("hidden_size", "num_layers", "vocab_size", "tokenizer"):
        if key in recorded and recorded[key] != actual[key]:
            raise UserError(
                f"drafter was trained for target {recorded.get('name')!r} with {key}={recorded[key]!r}, but target "
                f"{actual['name']!r} has {key}={actual[key]!r}; use its own target, or train a drafter for this one"
            )
    if max(drafter.feature_layers, default=0) > target.num_layers:
        raise UserError(
            f"feature_layers={list(drafter.feature_layers)} reach beyond the {target.num_layers} layers of {target.name!r}"
        )
    drafter.embed = target.embed


def sums_by_depth(outs: Sequence[DivergenceOutput]) -> dict[str, Tensor]:
    """The metrics of a training step: count, loss, alpha and agree summed over each depth's anchors, [depths] each; empty if
    they were not asked for."""
    sums = [
        torch.stack([value.sum() for value in (torch.ones_like(out.values), out.values, out.alpha, out.agree.float())])
        for out in outs
        if out.alpha is not None and out.agree is not None
    ]
    names = ("count", "loss", "alpha", "agree")
    return dict(zip(names, torch.stack(sums, dim=1), strict=True)) if sums else {}


def anchors_by_depth(response_mask: Tensor, depths: int, share: float = 1.0) -> list[Tensor]:
    """The anchors that each depth trains on, as flat positions of [b, s].

    Anchor t counts at depth k if x_{t+1} .. x_{t+2+k} all belong to one response: then decoding can stand there (the last
    committed token is the target's own) and what is predicted is the target's own choice. Later sets lie in earlier ones.

        response_mask     0 0 1 1 1 1 0       anchors at depth 0:  t = 1, 2, 3   (x_{t+1}, x_{t+2} both in)
        position t        0 1 2 3 4 5 6       anchors at depth 1:  t = 1, 2

    Args:
        response_mask: [b, s] bool.
        share: of the anchors, drawn at random, that go on to depths after the first.

    Returns:
        One int64 tensor per depth.
    """
    s = response_mask.shape[1]
    shifted = [torch.nn.functional.pad(response_mask[:, j:], (0, min(j, s))) for j in range(1, depths + 2)]
    current, result = shifted[0], []
    for k, following in enumerate(shifted[1:]):
        current = current & following
        if k == 1 and share < 1:
            current = current & (torch.rand(current.shape, device=current.device) < share)
        result.append(current.flatten().nonzero().squeeze(1))
    return result


def norm_weight(module: nn.Module) -> Tensor | None:
    """The factor that an RMS norm really applies: some families store it minus one, so ask the module, not the tensor."""
    if "RMSNorm" not in type(module).__name__:
        return None
    weight = next(module.parameters())
    return module(torch.ones_like(weight)).detach()


def copy_norm(ours: Any, theirs: Any) -> bool:
    """Gives our RMS norm the target's factors; False if theirs is missing or of another kind or size."""
    weight = norm_weight(theirs) if theirs is not None else None
    if weight is None or weight.shape != ours.weight.shape:
        return False
    ours.weight.data.copy_(weight)
    return True


def copy_linear(ours: nn.Linear, theirs: Any, head_dim: int = 0) -> bool:
    """Copies a projection; a wider input gets it in its last columns and small random weights in the others.

    With head_dim, fewer key or value heads than ours are repeated per group, which leaves attention unchanged.

    Returns:
        False if theirs is missing or fits neither way; ours is then unchanged.
    """
    if theirs is None:
        return False
    weight = theirs.weight.detach().to(ours.weight.dtype)
    bias = getattr(theirs, "bias", None)
    if head_dim and ours.weight.shape[0] % weight.shape[0] == 0 and weight.shape[0] % head_dim == 0:
        times = ours.weight.shape[0] // weight.shape[0]
        weight = weight.view(-1, head_dim, weight.shape[1]).repeat_interleave(times, dim=0).flatten(0, 1)
        bias = None if bias is None else bias.view(-1, head_dim).repeat_interleave(times, dim=0).flatten()
    if weight.shape[0] != ours.weight.shape[0] or weight.shape[1] > ours.weight.shape[1]:
        return False
    ours.weight.data[:, : -weight.shape[1]] *= 0.1
    ours.weight.data[:, -weight.shape[1] :] = weight
    if ours.bias is not None and bias is not None:
        ours.bias.data.copy_(bias)
    return True


def copy_layer(ours: Any, theirs: Any) -> list[str]:
    """Gives a decoder layer what the target's layer has in the same form; returns the names.

    Args:
        ours: with `self_attn`, an `Attention`, `mlp` and norms; theirs: the target's. Where ours has a `hidden_norm`, that one
            stands for their input norm.
    """
    # Families with four norms a layer name the one before the MLP differently.
    before_mlp = getattr(theirs, "pre_feedforward_layernorm", None) or getattr(theirs, "post_attention_layernorm", None)
    attention, their_attention = ours.self_attn, getattr(theirs, "self_attn", None)
    into = "hidden_norm" if hasattr(ours, "hidden_norm") else "input_layernorm"
    norms = {
        into: (getattr(ours, into), getattr(theirs, "input_layernorm", None)),
        "post_attention_layernorm": (ours.post_attention_layernorm, before_mlp),
        "self_attn.q_norm": (attention.q_norm, getattr(their_attention, "q_norm", None)),
        "self_attn.k_norm": (attention.k_norm, getattr(their_attention, "k_norm", None)),
    }
    done = {name: copy_norm(*pair) for name, pair in norms.items() if not isinstance(pair[0], nn.Identity)}
    for block, names in (
        ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("mlp", ("gate_proj", "up_proj", "down_proj")),
    ):
        for name in names:
            repeated = attention.head_dim if name in ("k_proj", "v_proj") else 0
            other = getattr(getattr(theirs, block, None), name, None)
            done[f"{block}.{name}"] = copy_linear(getattr(getattr(ours, block), name), other, repeated)
    return [name for name, copied in done.items() if copied]
