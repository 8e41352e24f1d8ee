"""Forms: which tensor of a file is which of a drafter's, and how the values change on the way.

A kind writes one form per engine. It fills an export, says which tensors an engine's loader
expects, and reads an export or a published checkpoint back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from drafttrain.errors import UserError

Turn = Callable[[Tensor], Tensor]


def unchanged(values: Tensor) -> Tensor:
    return values


class Weight(NamedTuple):
    """A tensor of a file that holds one of the drafter's.

    Attributes:
        ours: the drafter's name of it.
        there: the file's values, from ours.
        back: ours, from the file's; None for a tensor that follows from others and is only written.
    """

    ours: str
    there: Turn = unchanged
    back: Turn | None = unchanged


# By the file's names. A plain tensor stands for values that engines need and the drafter lacks.
Form = dict[str, Weight | Tensor]


def fill(form: Form, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of a file, from a drafter's state dict."""
    made = {}
    for name, weight in form.items():
        if isinstance(weight, Weight):
            made[name] = weight.there(state[weight.ours])
        else:
            made[name] = weight
    return made


def read_form(form: Form, found: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """A drafter's tensors, from those of a file.

    Args:
        where: names the file in errors.

    Raises:
        UserError: copies that differ, or other values where the form fixes them.
    """
    state: dict[str, Tensor] = {}
    for name, weight in form.items():
        if not isinstance(weight, Weight):
            check_fixed(name, found[name], weight, where)
            continue
        if weight.back is None:
            continue
        values = weight.back(found[name])
        if weight.ours in state and not torch.equal(state[weight.ours], values):
            raise UserError(
                f"{where} computes something else: {name} differs from the copy that shares it"
            )
        state[weight.ours] = values
    return state


def check_fixed(name: str, values: Tensor, fixed: Tensor, where: str) -> None:
    """Raises UserError if a file's tensor has other values than those that its form fixes."""
    if torch.equal(values, fixed.to(values)):
        return
    rule = "the target's"
    if not fixed.any():
        rule = "zero"
    raise UserError(f"{where} computes something else: {name} is not {rule}; export again")


def whole_rows(head: Tensor, kept_ids: Tensor, vocab_size: int) -> Tensor:
    """[d, w] head rows of the kept tokens -> [vocab_size, w], for engines without kept tokens.

    Tokens that the drafter does not keep get the mean of the kept tokens' rows: their logit is the
    mean logit, which is never the highest, so engines that take the likeliest token draft what we
    draft.
    """
    rows = head.mean(0).expand(vocab_size, -1).clone()  # [v, w]
    rows[kept_ids] = head
    return rows


def head_weight(ours: str, kept_ids: Tensor, vocab_size: int) -> Weight:
    """Head rows of the kept tokens, in a file that has a row for each of the target's."""
    return Weight(
        ours,
        there=lambda head: whole_rows(head, kept_ids, vocab_size),
        back=lambda rows: rows[kept_ids],
    )


def kept_tables(kept: int, vocab_size: int, mask: bool = True) -> Form:
    """The kept ids as EAGLE-3's forms hold them; nothing where the whole vocabulary is kept.

    d2t [d] int64 is target id minus drafter id; t2d [v] bool says which ids are kept.

    Args:
        kept: their number. mask: the form has t2d too.
    """
    if kept == vocab_size:
        return {}

    def shift(kept_ids: Tensor) -> Tensor:
        return kept_ids - torch.arange(kept, device=kept_ids.device)

    def are_kept(kept_ids: Tensor) -> Tensor:
        none = torch.zeros(vocab_size, dtype=torch.bool, device=kept_ids.device)
        return none.index_fill(0, kept_ids, True)

    form: Form = {"d2t": Weight("kept_ids", there=shift, back=lambda d2t: d2t + torch.arange(kept))}
    if mask:
        form["t2d"] = Weight("kept_ids", there=are_kept, back=None)
    return form
