"""The Trainer of a run: `StepTrainer`'s step with on-policy rows, logs, checkpoints, schedule, row
order and clear failures.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
from datasets import Dataset
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from transformers import TrainerState, TrainingArguments
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import EvalLoopOutput, get_last_checkpoint, rotate_checkpoints
from typing_extensions import NotRequired, TypedDict

from drafttrain.data.loader import collate
from drafttrain.environment import peak_memory
from drafttrain.errors import UserError
from drafttrain.files import Json, is_disk_full, open_tensors, read_json, reading
from drafttrain.folders import PARTIAL, OutputFolder
from drafttrain.sequence_parallel import SharedBatches
from drafttrain.states.ahead import MOST_STEPS, Inputs, LookAhead, StatesLostError
from drafttrain.training.callbacks import TimeBudget, max_over_ranks
from drafttrain.training.column_rates import set_column_rates
from drafttrain.training.on_policy import OnPolicy
from drafttrain.training.step import StepTrainer, count_anchors


class DrafterTrainer(StepTrainer):
    """Trains a drafter against a frozen target.

    Args:
        on_policy: replaces a share of the rows by the drafter's responses. column_rates: [f*h], see
            `create_optimizer`.
        args, rest: as for `StepTrainer`.
    """

    def __init__(
        self, *args, on_policy: OnPolicy | None = None, column_rates: Tensor | None = None, **rest
    ):
        super().__init__(*args, **rest)
        self.on_policy = on_policy
        self.column_rates = column_rates
        self.order: ByLength | None = None  # of the training rows
        self.coming: LookAhead | None = (
            None  # of the running epoch, if states are read ahead of the steps
        )
        self.coming_eval: LookAhead | None = None  # of the running measurement
        self.seconds = self.logged_wait = (
            0.0  # in micro-batches; of waiting for states, when they were last logged
        )
        if on_policy is not None:
            self.add_callback(on_policy)

    def get_batch_samples(
        self,
        epoch_iterator: Iterator[Inputs],
        num_batches: int,
        device: torch.device,
    ) -> tuple[list[Inputs], Tensor | int | None]:
        """The micro-batches of one optimizer step, and the anchors in them."""
        batches, count = super().get_batch_samples(
            self._looking_ahead(epoch_iterator),
            num_batches,
            device,
        )
        if self.on_policy is not None and batches:
            self.on_policy.refresh(self.state.global_step)
            drawn = batches
            batches = [self.on_policy.mix(inputs, self.state.global_step) for inputs in drawn]
            count = self._get_num_items_in_batch(batches, device)
            if self.source.ahead is not None:  # the replaced rows need their states no longer
                for before, after in zip(drawn, batches, strict=True):
                    for index in set(before["index"].tolist()) - set(after["index"].tolist()):
                        self.source.ahead.release(index)
        return batches, count

    def _looking_ahead(self, epoch_iterator: Iterator[Inputs]) -> Iterator[Inputs]:
        """The epoch's micro-batches, announced ahead of their steps, together with the first ones
        of the next epoch.
        """
        ahead = self.source.ahead
        if ahead is None:
            return epoch_iterator
        if self.coming is None or self.coming.batches is not epoch_iterator:
            steps = self.state.max_steps - self.state.global_step
            most = steps * self.args.gradient_accumulation_steps
            announced = 0
            if self.coming is not None:
                announced = self.coming.ahead
            self.coming = LookAhead(
                epoch_iterator,
                self.source.expect,
                lambda: ahead.room,
                most,
                announced,
                self._next_epoch,
            )
        return self.coming

    def _next_epoch(self) -> Iterator[Inputs]:
        """Micro-batches of this process in the next epoch; none where only the sampler that draws
        them knows the order.
        """
        loader = self.callback_handler.train_dataloader
        dataset = self.train_dataset
        if self.order is None or loader is None:
            return iter(())
        assert isinstance(dataset, Dataset)
        self.order.later = 1
        try:
            chosen = list(itertools.islice(loader.batch_sampler, MOST_STEPS))
        finally:
            self.order.later = 0
        return (collate([dataset[i] for i in rows]) for rows in chosen)

    def training_step(self, *args, **kwargs) -> Tensor:
        began = time.perf_counter()
        budget = self._budget
        if budget:
            self.drafter.progress = budget.done
        else:
            self.drafter.progress = self.state.global_step / max(self.state.max_steps, 1)
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - began

    def _load_from_checkpoint(
        self,
        resume_from_checkpoint: str,
        model: nn.Module | None = None,
    ) -> None:
        """Lets kinds load their own checkpoints, whose weights are saved under other names than the
        module's.
        """
        if not self.drafter.load_checkpoint(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        args = self.args
        sharing = 1
        if self.sequence:
            sharing = self.sequence.size
        rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size // sharing
        data = train_dataset or self.train_dataset
        assert isinstance(data, Dataset)
        seed = args.data_seed or args.seed
        self.order = ByLength(list(data["length"]), rows, seed, lambda: int(self.state.epoch or 0))
        if self.sequence:
            return SharedBatches(self.order, args.train_batch_size, args.world_size, sharing)
        return self.order

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler | None:  # type: ignore[override]
        if self.sequence is None:
            return super()._get_eval_sampler(eval_dataset)  # type: ignore[arg-type]
        order = SequentialSampler(eval_dataset)  # type: ignore[arg-type]
        return SharedBatches(
            order,
            self.args.eval_batch_size,
            self.args.world_size,
            self.sequence.size,
        )

    def _get_num_items_in_batch(
        self,
        batch_samples: list[Inputs],
        device: torch.device,
    ) -> Tensor | None:
        """Anchors of an optimizer step, over all ranks and accumulation steps; transformers counts
        `labels`.
        """
        if not batch_samples:
            return None
        count = torch.stack([count_anchors(inputs) for inputs in batch_samples]).sum().to(device)
        return self.accelerator.gather(count).sum() // (self.sequence.size if self.sequence else 1)

    def _get_grad_norm(
        self,
        model: nn.Module,
        grad_norm: float | None = None,
    ) -> Tensor | float | None:
        """Also raises on a gradient that is not finite, before it reaches the weights and the next
        checkpoint.
        """
        norm = super()._get_grad_norm(model, grad_norm)
        if norm is not None:
            self.check_finite("grad_norm", norm)
        return norm

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, *_, **__
    ) -> tuple[Tensor, None, None]:
        if self.coming_eval is not None:
            next(self.coming_eval, None)  # announces later ones
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        assert isinstance(loss, Tensor)
        return loss.detach(), None, None

    # -- logs --------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Adds acceptance by depth, throughput and memory to the logs of a training step."""
        if "loss" in logs:
            now = time.perf_counter()
            own = self.args.world_size // (
                self.sequence.size if self.sequence else 1
            )  # batches at a time
            rate = self.anchors * own / max(now - self.clock, 1e-9)
            memory = round(peak_memory(self.args.device) / 1e9, 3)
            logs = (
                logs
                | self.take_metrics("train")
                | {"tokens_per_second": round(rate, 1), "memory_gb": memory}
            )
            if (ahead := self.source.ahead) is not None:
                logs["states_wait"] = round(
                    (ahead.waited - self.logged_wait) / max(now - self.clock, 1e-9), 4
                )
                self.logged_wait = ahead.waited
            self.clock = now
            self.anchors = 0
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, dataloader: DataLoader, *args, **kwargs) -> EvalLoopOutput:
        with self.source.measuring() as ahead:
            if ahead is not None:
                # in order, so it may be iterated twice
                rows = dataloader.dataset
                chosen = dataloader.batch_sampler
                batches = (collate([rows[i] for i in part]) for part in chosen or ())
                self.coming_eval = LookAhead(batches, self.source.expect, lambda: ahead.room)
            output = super().evaluation_loop(dataloader, *args, **kwargs)
            self.coming_eval = None
        prefix = kwargs.get("metric_key_prefix", "eval")
        measured = {f"{prefix}_{k}": v for k, v in self.take_metrics("eval").items()}
        return output._replace(metrics={**(output.metrics or {}), **measured})

    def wait_share(self) -> float | None:
        """Share of the steps' time that the slowest process waited for states; None if none are
        read. All processes call it.
        """
        if self.source.ahead is None:
            return None
        return round(
            max_over_ranks(self.source.ahead.waited / max(self.seconds, 1e-9), self.args.device), 4
        )

    # -- checkpoints -------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Writes a checkpoint under another name and moves it into place when all of it is on disk.

        A search for the newest checkpoint therefore never finds an incomplete one, whenever this
        process is killed.
        """
        root = Path(str(self.args.output_dir))
        name = f"checkpoint-{self.state.global_step}"
        partial = root / PARTIAL
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
            self.state.best_model_checkpoint = str(
                root / f"checkpoint-{self.state.best_global_step}"
            )
        if self.args.should_save:  # again: the best one's path has changed
            self.state.save_to_json(str(partial / name / "trainer_state.json"))
        self.accelerator.wait_for_everyone()
        if self.args.local_process_index == 0:
            _move(partial, root, name)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            rotate_checkpoints(
                str(root),
                self.args.save_total_limit,
                self.state.best_model_checkpoint,
            )

    def take_best(self) -> None:
        """Restores the weights of the best checkpoint unless the last step's are the best."""
        best = self.state.best_global_step
        where = self.state.best_model_checkpoint or ""
        if not best or best == self.state.global_step or not os.path.isdir(where):
            return
        if self.is_deepspeed_enabled or not self.drafter.load_checkpoint(where):
            self._load_best_model()

    # -- schedule ----------------------------------------------------------------------------------

    @property
    def _budget(self) -> TimeBudget | None:
        return next(
            (each for each in self.callback_handler.callbacks if isinstance(each, TimeBudget)), None
        )

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """With `column_rates` the weight that reads the target's states learns at rates of its own
        by column.
        """
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if self.column_rates is not None and fresh:
            set_column_rates(
                optimizer,
                self.drafter.get_parameter(self.drafter.reads_features),
                self.column_rates,
            )
        return optimizer

    def create_scheduler(
        self,
        num_training_steps: int,
        optimizer: Optimizer | None = None,
    ) -> LRScheduler:
        """Under a time budget the learning rate follows the time, otherwise the recipe's schedule."""
        budget = self._budget
        if budget is not None and self.lr_scheduler is None:
            warmup = self.args.get_warmup_steps(num_training_steps)
            optimizer = optimizer or self.optimizer
            assert optimizer is not None
            self.lr_scheduler = LambdaLR(
                optimizer, lambda step: min(1.0, (step + 1) / max(warmup, 1)) * budget.factor()
            )
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)


