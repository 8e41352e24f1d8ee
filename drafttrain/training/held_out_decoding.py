"""Decoding of held-out prompts during training, by which the best checkpoint is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import TrainerControl, TrainerState

from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.target import Target
from drafttrain.training.limits import max_over_ranks


def gather_drafter(
    drafter: TrainableDrafter,
    target: Target,
    wanted: bool,
) -> TrainableDrafter | None:
    """The drafter with all of its weights on one process: itself, or a copy if ZeRO-3 shards them
    (None unless wanted).

    Every process must call this, since each contributes its shards.
    """
    shards = list(drafter.parameters())
    # DeepSpeed marks the weights that it shards.
    if not any(hasattr(parameter, "ds_id") for parameter in shards):
        return drafter
    import deepspeed

    with deepspeed.zero.GatheredParameters(shards):
        if not wanted:
            return None
        copy = drafter.blank()
        copy.to(shards[0].device, shards[0].dtype)  # type: ignore[arg-type]
        copy.load_state_dict(drafter.plain_state())
    copy.bind(target)
    return copy


@dataclass
class DecodeHeldOut:
    """Decodes held-out prompts with the drafter and logs the acceptance.

    One process decodes, the others wait.

    Attributes:
        every: steps between measurements; 0 decodes with every checkpoint. The last step always
            decodes.
        decode: drafter -> figures by name, `accepted_length` among them.
    """

    drafter: TrainableDrafter
    target: Target
    every: int
    decode: Callable[[TrainableDrafter], dict[str, float]]

    def due(self, step: int, control: TrainerControl) -> bool:
        """Whether prompts are decoded after this step."""
        if control.should_training_stop:
            return True
        if self.every:
            return step % self.every == 0
        return control.should_save

    def measure(
        self,
        state: TrainerState,
        control: TrainerControl,
        log: Callable[[dict[str, float]], None],
    ) -> None:
        """Decodes, logs, and asks for a checkpoint if no earlier step was better.

        All processes call it.
        """
        first = state.is_world_process_zero
        drafter = gather_drafter(self.drafter, self.target, first)
        length = 0.0
        if first and drafter is not None:
            figures = self.decode(drafter.eval())
            self.target.release_steps()  # training needs the memory
            length = figures["accepted_length"]
            log({f"eval_decode_{name}": round(value, 4) for name, value in figures.items()})
        self.drafter.train()

        # Only the first process has decoded; the others learn its length here.
        length = max_over_ranks(length, self.target.device)
        # A few prompts are a coarse measure: of equal checkpoints the later one is kept.
        if state.best_metric is None or length >= state.best_metric:
            state.best_metric = length
            state.best_global_step = state.global_step
            control.should_save = True
