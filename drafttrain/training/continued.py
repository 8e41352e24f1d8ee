"""Training that goes on whenever new rows have come in, as `adapt` and `follow` do.

    order    batches of rows of similar length; the caller orders them
    rate     rises over the optimizer's first steps; within a call, falls to a tenth by its end
    step     `take_steps` of loop.py, the one loop

The optimizer stays between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from drafttrain.batch import Batch
from drafttrain.data.loader import collate
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.registry import drafter_folder, kind_class, kind_of
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.losses import parse_loss
from drafttrain.states.served import Served
from drafttrain.states.source import TargetSource
from drafttrain.target import Target
from drafttrain.target.devices import has_bfloat16
from drafttrain.training.loop import Learner, Taken, take_steps
from drafttrain.training.step import count_anchors, step_inputs

STEP_TOKENS = 512  # of a training step
_CACHE_BYTES = 1e9  # of the target's states, which later passes read again
_FORWARD_ROWS = 8  # conversations per forward of the target; on a CPU a few are faster than one
_WARM_UP = 4  # steps
_MAX_NORM = 0.5  # of a gradient; longer ones are clipped


class ContinuedTraining:
    """A drafter that learns on, and its optimizer.

    Args:
        rate: learning rate.

    Attributes:
        warm: steps of the optimizer so far, up to the end of its warm-up.
    """

    def __init__(self, drafter: TrainableDrafter, rate: float):
        self.drafter = drafter
        self.rate = rate
        self.warm = 0
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(),
            # `_paced` sets the rate before each step.
            lr=0.0,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )

    def train(
        self,
        order: Sequence[list[Json]],
        source: TargetSource,
        spent: Callable[[], float] = lambda: 0.0,
    ) -> list[Taken]:
        """Takes a step for each batch of rows.

        Args:
            source: of the target's states.
            spent: share of the call's time that is spent; no step begins at 1.

        Returns:
            The steps that were taken.
        """
        learner: Learner[list[Json]] = Learner(
            model=self.drafter,
            optimizer=self.optimizer,
            loss=lambda batch: self._loss(batch, source),
            max_norm=_MAX_NORM,
            check=self._check_norm,
        )
        return list(take_steps(learner, self._paced(order, spent)))

    def _paced(
        self,
        order: Sequence[list[Json]],
        spent: Callable[[], float],
    ) -> Iterator[list[list[Json]]]:
        """A batch for each step, with its learning rate set, while time is left.

        The rate falls by the end of the order or of the time, whichever comes first.
        """
        for steps, batch in enumerate(order):
            done = max(steps / len(order), spent())
            if done >= 1:
                return
            # Counted over calls, as the optimizer is kept.
            self.warm = min(self.warm + 1, _WARM_UP)
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * self.warm / _WARM_UP * (1 - 0.9 * done)
            yield [batch]

    def _loss(self, batch: list[Json], source: TargetSource) -> Tensor:
        target = source.target
        device = target.device
        inputs = {key: value.to(device) for key, value in collate(batch).items()}
        given = step_inputs(
            Batch.of(inputs),
            target,
            source,
            total=count_anchors(inputs),
            measure=False,
        )
        half = has_bfloat16()
        if device.type == "cpu":
            half = target.dtype == torch.bfloat16
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            return self.drafter(inputs=given).loss

    def _check_norm(self, norm: Tensor) -> None:
        if not torch.isfinite(norm):
            raise UserError(
                f"grad_norm={float(norm)} is not finite; lower the learning rate ({self.rate})"
            )


def continued(target: Target, name: str) -> TrainableDrafter:
    """A trained drafter to be trained further for a target, as it was; see `Drafter.begin`."""
    kind = kind_class(kind_of(name))
    folder = drafter_folder(name)
    saved = kind.saved_config(folder)  # type: ignore[attr-defined]  # of kinds with weights
    options = {key: getattr(saved, key) for key in saved.recipe_keys}
    loss = options.pop("loss")
    drafter: TrainableDrafter = kind.begin(target, name, options, loss)  # type: ignore[assignment]
    return drafter.to(target.device)  # type: ignore[arg-type]


def source_of(
    target: Target,
    drafter: TrainableDrafter,
    urls: Sequence[str],
    states_dir: str = "",
) -> TargetSource:
    """The target's states for a drafter, from itself or from proven servers of states.

    Raises:
        UserError: no server there, or it serves another target.
    """
    # Without servers, the target runs here.
    served = None
    if urls:
        served = Served(urls, target, drafter.feature_layers, states_dir, torch.bfloat16)
        served.prove()
    source = TargetSource(
        target,
        drafter.feature_layers,
        drafter.kept_ids,
        served,
        limit_bytes=_CACHE_BYTES,
        temperatures=parse_loss(drafter.config.loss).temperatures,
    )
    source.online.together = _FORWARD_ROWS
    return source
