"""Copying a target's norms, projections and layers into a drafter's, where their forms agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import RMSNorm

from drafttrain.drafters.common.layers import DraftLayer
from drafttrain.ops.packing import PackedLinear
from drafttrain.target import Target

# Linear layers of a decoder layer, by block.
PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


def norm_weight(module: nn.Module) -> Tensor | None:
    """The factors that an RMS norm applies, which some families store minus one; None for another kind of norm."""
    if "RMSNorm" not in type(module).__name__:
        return None
    weight = next(module.parameters())
    return module(torch.ones_like(weight)).detach()


def copy_norm(ours: RMSNorm, theirs: nn.Module | None) -> bool:
    """Copies an RMS norm's factors; False if theirs is missing or of another kind or size."""
    weight = norm_weight(theirs) if theirs is not None else None
    if weight is None or weight.shape != ours.weight.shape:
        return False
    ours.weight.data.copy_(weight)
    return True


def copy_linear(ours: nn.Linear, theirs: Any, head_dim: int = 0) -> bool:
    """Copies a projection. A wider input takes it in its last columns; the others get small random weights.

    With head_dim, fewer key or value heads than ours are repeated per group, which leaves attention unchanged.

    Returns:
        False, with ours unchanged, if theirs is missing or does not fit.
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


def copy_layer(ours: DraftLayer, theirs: nn.Module) -> list[str]:
    """Copies the parts of a target's layer that have the same form as ours; returns their names.

    The `hidden_norm` of a layer that has one takes their input norm.
    """
    # Families with four norms per layer name the norm before the MLP differently.
    before_mlp = getattr(theirs, "pre_feedforward_layernorm", None) or getattr(theirs, "post_attention_layernorm", None)
    attention, their_attention = ours.self_attn, getattr(theirs, "self_attn", None)
    input_norm = "hidden_norm" if ours.hidden_norm is not None else "input_layernorm"
    norms = {
        input_norm: (getattr(ours, input_norm), getattr(theirs, "input_layernorm", None)),
        "post_attention_layernorm": (ours.post_attention_layernorm, before_mlp),
        "self_attn.q_norm": (attention.q_norm, getattr(their_attention, "q_norm", None)),
        "self_attn.k_norm": (attention.k_norm, getattr(their_attention, "k_norm", None)),
    }
    done = {name: copy_norm(own, other) for name, (own, other) in norms.items() if isinstance(own, RMSNorm)}
    for block, names in PROJECTIONS.items():
        for name in names:
            repeated = attention.head_dim if name in ("k_proj", "v_proj") else 0
            other = getattr(getattr(theirs, block, None), name, None)
            done[f"{block}.{name}"] = copy_linear(getattr(getattr(ours, block), name), other, repeated)
    return [name for name, copied in done.items() if copied]


def copy_last_layers(ours: Sequence[DraftLayer], target: Target) -> list[list[str]]:
    """Copies the target's last layers into our last ones; returns the names of the copied parts per layer."""
    ours = ours[-target.num_layers :]
    return [copy_layer(layer, theirs) for layer, theirs in zip(ours, target.layers[-len(ours) :], strict=True)]


def final_norm(target: Target) -> nn.Module | None:
    """The norm behind the target's last layer; None in families that have none."""
    return getattr(target.body, "norm", None)


def identity_on_last(linear: nn.Linear) -> None:
    """Makes a projection the identity on its last columns, with small random weights on the others."""
    linear.weight.mul_(0.1)
    linear.weight[:, -linear.out_features :].add_(torch.eye(linear.out_features))


def head_rows(target: Target, kept_ids: Tensor) -> Tensor:
    """[d, h] the target's head rows of the kept tokens."""
    return target.head_weight[kept_ids.to(target.head_weight.device)]


def frozen_head(target: Target, kept_ids: Tensor, packed: bool, scale: float = 1.0) -> nn.Linear | PackedLinear:
    """The target's head rows of the kept tokens times `scale`, as a frozen layer; without a copy where it can."""
    rows = target.head_weight if len(kept_ids) == len(target.head_weight) else head_rows(target, kept_ids)
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    rows = rows.detach().to(target.device)
    head.weight = nn.Parameter(rows if scale == 1.0 else rows * scale, requires_grad=False)
    return PackedLinear(head) if packed else head
