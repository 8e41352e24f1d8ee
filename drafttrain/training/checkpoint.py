"""Checkpoints: writing them so that a kill at any time leaves the last one whole, finding the newest
one, and restoring a run from it.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from pydantic import Field
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import load_sharded_checkpoint
from transformers.training_args import ParallelMode
from typing_extensions import NotRequired, TypedDict

from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.errors import UserError
from drafttrain.files import Json, open_tensors, read_json, reading
from drafttrain.folders import PARTIAL, OutputFolder
from drafttrain.training.acceleration import WrappedDrafter, is_deepspeed
from drafttrain.training.limits import TimeBudget
from drafttrain.training.on_policy import OnPolicy

STATE = "trainer_state.json"
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.pt"
SCHEDULE = "scheduler.pt"
SCALER = "scaler.pt"


@dataclass
class Checkpoints:
    """Writes the checkpoints of a run, and restores it from one.

    Attributes:
        trained: what checkpoints hold. parts: whose states are in trainer_state.json, under the names
            of their classes.
    """

    args: TrainingArguments
    state: TrainerState
    accelerator: Accelerator
    trained: WrappedDrafter
    parts: Sequence[TimeBudget | OnPolicy]

    @property
    def root(self) -> Path:
        return Path(str(self.args.output_dir))

    @property
    def best(self) -> Path | None:
        """The checkpoint that decodes best; None if no prompt was decoded."""
        if not self.state.best_global_step:
            return None
        # Not the path in the state: the folder may have moved.
        return self.root / f"checkpoint-{self.state.best_global_step}"

    # -- writing -----------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint under another name and moves it into place when all of it is on disk.

        A search for the newest checkpoint therefore never finds an incomplete one, whenever this
        process is killed.
        """
        state = self.state
        name = f"checkpoint-{state.global_step}"
        partial = self.root / PARTIAL
        if self.args.local_process_index == 0:
            shutil.rmtree(partial, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            self._write(partial / name)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self.accelerator.wait_for_everyone()
        if self.args.local_process_index == 0:
            _move(partial, self.root, name)
        self.accelerator.wait_for_everyone()
        self.rotate()

    def rotate(self, ended: bool = False) -> None:
        """Deletes the oldest checkpoints beyond the recipe's limit, but for the best one and, until
        the run has ended, the newest one.
        """
        limit = self.args.save_total_limit
        if limit is None or not self.args.should_save:
            return
        found = checkpoints_of(self.root)
        old = [path for path in (found if ended else found[:-1]) if path != self.best]
        for path in old[: max(len(found) - limit, 0)]:
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, folder: Path) -> None:
        """Writes all files of a checkpoint; all processes call it."""
        self.save_model(str(folder))
        if not self.args.save_only_model:
            self._save_optimizer(folder)
            self.save_random_numbers(str(folder))
        if self.best is not None:
            self.state.best_model_checkpoint = str(self.best)
        if self.args.should_save:
            exported = {type(part).__name__: part.state() for part in self.parts}
            # Earlier versions expect this entry.
            exported["TrainerControl"] = TrainerControl(should_save=True).state()
            self.state.stateful_callbacks = exported  # type: ignore[assignment]
            self.state.save_to_json(str(folder / STATE))

    def save_model(self, folder: str) -> None:
        """Writes the drafter as transformers does; all processes call it, and the first one writes."""
        weights = None
        if is_deepspeed(self.accelerator):
            weights = self.accelerator.get_state_dict(self.trained.model)  # gathered, under ZeRO-3
        if self.args.should_save:
            os.makedirs(folder, exist_ok=True)
            self.trained.drafter.save_pretrained(folder, state_dict=weights, is_main_process=True)

    def _save_optimizer(self, folder: Path) -> None:
        if is_deepspeed(self.accelerator):
            self.trained.model.save_checkpoint(str(folder))  # global_step*: each process its shards
        elif self.args.should_save:
            torch.save(self.trained.optimizer.state_dict(), folder / OPTIMIZER)
        if not self.args.should_save:
            return
        by_engine = isinstance(self.trained.schedule, DeepSpeedSchedulerWrapper)
        if not by_engine:  # DeepSpeed saves its own
            torch.save(self.trained.schedule.state_dict(), folder / SCHEDULE)
        if self.accelerator.scaler is not None:
            torch.save(self.accelerator.scaler.state_dict(), folder / SCALER)

    def save_random_numbers(self, folder: str) -> None:
        """Writes the states of this process's random number generators."""
        states: Json = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.random.get_rng_state(),
        }
        if torch.cuda.is_available() and self._distributed:
            states["cuda"] = torch.cuda.random.get_rng_state_all()
        elif torch.cuda.is_available():
            states["cuda"] = torch.cuda.random.get_rng_state()
        os.makedirs(folder, exist_ok=True)
        torch.save(states, os.path.join(folder, self._random_name))

    @property
    def _distributed(self) -> bool:
        return self.args.parallel_mode == ParallelMode.DISTRIBUTED

    @property
    def _random_name(self) -> str:
        if self.args.world_size > 1:
            return f"rng_state_{self.args.process_index}.pth"
        return "rng_state.pth"

    # -- restoring ---------------------------------------------------------------------------------

    def load(self, checkpoint: str) -> None:
        """Restores optimizer, schedule and loss scale; under DeepSpeed the weights too."""
        folder = Path(checkpoint)
        if is_deepspeed(self.accelerator):
            self._load_engine(checkpoint)
        elif (folder / OPTIMIZER).is_file() and (folder / SCHEDULE).is_file():
            # On a GPU the optimizer's state is read there: several copies may not fit the host.
            place = torch.device("cpu")
            if self.args.world_size > 1 and self.args.device.type != "cpu":
                place = self.args.device
            optimizer = torch.load(folder / OPTIMIZER, map_location=place, weights_only=True)
            self.trained.optimizer.load_state_dict(optimizer)
        by_engine = isinstance(self.trained.schedule, DeepSpeedSchedulerWrapper)
        if (folder / SCHEDULE).is_file() and not by_engine:
            schedule = torch.load(folder / SCHEDULE, weights_only=True)
            self.trained.schedule.load_state_dict(schedule)
        if (folder / SCALER).is_file() and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(
                torch.load(folder / SCALER, weights_only=True),
            )

    def _load_engine(self, checkpoint: str) -> None:
        """Restores DeepSpeed's weights, optimizer and schedule from its shards."""
        found = any(Path(checkpoint).glob("global_step*"))
        if not found or self.trained.model.load_checkpoint(checkpoint)[0] is None:
            raise UserError(
                f"checkpoint={checkpoint!r} holds no state of DeepSpeed; go on as the run began, or start again with "
                "resume=false"
            )

    def restore_random_numbers(self, checkpoint: str) -> None:
        """Restores this process's random number generators, if the checkpoint has their states."""
        path = Path(checkpoint) / self._random_name
        if not path.is_file():
            return
        with safe_globals():
            states = torch.load(path, weights_only=True)
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.random.set_rng_state(states["cpu"])
        if "cuda" not in states or not torch.cuda.is_available():
            return
        if self._distributed:
            torch.cuda.random.set_rng_state_all(states["cuda"])
        else:
            torch.cuda.random.set_rng_state(states["cuda"])

    def take_best(self) -> None:
        """Restores the weights of the best checkpoint unless the last step's are the best."""
        best = self.best
        if best is None or not best.is_dir() or _step_of(best) == self.state.global_step:
            return
        if is_deepspeed(self.accelerator):
            self._load_engine(str(best))
        else:
            load_weights(self.trained.drafter, str(best))


