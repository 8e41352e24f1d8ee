"""The divergence of two linear heads, without ever holding [tokens, vocabulary].

Rows are handled in chunks; a chunk's drafter logits, its target logits, the divergence and the gradient are formed in one
pass and dropped, so memory is one chunk and backward only scales what forward has already summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.losses.divergence import DIVERGENCES, Divergence


@dataclass
class TargetRows:
    """The target's next-token distributions at r positions, as the states that produce them.

    Attributes:
        hidden: [r, h] states that the target's head reads.
        weight: [d, h] the head's rows for the kept (drafter) vocabulary.
        log_z: [r] float32 log of the softmax denominator over the *full* vocabulary: acceptance is measured with the
            target's full distribution, whatever the drafter can say.
        argmax: [r] int64 drafter id of the target's likeliest token, -1 where the drafter's vocabulary lacks it.
        shape: what the target does to raw logits (scale, soft cap).
    """

    hidden: Tensor
    weight: Tensor
    log_z: Tensor
    argmax: Tensor
    shape: Callable[[Tensor], Tensor]

    def logits(self, index: Tensor) -> Tensor:
        """index [c] -> float32 logits [c, d] over the kept vocabulary."""
        return self.shape(F.linear(self.hidden[index].to(self.weight.dtype), self.weight).float())


@dataclass
class DivergenceOutput:
    """Per-token results, all [t] and detached but the loss.

    Attributes:
        loss: scalar, sum of row_weight * divergence.
        values: the divergence, over the kept vocabulary (target renormalised on it).
        alpha: sum_v min(p, q) with the target's full p: the chance that a sampled draft token is accepted.
        agree: bool, the drafter's likeliest token is the target's likeliest of the full vocabulary.
    """

    loss: Tensor
    values: Tensor
    alpha: Tensor
    agree: Tensor


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, rows: TargetRows, index, row_weight, divergence: Divergence, chunk: int):
        total = hidden.shape[0]
        master, weight = weight, weight.to(hidden.dtype)
        values = hidden.new_empty(total, dtype=torch.float32)
        alpha, agree = torch.empty_like(values), torch.empty_like(values, dtype=torch.bool)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(master) if ctx.needs_input_grad[1] else None
        for start in range(0, total, chunk):
            part = slice(start, min(start + chunk, total))
            z = F.linear(hidden[part], weight).float()
            log_q = torch.log_softmax(z, dim=-1)
            q = log_q.exp()
            target_logits = rows.logits(index[part])
            log_p = torch.log_softmax(target_logits, dim=-1)
            p = log_p.exp()
            values[part], grad = divergence(p, log_p, q, log_q)
            # Probability of the kept set under the full distribution turns p (renormalised) back into the full p.
            kept_mass = (target_logits[:, :1] - log_p[:, :1] - rows.log_z[index[part], None]).exp()
            alpha[part] = torch.minimum(p.mul_(kept_mass), q).sum(-1)
            agree[part] = z.argmax(-1) == rows.argmax[index[part]]
            grad = grad.mul_(row_weight[part, None]).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                if grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.t(), hidden[part])
                else:
                    grad_weight += grad.t() @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(values, alpha, agree)
        return (values * row_weight).sum(), values, alpha, agree

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = lambda grad: None if grad is None else grad * grad_loss.to(grad.dtype)  # noqa: E731
        return scale(grad_hidden), scale(grad_weight), None, None, None, None, None


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    rows: TargetRows,
    index: Tensor,
    row_weight: Tensor,
    loss: str = "kl",
    chunk: int = 256,
) -> DivergenceOutput:
    """Divergence between drafter rows softmax(hidden weight^T) and the target rows they are aligned with.

    Args:
        hidden: [t, h] drafter states, `weight`: [d, h] drafter head; gradients flow into both.
        rows: the target's distributions; `index`: [t] int64, the target row of each drafter row.
        row_weight: [t] float32 factor of each token in the loss (mask, depth decay, 1 / global count).
        loss: a name in DIVERGENCES.
        chunk: rows at a time; memory is a few [chunk, d] float32 matrices.

    Returns:
        The weighted sum and per-token values.
    """
    out = _LinearDivergence.apply(hidden, weight, rows, index, row_weight, DIVERGENCES[loss], chunk)
    return DivergenceOutput(*out)
