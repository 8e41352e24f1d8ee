"""What ends a run before its last step: a time budget, SIGTERM and Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import TrainerControl, TrainerState

from drafttrain.files import Json


def max_over_ranks(value: float, device: torch.device) -> float:
    """The largest value of all processes. Ranks that decide by different values would wait for each
    other forever.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return value
    shared = torch.tensor(value, dtype=torch.float32, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.item()


@dataclass
class TimeBudget:
    """Ends training after a number of minutes, or earlier by max_steps.

    The learning rate decays to a twentieth by then. The time used is part of the checkpoint, so a
    resumed run gets the rest only.

    Args:
        used: seconds of the budget that are over.
    """

    clock = staticmethod(time.perf_counter)  # seconds; tests replace it

    minutes: float
    used: float = 0.0

    @staticmethod
    def after(minutes: float, state: TrainerState) -> TimeBudget:
        """The budget that a checkpoint's state has left."""
        saved: Json = state.stateful_callbacks or {}  # type: ignore[assignment]
        kept = saved.get("TimeBudget", {})
        return TimeBudget(minutes, kept.get("attributes", {}).get("used", 0.0))

    @property
    def done(self) -> float:
        """Share of the budget that is used, 0 to 1."""
        return min(1.0, self.used / (60 * self.minutes))

    @property
    def left(self) -> float:
        """Seconds that are not used."""
        return max(0.0, 60 * self.minutes - self.used)

    def factor(self) -> float:
        """Factor of the learning rate: constant for the first third, then linear to a twentieth."""
        return min(1.0, max(0.05, 1.5 * (1 - self.done)))

    def begin(self, max_steps: int) -> None:
        """Starts the clock. max_steps: the recipe's own limit, which holds too; -1 for none."""
        self._last = self.clock()
        self._most = max_steps if max_steps > 0 else 10**9

    def spend(
        self,
        state: TrainerState,
        control: TrainerControl,
        device: torch.device,
    ) -> None:
        """Counts the time of a step, and ends training when the budget is used.

        `state.max_steps` becomes the number of steps that the budget will last.
        """
        now = self.clock()
        self.used = max_over_ranks(self.used + now - self._last, device)
        self._last = now
        # As the pace so far tells, and at least one more.
        by_time = max(state.global_step + 1, round(state.global_step / max(self.done, 1e-6)))
        state.max_steps = min(by_time, self._most)
        if self.done >= 1.0 or state.global_step >= self._most:
            state.max_steps = state.global_step
            control.should_training_stop = True
            control.should_save = True

    def state(self) -> Json:
        """What a checkpoint records, in the form of transformers' callbacks."""
        return {"args": {"minutes": self.minutes}, "attributes": {"used": self.used}}


class SaveOnTerm:
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
        self._before = {}
        # Only the main thread may install handlers.
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that Python did not install.
            signal.signal(number, handler or signal.SIG_DFL)

    def _take(self, number: int, frame: object) -> None:
        again = bool(self.received)
        if not again:
            self.received = number
        # The previous handler takes the second one.
        if number == signal.SIGINT and again:
            self.__exit__()
            signal.raise_signal(number)
        elif number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            # print() inside a handler fails if it interrupts another print().
            os.write(
                2, b"interrupted: saving a checkpoint after this step; Ctrl-C again ends at once\n"
            )

    def anywhere(self, device: torch.device) -> bool:
        """Whether any process has received a signal; all processes call it after each step."""
        self.received = int(max_over_ranks(self.received, device))
        return self.received != 0
