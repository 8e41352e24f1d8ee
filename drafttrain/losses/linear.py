"""The divergence of two linear heads, without ever holding [tokens, vocabulary].

Rows are handled in chunks; a chunk's drafter logits, its target distribution, the divergence and the gradient are formed
in one pass and dropped, so memory is one chunk and backward only scales what forward has already summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.losses.divergence import DIVERGENCES, Divergence, Rows, dot
from drafttrain.losses.topk import StoredTopK

# Target distributions up to this size are computed once per batch and shared by all depths; larger ones once per use.
_SHARED_BYTES = 256e6


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
    _shared: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)

    def logits(self, index: Tensor | slice) -> Tensor:
        """Float32 logits [c, d] over the kept vocabulary."""
        return self.shape(F.linear(self.hidden[index].to(self.weight.dtype), self.weight).float())

    def kept(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """index [c] -> p [c, d] renormalised on the kept tokens, its entropy [c], and log of its denominator [c]."""
        if self._shared is None and 4 * len(self.hidden) * len(self.weight) <= _SHARED_BYTES:
            p = self.hidden.new_empty(len(self.hidden), len(self.weight), dtype=torch.float32)
            entropy, log_z = p.new_empty(len(p)), p.new_empty(len(p))
            for start in range(0, len(p), 256):
                part = slice(start, start + 256)
                p[part], entropy[part], log_z[part] = self._distribution(part)
            self._shared = p, entropy, log_z
        if self._shared is None:
            return self._distribution(index)
        p, entropy, log_z = self._shared
        return p[index], entropy[index], log_z[index]

    def _distribution(self, index: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.logits(index)
        log_z = logits.logsumexp(-1)
        p = torch.exp(logits - log_z.unsqueeze(1))
        return p, log_z - dot(p, logits), log_z


@dataclass
class DivergenceOutput:
    """Per-token results, all [t] and detached but the loss; alpha and agree are None where they were not asked for.

    Attributes:
        loss: scalar, sum of row_weight * divergence.
        values: the divergence, over the kept vocabulary (target renormalised on it).
        alpha: sum_v min(p, q) with the target's full p: the chance that a sampled draft token is accepted.
        agree: bool, the drafter's likeliest token is the target's likeliest of the full vocabulary.
    """

    loss: Tensor
    values: Tensor
    alpha: Tensor | None = None
    agree: Tensor | None = None


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        rows: TargetRows | StoredTopK,
        index,
        row_weight,
        divergence: Divergence,
        chunk: int,
        measure: bool,
    ):
        total = hidden.shape[0]
        master, weight = weight, weight.to(hidden.dtype)
        values = hidden.new_empty(total, dtype=torch.float32)
        measured = total if measure else 0
        alpha, agree = values.new_empty(measured), values.new_empty(measured, dtype=torch.bool)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(master) if ctx.needs_input_grad[1] else None
        for start in range(0, total, chunk):
            part = slice(start, min(start + chunk, total))
            at = index[part]
            z = F.linear(hidden[part], weight).float()
            log_z = z.logsumexp(-1)
            q = torch.exp(z - log_z.unsqueeze(1))
            p, entropy, kept_log_z = rows.kept(at)
            log_p = lambda at=at, lse=kept_log_z: rows.logits(at) - lse.unsqueeze(1)  # noqa: E731
            values[part], grad = divergence(Rows(p, entropy, z, q, log_z, log_p))
            if measure:
                # The kept set's share of the full distribution turns p (renormalised) back into the full p.
                share = (kept_log_z - rows.log_z[at]).exp()
                alpha[part] = torch.minimum(p.mul_(share.unsqueeze(1)), q).sum(-1)
                agree[part] = z.argmax(-1) == rows.argmax[at]
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
        grads = [None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors]
        return (*grads, None, None, None, None, None, None)


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    rows: TargetRows | StoredTopK,
    index: Tensor,
    row_weight: Tensor,
    loss: str = "kl",
    chunk: int = 256,
    measure: bool = True,
) -> DivergenceOutput:
    """Divergence between drafter rows softmax(hidden weight^T) and the target rows they are aligned with.

    Args:
        hidden: [t, h] drafter states, `weight`: [d, h] drafter head; gradients flow into both.
        rows: the target's distributions; `index`: [t] int64, the target row of each drafter row.
        row_weight: [t] float32 factor of each token in the loss (mask, depth decay, 1 / global count).
        loss: a name in DIVERGENCES.
        chunk: rows at a time; memory is a few [chunk, d] float32 matrices.
        measure: also compute alpha and agree, at about a tenth of the cost.

    Returns:
        The weighted sum and per-token values.
    """
    total, values, alpha, agree = _LinearDivergence.apply(
        hidden, weight, rows, index, row_weight, DIVERGENCES[loss], chunk, measure
    )
    return DivergenceOutput(total, values, alpha, agree) if measure else DivergenceOutput(total, values)
