"""The target's distributions as its likeliest k tokens, for features that were stored without the states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.losses.divergence import dot

# Stands for the log-probability of tokens that are not among the k: nothing, but finite, as 0 * -inf is no number.
_NOTHING = -50.0


@dataclass
class StoredTopK:
    """Likeliest k tokens of r rows; p is renormalised on those of them that the drafter can say.

    Attributes:
        ids: [r, k] int64 drafter ids, -1 for tokens that the drafter lacks. log_p: [r, k] their log-probabilities.
        rest: [r] mass of all other tokens, 0 to 1.
        argmax: [r] int64 drafter id of the target's likeliest token, -1 where the drafter's vocabulary lacks it.
        width: d, the drafter's vocabulary.
    """

    ids: Tensor
    log_p: Tensor
    rest: Tensor
    argmax: Tensor
    width: int

    @property
    def log_z(self) -> Tensor:
        """[r] zeros: what is stored is normalised over the full vocabulary."""
        return torch.zeros_like(self.rest)

    def logits(self, index: Tensor | slice) -> Tensor:
        """Float32 log-probabilities [c, d] over the kept vocabulary."""
        ids, log_p = self.ids[index], self.log_p[index].float()
        # One more column takes the tokens that the drafter lacks.
        out = log_p.new_full((len(ids), self.width + 1), _NOTHING)
        return out.scatter_(1, torch.where(ids < 0, self.width, ids), log_p)[:, : self.width].contiguous()

    def kept(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """index [c] -> p [c, d], its entropy [c], and log of the mass of the stored tokens that the drafter has [c]."""
        logits = self.logits(index)
        log_z = logits.logsumexp(-1)
        p = torch.exp(logits - log_z.unsqueeze(1))
        return p, log_z - dot(p, logits), log_z
