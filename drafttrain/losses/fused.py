"""The kernel's side of the linear divergence: one chunk's logits by the device's matrix products, the rest in one launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.losses.spec import ACCEPTANCE, Loss
from drafttrain.losses.targets import Targets
from drafttrain.ops.tree_attention_triton import has_triton

# A program's loop over the vocabulary takes so many columns at a time.
_BLOCK = 4096


def has_kernel(hidden: Tensor) -> bool:
    """Whether this is a GPU's tensor in a dtype that the kernel serves (float64 is not) and Triton is there."""
    return hidden.is_cuda and hidden.dtype != torch.float64 and has_triton()


@dataclass
class Launch:
    """Terms that one launch serves: one temperature, one weight per name, one parameter per name."""

    temperature: float
    weights: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)


@functools.cache
def plan(loss: Loss) -> tuple[Launch, ...]:
    """As few launches as the terms' temperatures and parameters allow; usually one."""
    launches: list[Launch] = []
    for term in loss.terms:
        for launch in launches:
            if launch.temperature == term.temperature and launch.parameters.get(term.name) in (None, term.parameter):
                break
        else:
            launches.append(launch := Launch(term.temperature))
        launch.weights[term.name] = launch.weights.get(term.name, 0.0) + term.weight
        launch.parameters[term.name] = term.parameter
    # Acceptance is measured at temperature 1, in passing where that is the first launch.
    return tuple(sorted(launches, key=lambda launch: launch.temperature != 1))


def fused_step(
    hidden: Tensor, weight: Tensor, targets: Targets, index: Tensor, row_weight: Tensor, loss: Loss, measure: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """One chunk: hidden [c, h], weight [d, h], index [c], row_weight [c].

    Returns:
        values [c] float32, their weighted gradient in the logits [c, d] in hidden's dtype, alpha [c] and agree [c] or None.
    """
    z = F.linear(hidden, weight)
    launches = plan(loss)
    blind = not measure and {term.name for term in loss.terms} == {"ce"}
    y = z if blind else targets.kernel_logits(index, z)
    values = torch.empty(len(z), dtype=torch.float32, device=z.device)
    alpha, agree = (values.clone(), torch.empty_like(values, dtype=torch.bool)) if measure else (None, None)
    # A gradient in place would spoil the logits for a second launch.
    grad = z if len(launches) == 1 else torch.empty_like(z)
    row_weight = row_weight.float().contiguous()
    if measure and launches[0].temperature != 1:
        _run(z, y, grad, values, alpha, agree, targets, index, row_weight, Launch(1.0), False)
        _run(z, y, grad, values, None, None, targets, index, row_weight, launches[0], False)
    else:
        _run(z, y, grad, values, alpha, agree, targets, index, row_weight, launches[0], False)
    for launch in launches[1:]:
        _run(z, y, grad, values, None, None, targets, index, row_weight, launch, True)
    return values, grad, alpha, agree


def _run(
    z: Tensor,
    y: Tensor,
    grad: Tensor,
    values: Tensor,
    alpha: Tensor | None,
    agree: Tensor | None,
    targets: Targets,
    index: Tensor,
    row_weight: Tensor,
    launch: Launch,
    add: bool,
) -> None:
    """One launch over all rows; without terms it measures only."""
    from drafttrain.ops.divergence_kernels import divergence_rows

    weights = launch.weights
    accept = any(name in ACCEPTANCE for name in weights)
    full = row_weight
    if accept or alpha is not None:
        full = targets.full_log_z(index, launch.temperature).float().contiguous()
    width = z.shape[1]
    divergence_rows[(len(z),)](
        z,
        y,
        grad,
        values,
        values if alpha is None else alpha,
        values if agree is None else agree,
        full,
        targets.argmax[index] if alpha is not None else index,
        targets.sampled_at(index) if "ce" in weights else index,
        row_weight,
        z.stride(0),
        y.stride(0),
        grad.stride(0),
        width,
        1.0 / launch.temperature,
        *(weights.get(name, 0.0) for name in ("kl", "reverse_kl", "js", *ACCEPTANCE, "ce")),
        launch.parameters.get("js", 0.5),
        launch.parameters.get("lk_lambda", 0.0),
        KL="kl" in weights or "lk_lambda" in weights,
        REVERSE="reverse_kl" in weights,
        JS="js" in weights,
        ACCEPT=accept,
        CE="ce" in weights,
        MEASURE=alpha is not None,
        GRAD=bool(weights),
        ADD=add,
        BLOCK=min(_BLOCK, max(128, 1 << (width - 1).bit_length())),
        num_warps=8,
    )
