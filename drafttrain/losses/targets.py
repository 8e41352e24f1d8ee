"""The target's next-token distributions at r positions, in the forms they come in: states, stored logits, stored top-k.

All forms answer the same questions for rows picked by `index` [c]. What is said about a row stands on the target's full
vocabulary (log_z, argmax), whatever the drafter can say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.losses.divergence import Rows, dot

# Target distributions up to this size are computed once per batch and shared by all depths; larger ones once per use.
_SHARED_BYTES = 256e6
# Stands for a forbidden token's -inf, which times a probability of zero would be nan.
LOWEST = -1e4
Kept = tuple[Tensor, Tensor, Tensor]


def wide(x: Tensor) -> Tensor:
    """At least float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Targets:
    """What every form knows.

    Attributes:
        argmax: [r] int64 drafter id of the target's likeliest token, -1 where the drafter's vocabulary lacks it.
        sampled: [r] int64 drafter id of the token that follows in the data, -1 likewise; None where `ce` is not used.
    """

    argmax: Tensor
    sampled: Tensor | None
    _shared: dict[float, Kept]

    @property
    def rows(self) -> int:
        return len(self.argmax)

    @property
    def shareable(self) -> int:
        """Columns d, if p does not depend on the drafter's row; else 0."""
        return 0

    def logits(self, index: Tensor | slice, rows: Rows | None = None) -> Tensor:
        """[c, d] logits over the kept vocabulary, before any temperature; float32 or wider.

        Args:
            rows: the aligned drafter rows, which `StoredTopK` needs.
        """
        raise NotImplementedError

    def kernel_logits(self, index: Tensor, z: Tensor) -> Tensor:
        """`logits` in whatever float dtype costs least; z: [c, d] raw products of the aligned drafter rows."""
        return self.logits(index, Rows(wide(z), self, index, 1.0))

    def full_log_z(self, index: Tensor, temperature: float) -> Tensor:
        """[c] log of the softmax denominator of `logits` / temperature over the full vocabulary."""
        raise NotImplementedError

    def sampled_at(self, index: Tensor) -> Tensor:
        """[c] int64.

        Raises:
            UserError: nobody said which tokens follow.
        """
        if self.sampled is None:
            raise UserError(
                "loss 'ce' needs the ids of the data's next tokens (TargetRows.sampled); use kl or give them"
            )
        return self.sampled[index]

    def kept(self, index: Tensor, temperature: float = 1.0, rows: Rows | None = None) -> Kept:
        """index [c] -> p [c, d] renormalised on the kept tokens, its entropy [c], and log of its denominator [c]."""
        width = self.shareable
        if not 0 < 4 * self.rows * width <= _SHARED_BYTES:
            return self._distribution(index, temperature, rows)
        if temperature not in self._shared:
            whole: Kept | None = None
            for start in range(0, self.rows, 256):
                part = self._distribution(slice(start, start + 256), temperature, None)
                if whole is None:
                    p, entropy, log_z = part
                    whole = p.new_empty(self.rows, width), p.new_empty(self.rows), p.new_empty(self.rows)
                for place, values in zip(whole, part, strict=True):
                    place[start : start + 256] = values
            assert whole is not None
            self._shared[temperature] = whole
        p, entropy, log_z = self._shared[temperature]
        return p[index], entropy[index], log_z[index]

    def _distribution(self, index: Tensor | slice, temperature: float, rows: Rows | None) -> Kept:
        logits = self.logits(index, rows)
        if temperature != 1:
            logits = logits / temperature
        log_z = logits.logsumexp(-1)
        p = (logits - log_z.unsqueeze(1)).exp_()
        return p, log_z - dot(p, logits), log_z


class _Full(Targets):
    """Forms with logits whose full denominator was computed beside them, at temperature 1 and where a loss needs another."""

    log_z: Tensor
    log_z_at: dict[float, Tensor]

    def full_log_z(self, index: Tensor, temperature: float) -> Tensor:
        if temperature != 1 and temperature not in self.log_z_at:
            raise UserError(
                f"temperature @{temperature:g}: the loss reads the target's full distribution there, but log_z_at has "
                f"{sorted(self.log_z_at) or 'none'}; compute it for {temperature:g}"
            )
        return (self.log_z if temperature == 1 else self.log_z_at[temperature])[index]


