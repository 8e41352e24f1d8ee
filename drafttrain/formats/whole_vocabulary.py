"""Head rows for engines that know no table of kept tokens: a row for every token of the target's vocabulary."""

from __future__ import annotations

from torch import Tensor


def whole_rows(head: Tensor, kept_ids: Tensor, vocab_size: int) -> Tensor:
    """[d, w] head rows of the kept tokens -> [vocab_size, w].

    Tokens that the drafter does not keep get the mean of the kept tokens' rows: their logit is the mean logit, which is never
    the highest, so engines that take the likeliest token draft what we draft.
    """
    rows = head.mean(0).expand(vocab_size, -1).clone()  # [v, w]
    rows[kept_ids] = head
    return rows
