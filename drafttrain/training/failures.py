"""Out of memory and out of disk space as one-line errors that say what to change."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from drafttrain.errors import UserError
from drafttrain.files import is_disk_full

# Parts of the messages for exhausted memory: torch's on a CPU, libraries' on a GPU.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


@contextlib.contextmanager
def explained(args: TrainingArguments) -> Iterator[None]:
    """Turns exhausted memory or disk, from loading to saving, into a UserError that says what to change.

    Args:
        args: the run's TrainingArguments.

    Raises:
        UserError: instead of the original error, which is its cause.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(sign in text for sign in _NO_MEMORY):
            batch, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
            smaller = (
                f"per_device_train_batch_size={max(batch // 2, 1)} gradient_accumulation_steps={2 * steps} (now {batch} and "
                f"{steps}; the same training in half the memory)"
                if batch > 1
                else "max_length or drafter.ttt_steps lower"
            )
            raise UserError(
                f"out of memory on {args.device} ({text[:120]}); set {smaller}, or max_length or cache_gb lower; {_kept(args)}"
            ) from error
        if is_disk_full(error):
            place = str(args.output_dir)
            free = shutil.disk_usage(place).free if os.path.isdir(place) else 0
            raise UserError(
                f"output_dir={place!r}: no space left on the device while saving ({free / 1e6:.0f} MB free); free some space, "
                f"or set save_total_limit lower ({args.save_total_limit}); {_kept(args)}"
            ) from error
        raise


def _kept(args: TrainingArguments) -> str:
    place = str(args.output_dir)
    last = get_last_checkpoint(place) if os.path.isdir(place) else None
    return f"{last} is kept, the same command continues from there" if last else "no checkpoint was written before"
