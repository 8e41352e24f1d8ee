"""The kernel path of the linear divergence: matrix products for a chunk's logits, one Triton launch for the rest."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.losses.spec import ACCEPTANCE, Loss

# Columns of the vocabulary per iteration of a program.
_BLOCK = 4096


class KernelTargets(Protocol):
    """What the kernel path reads of the target; `divergence.Targets` provides it."""

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
            if launch.temperature == term.temperature and launch.parameters.get(term.name) in (None, term.parameter):
                break
        else:
            launches.append(launch := Launch(term.temperature))
        launch.weights[term.name] = launch.weights.get(term.name, 0.0) + term.weight
        launch.parameters[term.name] = term.parameter
    # Acceptance is measured at temperature 1; the first launch does it too if that is its temperature.
    return tuple(sorted(launches, key=lambda launch: launch.temperature != 1))


@dataclass
class _Chunk:
    """Inputs and outputs of the launches of one chunk of c rows.

    Attributes:
        z: [c, d] drafter logits; y: [c, d] target logits, both raw; index: [c] target rows; row_weight: [c] float32.
        grad: [c, d] out, may be z itself; values: [c] float32 out; alpha: [c] float32 out; agree: [c] bool out.
    """

    z: Tensor
    y: Tensor
    targets: KernelTargets
    index: Tensor
    row_weight: Tensor
    grad: Tensor
    values: Tensor
    alpha: Tensor
    agree: Tensor

    def run(self, launch: Launch, measure: bool, add: bool) -> None:
        """One launch over all rows.

        Args:
            launch: without terms it only measures. measure: write alpha and agree. add: accumulate values and grad.
        """
        from drafttrain.ops.divergence_kernels import divergence_rows

        z, y, grad, weights, row_weight = self.z, self.y, self.grad, launch.weights, self.row_weight
        accept = any(name in ACCEPTANCE for name in weights)
        full = row_weight  # not read
        if accept or measure:
            full = self.targets.full_log_z(self.index, launch.temperature).float().contiguous()  # [c]
        width = z.shape[1]
        divergence_rows[(len(z),)](
            *(z, y, grad, self.values, self.alpha, self.agree, full),
            self.targets.argmax[self.index] if measure else self.index,
            self.targets.sampled_at(self.index) if "ce" in weights else self.index,
            *(row_weight, z.stride(0), y.stride(0), grad.stride(0), width, 1.0 / launch.temperature),
            *(weights.get(name, 0.0) for name in ("kl", "reverse_kl", "js", *ACCEPTANCE, "ce")),
            *(launch.parameters.get("js", 0.5), launch.parameters.get("lk_lambda", 0.0)),
            KL="kl" in weights or "lk_lambda" in weights,
            REVERSE="reverse_kl" in weights,
            JS="js" in weights,
            ACCEPT=accept,
            CE="ce" in weights,
            MEASURE=measure,
            GRAD=bool(weights),
            ADD=add,
            BLOCK=min(_BLOCK, max(128, 1 << (width - 1).bit_length())),
            num_warps=8,
        )


def fused_step(
    hidden: Tensor, weight: Tensor, targets: KernelTargets, index: Tensor, row_weight: Tensor, loss: Loss, measure: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """One chunk: hidden [c, h], weight [d, h], index [c], row_weight [c].

    Returns:
        values [c] float32, their weighted gradient in the logits [c, d] in hidden's dtype, alpha [c] and agree [c] or None.
    """
    z = F.linear(hidden, weight)  # [c, d] in hidden's dtype
    launches = plan(loss)
    only_ce = not measure and {term.name for term in loss.terms} == {"ce"}
    y = z if only_ce else targets.kernel_logits(index, z)  # [c, d]
    values = torch.empty(len(z), dtype=torch.float32, device=z.device)
    alpha, agree = torch.empty_like(values), torch.empty_like(values, dtype=torch.bool)
    # A gradient in place would overwrite the logits that a second launch reads.
    grad = z if len(launches) == 1 else torch.empty_like(z)
    chunk = _Chunk(z, y, targets, index, row_weight.float().contiguous(), grad, values, alpha, agree)
    apart = measure and launches[0].temperature != 1  # no launch with terms runs at temperature 1
    if apart:
        chunk.run(Launch(1.0), measure=True, add=False)
    for number, launch in enumerate(launches):
        chunk.run(launch, measure=measure and not apart and number == 0, add=number > 0)
    return (values, grad, alpha, agree) if measure else (values, grad, None, None)
