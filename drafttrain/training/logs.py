"""What a run reports: figures of its steps, lines on the terminal, wandb and others.

A line per log: step, loss, acceptance by depth, throughput and time left. Lines suit terminals,
files and CI.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import speed_metrics

from drafttrain.environment import peak_memory
from drafttrain.states.ahead import Inputs
from drafttrain.training.limits import TimeBudget, max_over_ranks
from drafttrain.training.step import TrainingStep

Figures = dict[str, float]
_LONG_STEP = 0.1  # of a time budget


@dataclass
class Logs:
    """Collects the figures of steps, and hands them to `state.log_history` and every reporter.

    Args:
        step: counts anchors and metrics. parameters: of the drafter, for its operations.
        budget: of time, if the run has one.

    Attributes:
        written: step of the last training log. seconds: in micro-batches, of this process.
        tokens: read by this process, not in `state` yet.
    """

    args: TrainingArguments
    state: TrainerState
    accelerator: Accelerator
    step: TrainingStep
    parameters: int
    budget: TimeBudget | None

    def __post_init__(self) -> None:
        self.reporters: list[TrainerCallback] = []
        for made in get_reporting_integration_callbacks(self.args.report_to):
            self.reporters.append(made())
        # of the step before this one; none yet
        self.progress: float | None = None
        self.rate: float | None = None
        self.rate_held = False  # the rate rose or stayed in an earlier step
        self.begun = self.written = self.state.global_step
        self.tokens = 0
        self.seconds = 0.0
        self.loss = torch.tensor(0.0, device=self.args.device)  # sum since the last training log
        self.losses = 0.0  # sum until then
        # what had been waited for states until the last training log
        self.waited = 0.0

    def tell(self, event: str, **more: object) -> None:
        """Calls a method of every reporter, with the arguments that transformers gives."""
        for reporter in self.reporters:
            getattr(reporter, event)(
                self.args,
                self.state,
                TrainerControl(),
                model=self.step.drafter,
                processing_class=None,
                **more,
            )

    def begin(self) -> None:
        self.start = time.time()
        self.clock = time.perf_counter()  # when the last training log was written
        self.began = self.clock  # the first step
        self.tell("on_init_end")
        self.tell("on_train_begin")

    def count_tokens(self, batches: list[Inputs]) -> None:
        """Counts the tokens of a step's micro-batches, padding included."""
        for inputs in batches:
            self.tokens += inputs["input_ids"].numel()

    def add(self, losses: list[Tensor], seconds: float, rate: float) -> None:
        """Counts an optimizer step: the losses of its micro-batches, their time and its learning
        rate. Says when a phase of the training begins.
        """
        for loss in losses:
            self.loss += loss
        self.seconds += seconds

        if self.budget is not None and self.state.global_step == self.begun + 1:
            share = seconds / (60 * self.budget.minutes)
            if share > _LONG_STEP:
                self._say(
                    f"note: this step took {seconds:.0f} s, {100 * share:.0f} % of max_minutes={self.budget.minutes:g}, so "
                    f"few steps fit; a lower per_device_train_batch_size ({self.args.per_device_train_batch_size}), "
                    "max_length or a smaller drafter gives more"
                )
        drafter = self.step.drafter
        joins = drafter.later_depths_from
        if self.progress is not None and self.progress < joins <= drafter.progress:
            self._say("later depths join: they are trained from here on")
        self.progress = drafter.progress
        if self.rate is not None and self.rate_held and rate < self.rate:
            self._say(f"rate falls: the learning rate was {self.rate:.2g} until here")
            self.rate_held = False
        elif self.rate is not None and rate >= self.rate:
            self.rate_held = True
        self.rate = rate

    def write(self, figures: Figures) -> None:
        """Notes figures of the present step, to which it adds the epoch."""
        figures["epoch"] = self.state.epoch  # reporters and callers see it, too
        self.state.log_history.append({**figures, "step": self.state.global_step})
        self.tell("on_log", logs=figures)
        if "eval_decode_accepted_length" in figures:
            length = figures["eval_decode_accepted_length"]
            prefix = "eval_decode_acceptance"
            depths = sum(name.startswith(f"{prefix}@") for name in figures)
            self._say(
                f"decoding held-out prompts: accepted length {length:.2f}, by depth "
                f"{_by_depth(figures, prefix, depths)}"
            )
        if "loss" in figures:
            length = figures.get("accepted_length", math.nan)
            expected = "-" if math.isnan(length) else f"{length:.2f}"
            left = self._left()
            self._say(
                f"loss {figures['loss']:.3f}  agree by depth "
                f"{_by_depth(figures, 'agree', self.step.depths)}  accepted length {expected}  "
                f"{figures['tokens_per_second']:.0f} tok/s  {left // 60}:{left % 60:02d} left"
            )

    def _say(self, text: str) -> None:
        """Prints a line about the present step, in the first process.

        Under a time budget the step says which share of the time is over: the number of steps that
        will fit changes from line to line.
        """
        if not self.state.is_world_process_zero:
            return
        step = f"step {self.state.global_step}"
        if self.budget is None:
            step += f"/{self.state.max_steps}"
        else:
            step += f", {100 * self.budget.done:.0f} % of {self.budget.minutes:g} min"
        print(f"{step}  {text}", flush=True)

    def _left(self) -> int:
        """Seconds until the last step, by the pace so far."""
        state = self.state
        if state.global_step >= state.max_steps:
            return 0
        elapsed = time.perf_counter() - self.began
        pace = elapsed / max(state.global_step - self.begun, 1)
        left = pace * (state.max_steps - state.global_step)
        if self.budget is not None:
            left = min(left, self.budget.left)
        return int(left)

    def saved(self) -> None:
        """Says that a checkpoint of the present step is written."""
        self.tell("on_save")
        if self.state.is_world_process_zero:
            best = "not measured"
            if self.state.best_model_checkpoint:
                best = Path(self.state.best_model_checkpoint).name
            where = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
            print(f"saved {where} (best: {best})", flush=True)

    def write_step(self, norm: Tensor | float, rate: float) -> None:
        """Notes loss, acceptance by depth, throughput and memory since the last time."""
        # The mean over ranks: each rank's loss is scaled by their number, see `compute_loss`.
        loss = self.accelerator.gather(self.loss).mean().item()
        self.losses += loss
        self.loss = torch.zeros_like(self.loss)
        figures = {
            "loss": loss / (self.state.global_step - self.written),
            "grad_norm": float(norm),
            "learning_rate": rate,
        }
        self.written = self.state.global_step
        self.add_tokens()

        now = time.perf_counter()
        passed = max(now - self.clock, 1e-9)
        batches = self.args.world_size // self.step.sharing  # at a time
        figures |= self.step.take_metrics("train")
        figures["tokens_per_second"] = round(self.step.anchors * batches / passed, 1)
        figures["memory_gb"] = round(peak_memory(self.args.device) / 1e9, 3)
        ahead = self.step.source.ahead
        if ahead is not None:
            figures["states_wait"] = round((ahead.waited - self.waited) / passed, 4)
            self.waited = ahead.waited
        self.clock = now
        self.step.anchors = 0
        self.write(figures)

    def add_tokens(self) -> None:
        """Adds the tokens of all processes, and their operations, to the state; all processes call it."""
        tokens = self.tokens
        if self.accelerator.num_processes > 1:
            own = torch.tensor([tokens], device=self.args.device)
            tokens = int(self.accelerator.gather(own).sum())
        self.tokens = 0
        self.state.num_input_tokens_seen += tokens
        # Two operations per weight and token forward, four backward.
        self.state.total_flos += 6.0 * tokens * self.parameters

    def write_held_out(self, figures: Figures, start: float, rows: int) -> None:
        """Notes what a measurement of so many rows, begun at `start`, has found."""
        steps = -(-rows // (self.args.eval_batch_size * self.args.world_size))
        figures.update(speed_metrics("eval", start, num_samples=rows, num_steps=steps))
        self.write(figures)
        self.tell("on_evaluate", metrics=figures)

    def end(self) -> None:
        """Notes the time and the mean loss of the whole run."""
        args = self.args
        done = self.state.global_step - self.begun
        rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        rows = done * rows // self.step.sharing
        figures = speed_metrics("train", self.start, num_samples=rows, num_steps=done)
        self.add_tokens()
        figures["total_flos"] = self.state.total_flos
        if done:
            loss = self.accelerator.gather(self.loss).mean().item()  # over ranks, as in logs
            figures["train_loss"] = (self.losses + loss) / done
        self.write(figures)
        self.tell("on_train_end")

    def wait_share(self) -> float | None:
        """Share of the steps' time that the slowest process waited for states; None if none are
        read. All processes call it.
        """
        ahead = self.step.source.ahead
        if ahead is None:
            return None
        return round(max_over_ranks(ahead.waited / max(self.seconds, 1e-9), self.args.device), 4)


def _by_depth(figures: Figures, prefix: str, depths: int) -> str:
    """A figure per depth; `-` for depths that were not trained or not measured."""
    words = []
    for depth in range(1, max(depths, 1) + 1):
        value = figures.get(f"{prefix}@{depth}")
        words.append("-" if value is None else f"{value:.2f}")
    return " ".join(words)
