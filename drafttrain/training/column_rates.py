"""Learning rates by column of a weight, for a weight whose inputs differ in size by orders of
magnitude.

Adam moves every weight by about the learning rate, so an input of size s moves the output by s
times that. Some dimensions of a target's states are a hundred times larger than others: at rates
that let the small ones learn, steps along the large ones throw the output about. With `rates` 1 / s
every input counts as one of size 1, as if it were normed, and the trained weight stays what engines
load.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

_KEY = "column_rates"  # of the weight's parameter group, which checkpoints save and restore


def set_column_rates(optimizer: Optimizer, weight: Tensor, rates: Tensor) -> None:
    """Multiplies every step of a weight [o, i] by `rates` [i], which move to a parameter group of
    its own.

    DeepSpeed replaces the weight of that group by the flat part of it that this process steps.
    """
    # A copy of the list, to which the loop adds a group.
    for group in list(optimizer.param_groups):
        others = [other for other in group["params"] if other is not weight]
        if len(others) < len(group["params"]):
            group["params"] = others
            optimizer.add_param_group({**group, "params": [weight], _KEY: rates.to(weight)})
    before: list[Tensor] = []

    def stepped() -> Iterator[tuple[Tensor, Tensor]]:
        """What this step changes of the weight, and the rates of its numbers."""
        for group in optimizer.param_groups:  # a resumed run has loaded the saved rates
            if _KEY in group:
                for part in group["params"]:
                    yield part, _rates_of(part, group[_KEY])

    def keep(*_: object) -> None:
        before[:] = [part.detach().clone() for part, _ in stepped()]

    @torch.no_grad()
    def rescale(*_: object) -> None:
        for old, (part, own) in zip(before, stepped(), strict=True):
            # old + rate * (new - old): the optimizer's step, scaled by column.
            part.copy_(torch.lerp(old, part, own))

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(rescale)


def _rates_of(part: Tensor, rates: Tensor) -> Tensor:
    """The rates [i] by number of a part: of the weight [o, i], or of a flat share of it [n]."""
    rates = rates.to(part)
    if part.dim() == 2:
        return rates.expand_as(part)
    # Every process has as many numbers of the flattened weight, the last one with padding.
    rank = 0
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
    places = torch.arange(len(part), device=part.device) + rank * len(part)
    # The flat weight runs row by row, so the columns repeat.
    return rates[places % len(rates)]
