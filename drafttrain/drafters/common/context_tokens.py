"""Tokens of a sequence's prompt and answer that join its drafter's vocabulary.

    drafter id    0 ... d-1                          d ... d+m-1
    target id     kept_ids, chosen in training       tokens of the text that are not kept, the m most recent ones
    logit         head(read)                         (scale * W[token] + shift) . read        W: the target's head

Texts repeat their rare words, which a small vocabulary lacks. A head that began as the target's
rows reads the same states as those, so the target's other rows score other tokens. Training moves
all kept rows in much the same way; least squares over them gives scale and shift. A head that is no
such image of the target's gets no further tokens.

Only the drafter's distribution changes: q of sampled trees is the one that their tokens were drawn
from.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.target import Target

# Share of the kept rows' variance that the target's rows must explain: a trained head has 0.99, an
# unrelated one 0.
_RELATED = 0.5


class ContextVocabulary:
    """A drafter's side of `ContextTokens`: which tokens it kept, and head rows of the others.

    Args:
        target: of the drafter. kept_ids: [d]. limit: most further tokens of a sequence.
    """

    def __init__(self, target: Target, kept_ids: Tensor, limit: int):
        self.target = target
        self.kept_ids = kept_ids
        self.limit = limit
        # Address and version of the fitted weights, and their scale and shift [h] if they are related.
        self._fit: tuple[tuple[int, int] | None, tuple[float, Tensor] | None] = (None, None)

    def open(self, head: Tensor) -> ContextTokens:
        """The tokens of a new sequence, none yet.

        Args:
            head: [d, h] the drafter's head, as it is now.

        Raises:
            UserError: no further tokens are possible, or the drafter is not on a CPU.
        """
        # On a GPU, captured drafts have fixed shapes, and reading the tokens would wait for it.
        if not head.is_cpu:
            raise UserError(
                f"extra_vocab_size={self.limit}: tokens of the text join on CPUs only; set 0"
            )
        reason = self.reason(head)
        if reason:
            raise UserError(f"extra_vocab_size={self.limit}: {reason}; set 0")
        return ContextTokens(self)

    @cached_property
    def own(self) -> list[int]:
        """[v] drafter id of each target id, -1 for those that are not kept."""
        own = torch.full((self.target.vocab_size,), -1)
        own[self.kept_ids] = torch.arange(len(self.kept_ids))
        return own.tolist()

    @torch.no_grad()
    def reason(self, head: Tensor) -> str:
        """Why no further tokens can be drafted; empty if they can."""
        theirs = self.target.head_weight  # [v, h]
        if len(self.kept_ids) == self.target.vocab_size:
            return "the drafter keeps the whole vocabulary"
        if self.target.head_bias is not None or theirs.shape[1] != head.shape[1]:
            return "the target's head has a bias or another width"
        state = (head.data_ptr(), head._version)
        known, fit = self._fit
        if known != state:
            fit = _fit(theirs.detach()[self.kept_ids].float(), head.float())
            self._fit = (state, fit)  # at once, as other threads may read it
        if fit is None:
            return "the drafter's head did not begin as the target's"
        return ""

    @torch.no_grad()
    def rows(self, tokens: list[int]) -> Tensor:
        """Head rows [m, h] float32 of tokens that are not kept."""
        _, fit = self._fit
        assert fit is not None, "`open` comes first"
        scale, shift = fit
        return torch.add(shift, self.target.head_weight.detach()[tokens].float(), alpha=scale)


def _fit(theirs: Tensor, ours: Tensor) -> tuple[float, Tensor] | None:
    """Scale and shift [h] from the target's rows [d, h] to the drafter's.

    None if they explain too little of the drafter's rows.
    """
    their_mean = theirs.mean(0)  # [h]
    our_mean = ours.mean(0)
    theirs = theirs - their_mean
    ours = ours - our_mean
    scale = float((theirs * ours).sum() / theirs.square().sum().clamp_min(1e-9))  # least squares
    left = float((ours - scale * theirs).square().sum())
    if left > (1 - _RELATED) * float(ours.square().sum()):
        return None
    return scale, our_mean - scale * their_mean


class ContextTokens:
    """The tokens of a sequence that have joined; false as long as there are none.

    Attributes:
        ids: [d + m] int64, target id of each drafter id. A tree keeps the tensor it was drafted
            with; `read` makes a new one.
    """

    def __init__(self, source: ContextVocabulary):
        self.source = source
        self.limit = source.limit
        self.ids = source.kept_ids
        # Place of each joined token among the m, the least recent token first.
        self._places: dict[int, int] = {}
        self._rows = torch.empty(0)  # [limit, h], the first m are used

    def __len__(self) -> int:
        return len(self._places)

    def read(self, tokens: Iterable[int]) -> None:
        """Notes tokens of the text; beyond the limit, new ones replace the least recent."""
        own = self.source.own
        places = self._places
        kept = len(self.source.kept_ids)
        new: dict[int, int] = {}  # place -> token
        for token in tokens:
            if own[token] >= 0:
                continue
            # A dict keeps the order of insertion: a token that occurs again moves to its end.
            place = places.pop(token, -1)
            if place < 0:
                if len(places) < self.limit:
                    place = len(places)
                else:
                    place = places.pop(next(iter(places)))  # of the least recent one
                new[place] = token
            places[token] = place
        if not new:
            return

        at = torch.tensor(list(new))  # [n] int64 places
        rows = self.source.rows(list(new.values()))  # [n, h]
        if not len(self._rows):
            self._rows = rows.new_empty(self.limit, rows.shape[1])
        self._rows[at] = rows

        # A new tensor: trees keep the one that they were drafted with.
        ids = self.ids.new_empty(kept + len(places))
        ids[: len(self.ids)] = self.ids
        ids[kept + at] = torch.tensor(list(new.values()))
        self.ids = ids

    def shape(self, logits: Tensor, reads: Tensor) -> Tensor:
        """Logits [n, d] of the kept tokens and inputs [n, h] of the head -> [n, d + m]."""
        more = F.linear(reads.to(self._rows.dtype), self._rows[: len(self)])  # [n, m]
        return torch.cat((logits, more.to(logits.dtype)), dim=1)
