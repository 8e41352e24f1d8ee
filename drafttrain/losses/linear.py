"""The divergence of two linear heads, without ever holding [tokens, vocabulary].

Rows are handled in chunks; a chunk's drafter logits, its target distribution, the divergence and the gradient are formed
in one pass and dropped, so memory is one chunk and backward only scales what forward has already summed. On a GPU with
Triton a kernel does what lies between the matrix products (`fused.py`); elsewhere torch does, and that is the definition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.losses.divergence import DIVERGENCES, Rows
from drafttrain.losses.fused import fused_step, has_kernel
from drafttrain.losses.spec import Loss, parse_loss
from drafttrain.losses.targets import Targets, wide

# Rows at a time where torch forms the loss; more gain nothing on a CPU.
_CHUNK = 256
# Where the kernel does, a chunk's logits may take so much: large products are faster, and few of these are held.
_KERNEL_BYTES = 2**28


@dataclass
class DivergenceOutput:
    """Per-token results, all [t] and detached but the loss; alpha and agree are None where they were not asked for.

    Attributes:
        loss: scalar, sum of row_weight * divergence.
        values: the loss of each token; see `divergence.py` for which p each term reads.
        alpha: sum_v min(p, q) with the target's full p: the chance that a sampled draft token is accepted.
        agree: bool, the drafter's likeliest token is the target's likeliest of the full vocabulary.
    """

    loss: Tensor
    values: Tensor
    alpha: Tensor | None = None
    agree: Tensor | None = None


def _torch_step(
    hidden: Tensor, weight: Tensor, targets: Targets, index: Tensor, row_weight: Tensor, loss: Loss, measure: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """One chunk, as `fused_step`; float32, or float64 if hidden is."""
    z = wide(F.linear(hidden, weight))
    rows: dict[float, Rows] = {}
    for term in loss.terms:
        if term.temperature not in rows:
            rows[term.temperature] = Rows(z, targets, index, term.temperature)
        value, slope = DIVERGENCES[term.name](rows[term.temperature], term.parameter)
        scale = term.weight / term.temperature
        if term is loss.terms[0]:
            values, grad = value * term.weight, slope if scale == 1 else slope.mul_(scale)
        else:
            values, grad = values.add_(value, alpha=term.weight), grad.add_(slope, alpha=scale)
    alpha = agree = None
    if measure:
        alpha = (rows[1.0] if 1.0 in rows else Rows(z, targets, index, 1.0)).final_alpha()
        agree = z.argmax(-1) == targets.argmax[index]
    return values, grad.mul_(row_weight.unsqueeze(1)).to(hidden.dtype), alpha, agree


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets: Targets, index, row_weight, loss: Loss, chunk: int, measure: bool):
        total = hidden.shape[0]
        master, weight = weight, weight.to(hidden.dtype)
        step = fused_step if has_kernel(hidden) else _torch_step
        values = wide(hidden.new_empty(0)).new_empty(total)
        measured = total if measure else 0
        alpha, agree = values.new_empty(measured), values.new_empty(measured, dtype=torch.bool)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(master) if ctx.needs_input_grad[1] else None
        for start in range(0, total, chunk):
            part = slice(start, min(start + chunk, total))
            values[part], grad, chunk_alpha, chunk_agree = step(
                hidden[part], weight, targets, index[part], row_weight[part], loss, measure
            )
            if chunk_alpha is not None and chunk_agree is not None:
                alpha[part], agree[part] = chunk_alpha, chunk_agree
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                if grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.t(), hidden[part])
                else:
                    grad_weight += grad.t() @ hidden[part]
            del grad  # before the next chunk's logits
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(values, alpha, agree)
        return (values * row_weight).sum(), values, alpha, agree

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grads = [None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors]
        return (*grads, None, None, None, None, None, None)


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    targets: Targets,
    index: Tensor,
    row_weight: Tensor,
    loss: str = "kl",
    chunk: int | None = None,
    measure: bool = True,
) -> DivergenceOutput:
    """Divergence between drafter rows softmax(hidden weight^T) and the target rows they are aligned with.

    Args:
        hidden: [t, h] drafter states, `weight`: [d, h] drafter head; gradients flow into both.
        targets: the target's distributions; `index`: [t] int64, the target row of each drafter row.
        row_weight: [t] float32 factor of each token in the loss (mask, depth decay, 1 / global count).
        loss: as `parse_loss` reads it: kl, js:0.5, 0.9*kl+0.1*ce.
        chunk: rows at a time; chosen by the device unless given. Memory is a few [chunk, d] matrices.
        measure: also compute alpha and agree, at about a tenth of the cost.

    Returns:
        The weighted sum and per-token values.

    Raises:
        UserError: a loss that cannot be read, or that asks what the targets do not say.
    """
    if chunk is None:
        chunk = _CHUNK
        if has_kernel(hidden):
            chunk = max(_CHUNK, _KERNEL_BYTES // (weight.shape[0] * hidden.element_size()) // 128 * 128)
    total, values, alpha, agree = _LinearDivergence.apply(
        hidden, weight, targets, index, row_weight, parse_loss(loss), chunk, measure
    )
    return DivergenceOutput(total, values, alpha, agree) if measure else DivergenceOutput(total, values)
