"""Callbacks between steps: progress lines, the time budget, stopping on SIGTERM, and decoding
held-out prompts.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.files import Json
from drafttrain.target import Target

if TYPE_CHECKING:
    from drafttrain.training.step import StepTrainer


def max_over_ranks(value: float, device: torch.device) -> float:
    """The largest value of all processes. Ranks that decide by different values would wait for each
    other forever.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return value
    shared = torch.tensor(value, dtype=torch.float32, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.item()


class TimeBudget(TrainerCallback, ExportableState):
    """Ends training after a number of minutes, or earlier by max_steps; decays the learning rate to
    a twentieth by then.

    The time used is part of the checkpoint, so a resumed run gets the rest only.
    """

    clock = staticmethod(time.perf_counter)  # seconds; tests replace it

    def __init__(self, minutes: float, used: float = 0.0):
        # used: seconds
        self.minutes = minutes
        self.used = used

    @staticmethod
    def after(minutes: float, checkpoint: str | None) -> TimeBudget:
        """The budget that a checkpoint has left; all of it without a checkpoint."""
        if checkpoint is None:
            return TimeBudget(minutes)
        kept = (
            TrainerState.load_from_json(
                os.path.join(checkpoint, "trainer_state.json")
            ).stateful_callbacks
            or {}
        )
        state: Json = kept.get("TimeBudget", {})  # type: ignore[assignment]
        return TimeBudget(minutes, state.get("attributes", {}).get("used", 0.0))

    @property
    def done(self) -> float:
        """Share of the budget that is used, 0 to 1."""
        return min(1.0, self.used / (60 * self.minutes))

    def factor(self) -> float:
        """Factor of the learning rate: constant for the first third, then linear to a twentieth."""
        return min(1.0, max(0.05, 1.5 * (1 - self.done)))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_
    ) -> None:
        self._last = self.clock()
        # the recipe's own limit, which holds too
        if args.max_steps > 0:
            self._most = args.max_steps
        else:
            self._most = 10**9

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_
    ) -> None:
        now = self.clock()
        self.used = max_over_ranks(self.used + now - self._last, args.device)
        self._last = now
        by_time = max(state.global_step + 1, round(state.global_step / max(self.done, 1e-6)))
        state.max_steps = min(by_time, self._most)
        if self.done >= 1.0 or state.global_step >= self._most:
            state.max_steps = state.global_step
            control.should_training_stop = control.should_save = True

    def state(self) -> Json:
        return {"args": {"minutes": self.minutes}, "attributes": {"used": self.used}}


class SaveOnTerm(TrainerCallback):
    """SIGTERM (a scheduler taking the machine back) or Ctrl-C ends training after the current step,
    with a checkpoint.

    All processes save at the same step, whichever of them receives the signal. A second Ctrl-C ends
    at once. The context manager installs the handler and restores the previous ones, however
    training ends.

    Attributes:
        received: the signal that has arrived; 0 for none.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received = 0

    def __enter__(self) -> SaveOnTerm:
        here = (
            threading.current_thread() is threading.main_thread()
        )  # others may not install handlers
        heard = (
            number
            for number in self.SIGNALS
            if here and signal.getsignal(number) is not signal.SIG_IGN
        )
        self._before = {number: signal.signal(number, self._take) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _take(self, number: int, frame: object) -> None:
        again = bool(self.received)
        self.received = self.received or number
        if number == signal.SIGINT and again:
            self.__exit__()
            signal.raise_signal(number)
        elif number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            # print() inside a handler fails if it interrupts another print().
            os.write(
                2, b"interrupted: saving a checkpoint after this step; Ctrl-C again ends at once\n"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_
    ) -> None:
        self.received = int(max_over_ranks(self.received, args.device))
        if self.received:
            control.should_save = control.should_training_stop = True


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
    if not any(hasattr(parameter, "ds_id") for parameter in shards):
        return drafter
    import deepspeed

    with deepspeed.zero.GatheredParameters(shards):
        if not wanted:
            return None
        copy = drafter.blank()
        copy.to(shards[0].device, shards[0].dtype)  # type: ignore[arg-type]
        copy.load_state_dict(drafter.state_dict())
    copy.bind(target)
    return copy


class DecodeHeldOut(TrainerCallback):
    """Decodes held-out prompts with the drafter and logs the acceptance; the best checkpoint is
    chosen by it.

    One process decodes, the others wait. It must be the last callback but SaveOnTerm, because it
    reads what the others set.

    Args:
        every: steps between measurements; 0 decodes with every checkpoint. The last step always
            decodes.
        decode: drafter -> figures by name, `accepted_length` among them.
    """

    def __init__(
        self,
        trainer: StepTrainer,
        every: int,
        decode: Callable[[TrainableDrafter], dict[str, float]],
    ):
        self.trainer = trainer
        self.every = every
        self.decode = decode

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_
    ) -> None:
        if self.every:
            due = state.global_step % self.every == 0
        else:
            due = control.should_save
        if not due and not control.should_training_stop:
            return
        model = self.trainer.drafter
        drafter = gather_drafter(model, self.trainer.target, state.is_world_process_zero)
        length = 0.0
        if state.is_world_process_zero and drafter is not None:
            figures = self.decode(drafter.eval())
            self.trainer.target.release_steps()  # training needs the memory
            length = figures["accepted_length"]
            loss_due = control.should_log  # Trainer.log clears it, and the loss would not be logged
            self.trainer.log(
                {f"eval_decode_{name}": round(value, 4) for name, value in figures.items()}
            )
            control.should_log = loss_due
        model.train()
        length = max_over_ranks(length, args.device)
        # A few prompts are a coarse measure: of equal checkpoints the later one is kept.
        if state.best_metric is None or length >= state.best_metric:
            state.best_metric, state.best_global_step = length, state.global_step
            control.should_save = True


class ProgressLines(TrainerCallback):
    """Prints a line per log: step, loss, acceptance by depth, rate and time left. Lines suit
    terminals, files and CI.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_
    ) -> None:
        self.start = time.perf_counter()
        self.first = state.global_step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **event: Json
    ) -> None:
        logs = event["logs"]
        if not state.is_world_process_zero:
            return
        step = f"step {state.global_step}/{state.max_steps}  "
        if "eval_decode_accepted_length" in logs:
            length = logs["eval_decode_accepted_length"]
            depths = _by_depth(logs, "eval_decode_acceptance@")
            print(
                f"{step}decoding held-out prompts: accepted length {length:.2f}, by depth {depths}",
                flush=True,
            )
        if "loss" in logs:
            elapsed = time.perf_counter() - self.start
            done = max(state.global_step - self.first, 1)
            left = int(elapsed / done * max(state.max_steps - state.global_step, 0))  # seconds
            print(
                f"{step}loss {logs['loss']:.3f}  agree by depth {_by_depth(logs, 'agree@')}  "
                f"accepted length {logs.get('accepted_length', 1):.2f}  {logs.get('tokens_per_second', 0):.0f} tok/s  "
                f"{left // 60}:{left % 60:02d} left",
                flush=True,
            )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_
    ) -> None:
        if state.is_world_process_zero:
            best = "not measured"
            if state.best_model_checkpoint:
                best = Path(state.best_model_checkpoint).name
            where = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            print(f"saved {where} (best: {best})", flush=True)


def _by_depth(logs: Json, prefix: str) -> str:
    return " ".join(f"{value:.2f}" for name, value in logs.items() if name.startswith(prefix))
