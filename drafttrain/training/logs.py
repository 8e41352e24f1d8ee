"""What a run reports: figures of its steps, lines on the terminal, wandb and others."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import speed_metrics

from drafttrain.environment import peak_memory
from drafttrain.files import Json
from drafttrain.states.ahead import Inputs
from drafttrain.training.limits import max_over_ranks
from drafttrain.training.step import TrainingStep

Figures = dict[str, float]


class Logs:
    """Collects the figures of steps, and hands them to `state.log_history` and every reporter.

    Args:
        step: counts anchors and metrics. parameters: of the drafter, for its operations.

    Attributes:
        written: step of the last training log. seconds: in micro-batches, of this process.
        tokens: read by this process, not in `state` yet.
    """

    def __init__(
        self,
        args: TrainingArguments,
        state: TrainerState,
        accelerator: Accelerator,
        step: TrainingStep,
        parameters: int,
    ):
        self.args = args
        self.state = state
        self.accelerator = accelerator
        self.step = step
        self.reporters: list[TrainerCallback] = []
        for made in get_reporting_integration_callbacks(args.report_to):
            self.reporters.append(made())
        self.reporters.append(ProgressLines())
        self.begun = self.written = state.global_step
        self.parameters = parameters
        self.tokens = 0
        self.seconds = 0.0
        self.loss = torch.tensor(0.0, device=args.device)  # sum since the last training log
        self.losses = 0.0  # sum until then
        self.start = time.time()
        # when the last training log was written, and what had been waited for states until then
        self.clock = time.perf_counter()
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
        self.clock = time.perf_counter()
        self.tell("on_init_end")
        self.tell("on_train_begin")

    def count_tokens(self, batches: list[Inputs]) -> None:
        """Counts the tokens of a step's micro-batches, padding included."""
        for inputs in batches:
            self.tokens += inputs["input_ids"].numel()

    def add(self, losses: list[Tensor], seconds: float) -> None:
        """Counts an optimizer step: the losses of its micro-batches, and their time."""
        for loss in losses:
            self.loss += loss
        self.seconds += seconds

    def write(self, figures: Figures) -> None:
        """Notes figures of the present step, to which it adds the epoch."""
        figures["epoch"] = self.state.epoch  # reporters and callers see it, too
        self.state.log_history.append({**figures, "step": self.state.global_step})
        self.tell("on_log", logs=figures)

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

    def end(self, rows: float) -> None:
        """Notes the time and the mean loss of the whole run. rows: of its whole schedule."""
        done = self.state.global_step - self.begun
        share = done / max(self.state.max_steps, 1)
        figures = speed_metrics("train", self.start, num_samples=rows * share, num_steps=done)
        self.add_tokens()
        figures["total_flos"] = self.state.total_flos
        if done:
            figures["train_loss"] = (self.losses + self.loss.item()) / done
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
