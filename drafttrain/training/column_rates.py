"""Learning rates by column of a weight, for a weight whose inputs differ in size by orders of
magnitude.

Adam moves every weight by about the learning rate, so an input of size s moves the output by s
times that. Some dimensions of a target's states are a hundred times larger than others: at rates
that let the small ones learn, steps along the large ones throw the output about. With `rates` 1 / s
every input counts as one of size 1, as if it were normed, and the trained weight stays what engines
load.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

_KEY = "column_rates"  # of the weight's parameter group, which checkpoints save and restore


def set_column_rates(optimizer: Optimizer, weight: Tensor, rates: Tensor) -> None:
    """Multiplies every step of a weight [o, i] by `rates` [i], which move to a parameter group of
    its own.
    """
    for group in list(optimizer.param_groups):
        others = [other for other in group["params"] if other is not weight]
        if len(others) < len(group["params"]):
            group["params"] = others
            optimizer.add_param_group({**group, "params": [weight], _KEY: rates.to(weight)})
    before: list[Tensor] = []

    def keep(*_: object) -> None:
        before[:] = [weight.detach().clone()]

    def rescale(*_: object) -> None:
        held = next(
            group[_KEY] for group in optimizer.param_groups if _KEY in group
        )  # a resumed run loads the saved ones
        with torch.no_grad():
            weight.copy_(torch.lerp(before.pop(), weight, held.expand_as(weight)))

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(rescale)
