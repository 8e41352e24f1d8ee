"""The kernel path of the linear divergence: a Triton launch behind the products for the logits."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.overrides import wrap_torch_function

from drafttrain.losses.spec import ACCEPTANCE, NAMES, Loss
from drafttrain.ops.launch import run_kernel

_BLOCK = 4096  # columns of the vocabulary per iteration of a program


class KernelTargets(Protocol):
    """What the kernel path reads of `divergence.Targets`, which imports this module."""

    argmax: Tensor

    def kernel_logits(self, index: Tensor, z: Tensor) -> Tensor: ...
    def full_log_z(self, index: Tensor, temperature: float) -> Tensor: ...
    def sampled_at(self, index: Tensor) -> Tensor: ...


@dataclass
class Launch:
    """The terms that one launch computes: one temperature, one weight and one parameter per name."""

    temperature: float
    weights: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)


@functools.cache
def plan(loss: Loss) -> tuple[Launch, ...]:
    """As few launches as the terms' temperatures and parameters allow; usually one."""
    launches: list[Launch] = []
    for term in loss.terms:
        for launch in launches:
            # A launch has one temperature, and one parameter for each name.
            parameter = launch.parameters.get(term.name, term.parameter)
            if launch.temperature == term.temperature and parameter == term.parameter:
                break
        else:
            launch = Launch(term.temperature)
            launches.append(launch)
        launch.weights[term.name] = launch.weights.get(term.name, 0.0) + term.weight
        launch.parameters[term.name] = term.parameter
    # Acceptance is measured at temperature 1; the first launch does it too if that is its
    # temperature.
    return tuple(sorted(launches, key=lambda launch: launch.temperature != 1))


@wrap_torch_function(lambda z, *rest, **options: (z,))
def launch_rows(z: Tensor, *rest: object, **options: object) -> None:
    """Launches the Triton kernel, a program per row of z [c, d]; `drafttrain plan` overrides it."""
    from drafttrain.ops.divergence_kernels import divergence_rows

    run_kernel(divergence_rows, (len(z),), z, *rest, **options)


def fused_step(
    z: Tensor,
    targets: KernelTargets,
    index: Tensor,
    row_weight: Tensor,
    loss: Loss,
    measure: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """One chunk: drafter logits z [c, d], which may be overwritten, index [c], row_weight [c].

    Returns:
        values [c] float32, their weighted gradient in the logits [c, d] in z's dtype, alpha [c] and
        agree [c] or None.
    """
    width = z.shape[1]
    launches = plan(loss)
    row_weight = row_weight.float().contiguous()
    only_ce = not measure and all(term.name == "ce" for term in loss.terms)
    if only_ce:
        y = z  # the kernel does not read the target
    else:
        y = targets.kernel_logits(index, z)  # [c, d]
    if y.shape != z.shape or y.stride(1) != 1 or not len(index) == len(row_weight) == len(z):
        raise ValueError(
            f"targets {list(y.shape)}, index [{len(index)}] and weights [{len(row_weight)}] must fit {list(z.shape)}"
        )
    values = torch.empty(len(z), dtype=torch.float32, device=z.device)
    alpha = torch.empty_like(values)
    agree = torch.empty_like(values, dtype=torch.bool)
    # A gradient in place would overwrite the logits that a second launch reads.
    if len(launches) == 1:
        grad = z
    else:
        grad = torch.empty_like(z)

    def run(
        launch: Launch,
        measures: bool,
        add: bool,
    ) -> None:
        """One launch over all rows.

        It writes alpha and agree if it measures, and adds to values and grad or sets them.
        """
        weights = launch.weights
        accept = any(name in ACCEPTANCE for name in weights)
        # Tensors that this launch does not read are replaced by others of the same dtype.
        full = row_weight
        likeliest = sampled = index
        if accept or measures:
            full = targets.full_log_z(index, launch.temperature).float().contiguous()  # [c]
        if measures:
            likeliest = targets.argmax[index]
        if "ce" in weights:
            sampled = targets.sampled_at(index)
        launch_rows(
            z,
            y,
            grad,
            values,
            alpha,
            agree,
            full,
            likeliest,
            sampled,
            row_weight,
            z.stride(0),
            y.stride(0),
            grad.stride(0),
            width,
            1.0 / launch.temperature,
            *[weights.get(name, 0.0) for name in NAMES],
            launch.parameters.get("js", 0.5),
            launch.parameters.get("lk_lambda", 0.0),
            KL="kl" in weights or "lk_lambda" in weights,
            REVERSE="reverse_kl" in weights,
            JS="js" in weights,
            ACCEPT=accept,
            CE="ce" in weights,
            MEASURE=measures,
            GRAD=bool(weights),
            ADD=add,
            BLOCK=min(_BLOCK, max(128, 1 << (width - 1).bit_length())),
            num_warps=8,
        )

    # Acceptance is measured at temperature 1: by the first launch, or by one without terms.
    by_first = measure and launches[0].temperature == 1
    if measure and not by_first:
        run(Launch(1.0), measures=True, add=False)
    for number, launch in enumerate(launches):
        run(launch, measures=by_first and number == 0, add=number > 0)
    if measure:
        return values, grad, alpha, agree
    return values, grad, None, None
