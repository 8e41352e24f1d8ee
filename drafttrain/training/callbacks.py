"""What happens between steps: progress lines, the time budget, stopping on SIGTERM, and decoding held-out prompts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from drafttrain.target import Target


def over_ranks(value: float, device: torch.device) -> float:
    """The largest value of all processes: what they decide by must be the same, or they wait for each other forever."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    shared = torch.tensor(value, dtype=torch.float32, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.item()


class TimeBudget(TrainerCallback, ExportableState):
    """Ends training after so many minutes, and decays the learning rate to nothing by then.

    The time already used is part of the checkpoint, so a resumed run gets the rest only.
    """

    def __init__(self, minutes: float, used: float = 0.0):
        self.minutes, self.used = minutes, used
        self._last: float | None = None

    @staticmethod
    def after(minutes: float, checkpoint: str | None) -> TimeBudget:
        """What a checkpoint has left of the budget."""
        if checkpoint is None:
            return TimeBudget(minutes)
        kept = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json")).stateful_callbacks
        return TimeBudget(minutes, kept.get("TimeBudget", {}).get("attributes", {}).get("used", 0.0))

    def factor(self) -> float:
        """Constant for the first third, then linear to a twentieth."""
        progress = min(1.0, self.used / (60 * self.minutes))
        return min(1.0, max(0.05, 1.5 * (1 - progress)))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        self.used = over_ranks(self.used + now - (self._last or now), args.device)
        self._last = now
        done = min(1.0, self.used / (60 * self.minutes))
        state.max_steps = max(state.global_step + 1, round(state.global_step / max(done, 1e-6)))
        if done >= 1.0:
            state.max_steps = state.global_step
            control.should_training_stop = control.should_save = True

    def state(self) -> dict[str, Any]:
        return {"args": {"minutes": self.minutes}, "attributes": {"used": self.used}}


class SaveOnTerm(TrainerCallback):
    """SIGTERM (a scheduler taking the machine back) ends training after the step in progress, with a checkpoint.

    All processes save at the same step, whichever of them the signal reaches, and whenever. As a context it listens, and
    leaves the signal as it was, however training ends.

    Attributes:
        received: a signal has come.
    """

    def __init__(self) -> None:
        self.received = False
        self._before: Any = None

    def __enter__(self) -> SaveOnTerm:
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _note(self, *_: Any) -> None:
        self.received = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.received = over_ranks(float(self.received), args.device) > 0
        if self.received:
            control.should_save = control.should_training_stop = True


def whole(drafter: Any, target: Target, wanted: bool) -> Any:
    """The drafter as it can run on one process: itself, or a copy if ZeRO-3 has scattered its weights (None if not wanted).

    All processes must call this, since they give the copy its weights.
    """
    scattered = list(drafter.parameters())
    if not any(hasattr(parameter, "ds_id") for parameter in scattered):
        return drafter
    import deepspeed

    with deepspeed.zero.GatheredParameters(scattered):
        if not wanted:
            return None
        copy = drafter.blank()
        copy = copy.to(scattered[0].device, scattered[0].dtype)
        copy.load_state_dict(drafter.state_dict())
    copy.bind(target)
    return copy


class DecodeHeldOut(TrainerCallback):
    """Runs the real decoder on held-out prompts and logs what it accepts; the best checkpoint is chosen by that.

    One process decodes, the others wait. Comes last of the callbacks but SaveOnTerm: it asks what the others have decided.

    Args:
        trainer: a DrafterTrainer. every: steps; 0 decodes for every checkpoint. The last step decodes in any case.
        decode: drafter -> figures by name, `accepted_length` among them.
    """

    def __init__(self, trainer: Any, every: int, decode: Callable[[Any], dict[str, float]]):
        self.trainer, self.every, self.decode = trainer, every, decode

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        due = state.global_step % self.every == 0 if self.every else control.should_save
        if not due and not control.should_training_stop:
            return
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        drafter = whole(model, self.trainer.target, state.is_world_process_zero)
        length = 0.0
        if state.is_world_process_zero:
            drafter.eval()
            figures = self.decode(drafter)
            length = figures["accepted_length"]
            due_too = control.should_log  # a log of our own would take the place of the loss's
            self.trainer.log({f"eval_decode_{name}": round(value, 4) for name, value in figures.items()})
            control.should_log = due_too
        model.train()
        length = over_ranks(length, args.device)
        # A few prompts are a coarse measure: of equal checkpoints the one that learned longer is kept.
        if state.best_metric is None or length >= state.best_metric:
            state.best_metric, state.best_global_step = length, state.global_step
            control.should_save = True


class Progress(TrainerCallback):
    """A line per log: step, loss, acceptance by depth, rate and time left; lines suit terminals, files and CI alike."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.start, self.first = time.perf_counter(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "eval_decode_accepted_length" in logs:
            depths = " ".join(f"{v:.2f}" for k, v in logs.items() if k.startswith("eval_decode_acceptance@"))
            print(
                f"step {state.global_step}/{state.max_steps}  decoding held-out prompts: accepted length "
                f"{logs['eval_decode_accepted_length']:.2f}, by depth {depths}",
                flush=True,
            )
        if "loss" not in logs:
            return
        elapsed, done = time.perf_counter() - self.start, max(state.global_step - self.first, 1)
        left = elapsed / done * max(state.max_steps - state.global_step, 0)
        depths = " ".join(f"{v:.2f}" for k, v in logs.items() if k.startswith("agree@"))
        print(
            f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.3f}  agree by depth {depths}  "
            f"accepted length {logs.get('accepted_length', 1):.2f}  {logs.get('tokens_per_second', 0):.0f} tok/s  "
            f"{int(left) // 60}:{int(left) % 60:02d} left",
            flush=True,
        )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            best = Path(state.best_model_checkpoint).name if state.best_model_checkpoint else "not measured"
            print(f"saved {Path(args.output_dir) / f'checkpoint-{state.global_step}'} (best: {best})", flush=True)