def load_state(checkpoint: str | None) -> TrainerState:
    """The state that a run begins with: a checkpoint's, or that of step 0."""
    if checkpoint is None:
        return TrainerState()
    return TrainerState.load_from_json(os.path.join(checkpoint, STATE))


def load_weights(drafter: TrainableDrafter, checkpoint: str) -> None:
    """Restores a drafter's weights; kinds whose files have other names load their own."""
    if drafter.load_checkpoint(checkpoint):
        return
    weights = os.path.join(checkpoint, WEIGHTS)
    if os.path.isfile(weights):
        # Tied weights are in the file once.
        drafter.load_state_dict(load_file(weights, device="cpu"), strict=False)
    else:
        load_sharded_checkpoint(drafter, checkpoint, strict=False)


def sync_files(folder: Path) -> None:
    """Waits until all files of a folder are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _move(partial: Path, root: Path, name: str) -> None:
    """Syncs a finished checkpoint to the disk and moves it into place; on a shared disk only the
    first node's move succeeds.
    """
    try:
        sync_files(partial / name)
        if (partial / name).exists() and (root / name).exists():
            # written by an earlier run of the same steps
            os.replace(root / name, partial / "before")
        os.replace(partial / name, root / name)
    except FileNotFoundError:  # another node has moved it
        return
    shutil.rmtree(partial, ignore_errors=True)


# -- finding -------------------------------------------------------------------------------------


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
        needed: patterns of file names that must be there.
    """
    skipped = "it is skipped"
    saved = checkpoint / STATE
    try:
        state = read_json(saved, "checkpoint", skipped, SavedState)
        if state["global_step"] != _step_of(checkpoint):
            return f"{STATE} is that of step {state['global_step']}"
        with reading(saved, "checkpoint", skipped):
            TrainerState.load_from_json(str(saved))
        for file in sorted(checkpoint.rglob("*.safetensors")):
            open_tensors(file, "checkpoint", skipped)
        for file in sorted(checkpoint.glob("*.pt*")):
            with reading(file, "checkpoint", skipped):
                _check_archive(file)
    except UserError as error:
        return str(error)
    for pattern in needed:
        if not any(checkpoint.rglob(pattern)):
            return f"it holds no {pattern}"
    return ""