@dataclass
class TargetRows(_Full):
    """As the states that produce them.

    Attributes:
        hidden: [r, h] states that the target's head reads.
        weight: [d, h] the head's rows for the kept (drafter) vocabulary.
        log_z: [r] float32 log of the softmax denominator over the *full* vocabulary: acceptance is measured with the
            target's full distribution, whatever the drafter can say.
        argmax, sampled: see `Targets`.
        shape: what the target does to the products (bias, scale, soft cap); None if nothing.
        log_z_at: temperature -> [r], log_z of logits / temperature.
    """

    hidden: Tensor
    weight: Tensor
    log_z: Tensor
    argmax: Tensor
    shape: Callable[[Tensor], Tensor] | None = None
    sampled: Tensor | None = None
    log_z_at: dict[float, Tensor] = field(default_factory=dict)
    _shared: dict[float, Kept] = field(default_factory=dict, init=False, repr=False)

    @property
    def shareable(self) -> int:
        return len(self.weight)

    def products(self, index: Tensor | slice) -> Tensor:
        """[c, d] hidden times head in the head's dtype, before `shape`."""
        return F.linear(self.hidden[index].to(self.weight.dtype), self.weight)

    def logits(self, index: Tensor | slice, rows: Rows | None = None) -> Tensor:
        logits = wide(self.products(index))
        return logits if self.shape is None else self.shape(logits)

    def kernel_logits(self, index: Tensor, z: Tensor) -> Tensor:
        return self.products(index) if self.shape is None else self.logits(index)


@dataclass
class StoredLogits(_Full):
    """As logits that were written down.

    Attributes:
        stored: [r, d] logits over the kept vocabulary, any float dtype.
        log_z, argmax, sampled, log_z_at: as for `TargetRows`.
    """

    stored: Tensor
    log_z: Tensor
    argmax: Tensor
    sampled: Tensor | None = None
    log_z_at: dict[float, Tensor] = field(default_factory=dict)
    _shared: dict[float, Kept] = field(default_factory=dict, init=False, repr=False)

    @property
    def shareable(self) -> int:
        return self.stored.shape[1]

    def logits(self, index: Tensor | slice, rows: Rows | None = None) -> Tensor:
        return wide(self.stored[index]).clamp(min=LOWEST)

    def kernel_logits(self, index: Tensor, z: Tensor) -> Tensor:
        return self.stored[index]


@dataclass
class StoredTopK(Targets):
    """As the likeliest k tokens and the mass of the rest.

    The rest is one outcome: divergences are those of the k tokens and "another one", for p and for q, a lower bound that is
    tight where the drafter spreads the rest as the target does. (Giving the rest to the other kept tokens in proportion to q
    yields the same values and gradients for all our losses, and is how it is done.) With a pruned vocabulary the rest counts
    as sayable.

    Attributes:
        ids: [r, k] int64 drafter ids, -1 for tokens that the drafter lacks. log_p: [r, k] their log-probabilities.
        rest: [r] mass of all other tokens, 0 to 1.
        argmax, sampled: see `Targets`.
    """

    ids: Tensor
    log_p: Tensor
    rest: Tensor
    argmax: Tensor
    sampled: Tensor | None = None

    def logits(self, index: Tensor | slice, rows: Rows | None = None) -> Tensor:
        assert rows is not None, "how the rest is spread depends on the drafter"
        ids, log_q = self.ids[index], rows.log_q()
        at, rank = (ids >= 0).nonzero(as_tuple=True)
        known = at, ids[at, rank]
        tail = log_q.index_put(known, log_q.new_tensor(float("-inf"))).logsumexp(-1)
        rest = self.rest[index].to(log_q.dtype).clamp(min=1e-9).log()
        # A drafter whose every token is among the k has no tail to hold the rest.
        log_q += (rest - tail).nan_to_num(posinf=0.0).unsqueeze(1)
        log_q[known] = self.log_p[index][at, rank].to(log_q.dtype)
        return log_q

    def full_log_z(self, index: Tensor, temperature: float) -> Tensor:
        return torch.zeros_like(self.rest[index])

    def kept(self, index: Tensor, temperature: float = 1.0, rows: Rows | None = None) -> Kept:
        if temperature != 1:
            raise UserError(
                f"temperature @{temperature:g} cannot be applied to stored top-k: the rest's shape is unknown; store states "
                "or logits, or use @1"
            )
        return super().kept(index, temperature, rows)
