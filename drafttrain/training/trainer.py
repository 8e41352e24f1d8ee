"""The Trainer subclass: the target's part of a step, the loss, and per-depth acceptance in the logs."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints

from drafttrain.data.loader import to_batch
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.registry import decoding_file
from drafttrain.environment import peak_memory
from drafttrain.errors import UserError
from drafttrain.target import Target
from drafttrain.training.callbacks import TimeBudget
from drafttrain.training.feature_sources import NoTarget, TargetSource
from drafttrain.training.on_policy import OnPolicy
from drafttrain.training.sampler import ByLength

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
        drafter: Any = self.model
        if not drafter.load_checkpoint(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        args = self.args
        rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        data: Any = train_dataset or self.train_dataset
        return ByLength(list(data["length"]), rows, args.data_seed or args.seed, lambda: int(self.state.epoch or 0))

    # -- one step -----------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        batch = to_batch(inputs)
        output, rows, row_of = cast(Any, self.source(batch))  # no rows where the loss is the batch's own next tokens'
        anchors = int((inputs["shift_labels"] != -100).sum())
        count = num_items_in_batch if num_items_in_batch is not None else anchors
        if model.training and int(count) == 0:
            raise UserError(
                f"step {self.state.global_step}: the loss mask of all rows is empty (no two response tokens in a row); give "
                "data whose conversations have responses, or raise max_length"
            )
        divisor = torch.as_tensor(count, device=batch.input_ids.device).clamp(min=1)
        measure = not model.training or self.state.global_step % MEASURE_EVERY == 0
        step = model(
            inputs=StepInputs(batch, self.target.embed(batch.input_ids), output, rows, row_of, divisor, measure)
        )
        self._check_finite("loss", step.loss.detach())
        self.anchors += anchors if model.training else 0
        where = self.sums["train" if model.training else "eval"]
        for name, value in step.metrics.items():
            where[name] = where[name] + value.detach() if name in where else value.detach()
        loss = step.loss
        if model.training and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over ranks, the count is global
        return (loss, step) if return_outputs else loss

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Tensor | None:
        """Anchors of an optimizer step, over all ranks and accumulation steps; transformers would count `labels`."""
        if not batch_samples:
            return None
        count = torch.stack([(inputs["shift_labels"] != -100).sum() for inputs in batch_samples]).sum().to(device)
        return self.accelerator.gather(count).sum()

    def _check_finite(self, name: str, value: Tensor | float) -> None:
        if not torch.isfinite(torch.as_tensor(value)):
            raise UserError(
                f"{name}={float(value)} at step {self.state.global_step}: not finite; lower learning_rate "
                f"({self.args.learning_rate}) or max_grad_norm ({self.args.max_grad_norm}), then run again to go on from the "
                "last checkpoint"
            )

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Also the guard against gradients that would spoil the weights, and with them the next checkpoint."""
        norm = super()._get_grad_norm(model, grad_norm)
        if norm is not None:
            self._check_finite("grad_norm", norm)
        return norm

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
        agree += agree[-1:] * (self.accelerator.unwrap_model(self.model).chain_depth - len(agree))
        chain, expected = 1.0, 1.0
        for share in agree:
            chain *= share
            expected += chain
        return {**metrics, "accepted_length": round(expected, 4)}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            now = time.perf_counter()
            fresh = self.take_metrics("train")
            rate = self.anchors * self.args.world_size / max(now - self.clock, 1e-9)
            fresh["tokens_per_second"] = round(rate, 1)
            self.clock, self.anchors = now, 0
            logs = {**logs, **fresh, "memory_gb": round(peak_memory(self.args.device) / 1e9, 3)}
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        measured = {f"{prefix}_{k}": v for k, v in self.take_metrics("eval").items()}
        return output._replace(metrics={**(output.metrics or {}), **measured})

    # -- checkpoints --------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint under another name and moves it into place when all of it is on disk.

        So nobody who looks for the newest checkpoint ever finds half of one, whenever this process is killed.
        """
        root, name = Path(str(self.args.output_dir)), f"checkpoint-{self.state.global_step}"
        partial = root / ".partial"
        if self.args.local_process_index == 0:
            shutil.rmtree(partial, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.args.output_dir = str(partial)
        try:
            super()._save_checkpoint(model, trial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            self.args.output_dir = str(root)
        if self.state.best_global_step:
            self.state.best_model_checkpoint = str(root / f"checkpoint-{self.state.best_global_step}")
        if self.args.should_save:
            self.state.save_to_json(str(partial / name / "trainer_state.json"))  # anew, for the best one's place
        self.accelerator.wait_for_everyone()
        if self.args.local_process_index == 0:
            _move(partial, root, name)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            rotate_checkpoints(str(root), self.args.save_total_limit, self.state.best_model_checkpoint)

    def take_best(self) -> None:
        """Goes back to the weights of the best checkpoint, if the last step's are not the best."""
        best = self.state.best_global_step
        where = self.state.best_model_checkpoint or ""
        if not best or best == self.state.global_step or not os.path.isdir(where):
            return
        drafter: Any = self.model
        if self.is_deepspeed_enabled or not drafter.load_checkpoint(where):
            self._load_best_model()

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


def _move(partial: Path, root: Path, name: str) -> None:
    """Gets a finished checkpoint to the disk and then to its place; on a shared disk the first node does."""
    try:
        for path in (partial / name).rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        if (partial / name).exists() and (root / name).exists():  # of a run that is being repeated
            os.replace(root / name, partial / "before")
        os.replace(partial / name, root / name)
    except FileNotFoundError:  # another node was first
        return
    shutil.rmtree(partial, ignore_errors=True)


def forget_checkpoints(args: Any) -> None:
    """Deletes checkpoints that an earlier run left in output_dir, which would be taken for this run's."""
    with args.main_process_first(desc="deleting old checkpoints"):
        for old in Path(args.output_dir).glob("checkpoint-*"):
            shutil.rmtree(old, ignore_errors=True)


def forget_drafter(args: Any) -> None:
    """Deletes what was found out about a drafter in output_dir whose weights this run is going to replace.

    Tuned decoding settings and an adapter of old would be taken for the new drafter's, and a summary for its end.
    """
    with args.main_process_first(desc="deleting an old drafter's settings"):
        for path in (decoding_file(str(args.output_dir)), Path(args.output_dir) / "training.json"):
            path.unlink(missing_ok=True)
        shutil.rmtree(Path(args.output_dir) / "adapter", ignore_errors=True)