def _check_archive(file: Path) -> None:
    """Reads a file that torch has written. Raises ValueError, or what reading raises."""
    with zipfile.ZipFile(file) as archive:
        if bad := archive.testzip():
            raise ValueError(f"the checksum of {bad} is wrong")
        with safe_globals():
            torch.load(
                file,
                map_location="cpu",
                weights_only=True,
                mmap=True,
            )


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints_of(place: Path) -> list[Path]:
    """The checkpoints in a folder by their steps. Folders of other names are the user's."""
    found = []
    for path in place.glob("checkpoint-*"):
        if path.is_dir() and path.name.removeprefix("checkpoint-").isdecimal():
            found.append(path)
    return sorted(found, key=_step_of)


def newest_checkpoint(args: TrainingArguments) -> str | None:
    """The newest checkpoint in output_dir, if there is one."""
    found = checkpoints_of(Path(str(args.output_dir)))
    return str(found[-1]) if found else None


def find_checkpoint(
    args: TrainingArguments,
    resume: bool,
    output: OutputFolder | None = None,
) -> str | None:
    """The checkpoint to resume from: the newest that is not damaged, with a line about each one
    that is.

    With resume=False the checkpoints of an earlier run are set aside until this run's drafter is
    saved.

    Raises UserError: every checkpoint is damaged, or one that another program wrote is in the way.
    """
    place = Path(str(args.output_dir))
    if not resume:
        with args.main_process_first(desc="setting old checkpoints aside"):
            if output is not None:
                output.set_aside("checkpoint-*")

    found = checkpoints_of(place)
    if found and not resume:
        # Whole checkpoints, or what somebody put into ours.
        names = []
        for path in found:
            inside = [path]
            if not (path / STATE).is_file():
                inside = sorted(file for file in path.rglob("*") if file.is_file())
            names += [str(file.relative_to(place)) for file in inside]
        shown = ", ".join(names[:3])
        if output is not None:
            output.restore()
        raise UserError(
            f"output_dir={str(place)!r} contains {shown}, which no run of drafttrain wrote there; move it away, or "
            "choose another folder"
        )
    for path in reversed(found):
        needed: tuple[str, ...] = ("*.safetensors", OPTIMIZER, SCHEDULE, "rng_state*.pth")
        if args.save_only_model or any(path.glob("global_step*")):  # DeepSpeed's own layout
            needed = ()
        fault = damage(path, needed)
        if not fault:
            return str(path)
        if args.process_index == 0:
            print(f"{path} is damaged and not used: {fault}", file=sys.stderr, flush=True)
    if found:
        raise UserError(
            f"output_dir={str(place)!r}: all checkpoints are damaged; start again with resume=false"
        )
    return None
