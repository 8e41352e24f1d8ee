"""The Trainer subclass: the target's part of a step, the loss, and per-depth acceptance in the logs."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from drafttrain.data.loader import to_batch
from drafttrain.errors import UserError
from drafttrain.target import Target
from drafttrain.training.on_policy import OnPolicy
from drafttrain.training.targets import NoTarget, TargetSource

# Acceptance is measured on every so many training steps: it costs a tenth of a step and changes slowly.
MEASURE_EVERY = 4


class DrafterTrainer(Trainer):
    """Trains a drafter against a frozen target.

    The loss is a sum over anchors divided by the anchors of the whole optimizer step (all ranks, all accumulation steps),
    so neither padding nor the number of devices changes the gradient.

    Args:
        target: frozen, outside the wrapped model. source: gives each batch its target features and distributions.
        on_policy: puts the drafter's own responses among the data's, if not None.
        rest: as for transformers.Trainer.
    """

    def __init__(
        self,
        *args: Any,
        target: Target,
        source: TargetSource | NoTarget,
        on_policy: OnPolicy | None = None,
        **rest: Any,
    ):
        super().__init__(*args, **rest)
        self.target, self.source, self.on_policy = target, source, on_policy
        if on_policy is not None:
            self.add_callback(on_policy)
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.sums: dict[str, dict[str, Tensor]] = {"train": {}, "eval": {}}
        self.clock, self.anchors = time.perf_counter(), 0

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The micro-batches of one optimizer step, and the anchors in them."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.on_policy is not None and batches:
            self.on_policy.refresh(self.state.global_step)
            batches = [self.on_policy.mix(inputs, self.state.global_step) for inputs in batches]
            count = self._get_num_items_in_batch(batches, device)
        return batches, count

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Kinds that are not saved under the names of their own weights load their checkpoints themselves."""
        load = getattr(self.model, "load_checkpoint", None)
        if load is not None:
            load(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    # -- one step -----------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        batch = to_batch(inputs)
        output, rows, row_of = self.source(batch)
        count = num_items_in_batch if num_items_in_batch is not None else (inputs["shift_labels"] != -100).sum()
        step = model(
            batch=batch,
            embeds=self.target.embed(batch.input_ids),
            output=output,
            rows=rows,
            row_of=row_of,
            count=torch.as_tensor(count, device=batch.input_ids.device).clamp(min=1),
            measure=not model.training or self.state.global_step % MEASURE_EVERY == 0,
        )
        if not torch.isfinite(step.loss):
            raise UserError(
                f"loss={step.loss.item()} at step {self.state.global_step}: not finite; lower learning_rate "
                f"({self.args.learning_rate}) or max_grad_norm ({self.args.max_grad_norm}), then run again to go on from the "
                "last checkpoint"
            )
        self.anchors += int((inputs["shift_labels"] != -100).sum()) if model.training else 0
        where = self.sums["train" if model.training else "eval"]
        for name, value in step.metrics.items():
            where[name] = where[name] + value.detach() if name in where else value.detach()
        loss = step.loss
        if model.training and self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over ranks, the count is global
        return (loss, step) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    # -- metrics ------------------------------------------------------------------------------------------------

    def take_metrics(self, phase: str) -> dict[str, float]:
        """Per-depth means since the last call, over all ranks.

        agree@k: share of anchors where the drafter's likeliest token is the target's (greedy acceptance at depth k, given
        that the path so far is the target's); alpha@k: mean sum_v min(p, q); accepted_length: tokens per target pass of a
        greedy chain of all depths, if depths agreed independently. A kind that is trained one depth deep because all its
        depths are alike says by `chain_depth` how long that chain is.
        """
        if not self.sums[phase]:
            return {}
        summed = {name: self.accelerator.reduce(value) for name, value in sorted(self.sums[phase].items())}
        self.sums[phase] = {}
        count = summed["count"].clamp(min=1)
        means = {name: (value / count).tolist() for name, value in summed.items() if name != "count"}
        metrics = {f"{name}@{k + 1}": round(x, 4) for name, row in means.items() for k, x in enumerate(row)}
        agree = means["agree"]
        agree += agree[-1:] * (getattr(self.accelerator.unwrap_model(self.model), "chain_depth", 0) - len(agree))
        chain, expected = 1.0, 1.0
        for share in agree:
            chain *= share
            expected += chain
        return {**metrics, "accepted_length": round(expected, 4)}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            now = time.perf_counter()
            fresh = self.take_metrics("train")
            if fresh:
                rate = self.anchors * self.args.world_size / max(now - self.clock, 1e-9)
                fresh["tokens_per_second"] = round(rate, 1)
            self.clock, self.anchors = now, 0
            logs = {**logs, **fresh}
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        measured = {f"{prefix}_{k}": v for k, v in self.take_metrics("eval").items()}
        return output._replace(metrics={**(output.metrics or {}), **measured})

    # -- schedule -----------------------------------------------------------------------------------------------

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        budget = next((c for c in self.callback_handler.callbacks if isinstance(c, TimeBudget)), None)
        if budget is not None and self.lr_scheduler is None:
            warmup = self.args.get_warmup_steps(num_training_steps)
            optimizer = optimizer or self.optimizer
            assert optimizer is not None
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: min(1.0, (step + 1) / max(warmup, 1)) * budget.factor()
            )
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)


class TimeBudget(TrainerCallback, ExportableState):
    """Ends training after so many minutes, and decays the learning rate to nothing by then.

    The time already used is part of the checkpoint, so a resumed run gets the rest only.
    """

    def __init__(self, minutes: float, used: float = 0.0):
        self.minutes, self.used = minutes, used
        self._last: float | None = None

    def factor(self) -> float:
        """Constant for the first third, then linear to a twentieth."""
        progress = min(1.0, self.used / (60 * self.minutes))
        return min(1.0, max(0.05, 1.5 * (1 - progress)))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        self.used += now - (self._last or now)
        self._last = now
        done = min(1.0, self.used / (60 * self.minutes))
        state.max_steps = max(state.global_step + 1, round(state.global_step / max(done, 1e-6)))
        if done >= 1.0:
            state.max_steps = state.global_step
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        return {"args": {"minutes": self.minutes}, "attributes": {"used": self.used}}


class Progress(TrainerCallback):
    """A line per log: step, loss, acceptance by depth, rate and time left; lines suit terminals, files and CI alike."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.start, self.first = time.perf_counter(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs or "loss" not in logs:
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
