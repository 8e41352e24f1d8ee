"""Stored target distributions: as logits, or as the likeliest k tokens and the mass of the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.losses.divergence import AlignedRows, FullTargets, Kept, Targets, wide
from drafttrain.losses.spec import Loss

# Replaces a forbidden token's -inf logit: -inf times a probability of zero would be nan.
LOWEST = -1e4


@dataclass
class StoredLogits(FullTargets):
    """Target distributions as stored logits; the other fields are those of `TargetRows`."""

    stored: Tensor  # [r, d] logits over the kept vocabulary, any float dtype
    log_z: Tensor
    argmax: Tensor
    sampled: Tensor | None = None
    log_z_at: dict[float, Tensor] = field(default_factory=dict)

    def logits(
        self,
        index: Tensor | slice,
        aligned: AlignedRows | None = None,
    ) -> Tensor:
        return wide(self.stored[index]).clamp(min=LOWEST)

    def kernel_logits(self, index: Tensor, z: Tensor) -> Tensor:
        return self.stored[index]


@dataclass
class StoredTopK(Targets):
    """Target distributions as the likeliest k tokens and the mass of the rest.

    The rest is one outcome: divergences are computed over the k tokens and "any other token", for p
    and for q. That is a lower bound, tight where the drafter spreads the rest as the target does.
    (The code gives the rest to the other kept tokens in proportion to q, which yields the same
    values and gradients for all losses here.) With a pruned vocabulary the rest counts as kept.
    """

    ids: Tensor  # [r, k] int64 drafter ids, -1 for tokens that the drafter lacks
    log_p: Tensor  # [r, k] their log-probabilities
    rest: Tensor  # [r] mass of all other tokens, 0 to 1
    argmax: Tensor
    sampled: Tensor | None = None

    @classmethod
    def of_tokens(cls, tokens: Tensor, width: int) -> StoredTopK:
        """All mass on one token per row.

        Args:
            tokens: [r] int64; the drafter lacks ids from `width` on.
        """
        ids = torch.where(tokens < width, tokens, -1)
        certain = torch.zeros(len(ids), 1, device=ids.device)  # [r, 1] log 1
        return cls(ids.unsqueeze(1), certain, certain[:, 0], ids, ids)

    def check(self, loss: Loss) -> None:
        for term in loss.terms:
            if term.temperature != 1 and term.name != "ce":  # which reads no distribution
                raise UserError(
                    f"temperature @{term.temperature:g} cannot be applied to stored top-k: the rest's shape is unknown; "
                    "store states or logits, or use @1"
                )

    def logits(
        self,
        index: Tensor | slice,
        aligned: AlignedRows | None = None,
    ) -> Tensor:
        assert aligned is not None, "the spread of the rest depends on the drafter"
        ids = self.ids[index]  # [c, k]
        log_q = aligned.log_q()  # [c, d]
        row, rank = (ids >= 0).nonzero(as_tuple=True)  # [n] each
        known = row, ids[row, rank]
        others = log_q.index_put(known, log_q.new_tensor(float("-inf")))  # [c, d]
        tail = others.logsumexp(-1)  # [c] log of q's mass off the k tokens
        rest = self.rest[index].to(log_q.dtype).clamp(min=1e-9).log()  # [c]
        # The rest keeps the drafter's own proportions, at the target's mass.
        # A drafter whose every token is among the k has no tail to hold the rest.
        log_q += (rest - tail).nan_to_num(posinf=0.0).unsqueeze(1)
        log_q[known] = self.log_p[index][row, rank].to(log_q.dtype)
        return log_q

    def full_log_z(self, index: Tensor, temperature: float) -> Tensor:
        return torch.zeros_like(self.rest[index])

    def kept(
        self,
        index: Tensor,
        temperature: float = 1.0,
        aligned: AlignedRows | None = None,
    ) -> Kept:
        # It depends on the drafter, so it is not shared.
        return self._distribution(index, temperature, aligned)