class ByLength(Sampler[int]):
    """Shuffles rows such that those of one optimizer step have similar lengths.

    The order depends neither on other random draws nor on how a step's rows are divided into
    devices and accumulation steps. So a resumed run sees the rows of an uninterrupted one, and a
    run on N devices those of a run on one device.

    Args:
        lengths: tokens of each row.
        rows: of an optimizer step: batch size x accumulation steps x processes. An epoch consists
            of full steps; it leaves out different rows each time.
        seed: of the order. epoch: returns the epoch's number; called when an epoch begins.
    """

    # Steps that are sorted together: more mean less padding and less shuffling.
    _SORTED = 50

    def __init__(self, lengths: Sequence[int], rows: int, seed: int, epoch: Callable[[], int]):
        self.lengths = lengths
        self.rows = rows
        self.seed = seed
        self.epoch = epoch
        self.later = 0  # added to the epoch's number, to look at the order of a later one

    def __len__(self) -> int:
        count = len(self.lengths)
        if count < self.rows:
            return count
        return count - count % self.rows

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(
            self.seed + 1_000_003 * (self.epoch() + self.later)
        )
        order = torch.randperm(len(self.lengths), generator=generator)[: len(self)].tolist()
        together = self.rows * max(1, min(self._SORTED, len(self) // (4 * self.rows)))
        steps: list[list[int]] = []
        for begin in range(0, len(order), together):
            block = sorted(order[begin : begin + together], key=lambda i: -self.lengths[i])
            steps += [block[i : i + self.rows] for i in range(0, len(block), self.rows)]
        # The longest step comes first, so that a lack of memory shows at once.
        longest = max(range(len(steps)), key=lambda at: self.lengths[steps[at][0]])
        places = [
            at for at in torch.randperm(len(steps), generator=generator).tolist() if at != longest
        ]
        return (row for at in [longest, *places] for row in steps[at])


def _move(partial: Path, root: Path, name: str) -> None:
    """Syncs a finished checkpoint to the disk and moves it into place; on a shared disk only the
    first node's move succeeds.
    """
    try:
        for path in (partial / name).rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        if (partial / name).exists() and (
            root / name
        ).exists():  # written by an earlier run of the same steps
            os.replace(root / name, partial / "before")
        os.replace(partial / name, root / name)
    except FileNotFoundError:  # another node has moved it
        return
    shutil.rmtree(partial, ignore_errors=True)


class SavedState(TypedDict):
    """A checkpoint's trainer_state.json, as far as a resumed run depends on it."""

    global_step: Annotated[int, Field(ge=0)]
    max_steps: int
    epoch: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    best_global_step: NotRequired[int | None]
    best_metric: NotRequired[float | None]
    best_model_checkpoint: NotRequired[str | None]
    log_history: list[Json]
    stateful_callbacks: NotRequired[dict[str, Json | list[Json]]]


def damage(checkpoint: Path, needed: Sequence[str] = ()) -> str:
    """Why a checkpoint cannot be resumed from, as a line; '' for a sound one. Reads all of it but
    the weights' values.

    Args:
        needed: patterns of file names that must be there; transformers goes on without a word if
            the optimizer's is not.
    """
    try:
        state = read_json(
            checkpoint / "trainer_state.json",
            "checkpoint",
            "it is skipped",
            SavedState,
        )
        if state["global_step"] != int(checkpoint.name.rpartition("-")[2]):
            return f"trainer_state.json is that of step {state['global_step']}"
        with reading(checkpoint / "trainer_state.json", "checkpoint", "it is skipped"):
            TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        for file in sorted(checkpoint.rglob("*.safetensors")):
            open_tensors(file, "checkpoint", "it is skipped")
        for file in sorted(path for path in checkpoint.glob("*") if path.suffix in (".pt", ".pth")):
            with (
                reading(file, "checkpoint", "it is skipped"),
                zipfile.ZipFile(file) as archive,
            ):  # as torch writes
                if bad := archive.testzip():
                    raise ValueError(f"the checksum of {bad} is wrong")
                with safe_globals():
                    torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except UserError as error:
        return str(error)
    return next(
        (f"it holds no {pattern}" for pattern in needed if not any(checkpoint.rglob(pattern))), ""
    )


def newest_checkpoint(args: TrainingArguments) -> str | None:
    """The newest checkpoint in output_dir, if there is one."""
    place = str(args.output_dir)
    if os.path.isdir(place):
        return get_last_checkpoint(place)
    return None


def find_checkpoint(
    args: TrainingArguments,
    resume: bool,
    output: OutputFolder | None = None,
) -> str | None:
    """The checkpoint to resume from: the newest that is not damaged, with a line about each one
    that is.

    With resume=False the checkpoints of an earlier run are set aside until this run's drafter is
    saved.

    Raises UserError: every checkpoint is damaged.
    """
    place = Path(str(args.output_dir))
    if not resume:
        with args.main_process_first(desc="setting old checkpoints aside"):
            if output is not None:
                output.set_aside("checkpoint-*")
    found = [
        path
        for path in place.glob("checkpoint-*")
        if path.is_dir() and path.name.rpartition("-")[2].isdecimal()
    ]
    for path in sorted(found, key=lambda path: -int(path.name.rpartition("-")[2])):
        others = args.save_only_model or any(path.glob("global_step*"))  # DeepSpeed's own layout
        needed = (
            () if others else ("*.safetensors", "optimizer.pt", "scheduler.pt", "rng_state*.pth")
        )
        if not (fault := damage(path, needed)):
            return str(path)
        if args.process_index == 0:
            print(f"{path} is damaged and not used: {fault}", file=sys.stderr, flush=True)
    if found:
        raise UserError(
            f"output_dir={str(place)!r}: all checkpoints are damaged; start again with resume=false"
        )
    return None


# -- failures --------------------------------------------------------------------------------------

# Parts of the messages for exhausted memory: torch's on a CPU, libraries' on a GPU.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


@contextlib.contextmanager
def explained(args: TrainingArguments) -> Iterator[None]:
    """Turns exhausted memory or disk, from loading to saving, into a UserError that says what to
    change.
    """
    try:
        yield
    except StatesLostError as error:
        last = newest_checkpoint(args)
        raise UserError(
            f"{error}; {f'{last} is kept' if last else 'no checkpoint was written before'}"
        ) from error
    except UserError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        last = newest_checkpoint(args)
        place = str(args.output_dir)
        kept = "no checkpoint was written before"
        if last:
            kept = f"{last} is kept, the same command continues from there"
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
            sign in text for sign in _NO_MEMORY
        ):
            batch = args.per_device_train_batch_size
            steps = args.gradient_accumulation_steps
            smaller = "max_length or drafter.ttt_steps lower"
            if batch > 1:
                smaller = (
                    f"per_device_train_batch_size={batch // 2} gradient_accumulation_steps={2 * steps} (now {batch} and "
                    f"{steps}; the same training in half the memory)"
                )
            raise UserError(
                f"out of memory on {args.device} ({text[:120]}); set {smaller}, or max_length or cache_gb lower; {kept}"
            ) from error
        if is_disk_full(error):
            free = 0
            if os.path.isdir(place):
                free = shutil.disk_usage(place).free
            raise UserError(
                f"output_dir={place!r}: no space left on the device while saving ({free / 1e6:.0f} MB free); free some space, "
                f"or set save_total_limit lower ({args.save_total_limit}); {kept}"
            ) from error
        raise
