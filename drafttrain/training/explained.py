"""Exhausted memory and disk, as errors that say what to change."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import torch
from transformers import TrainingArguments

from drafttrain.errors import UserError, text_of
from drafttrain.files import is_disk_full
from drafttrain.states.ahead import StatesLostError
from drafttrain.training.checkpoint import newest_checkpoint

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
        raise UserError(f"{error}; {_kept(args)}") from error
    except UserError:
        raise
    except Exception as error:
        text = text_of(error)
        no_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if no_memory or any(sign in text for sign in _NO_MEMORY):
            batch = args.per_device_train_batch_size
            steps = args.gradient_accumulation_steps
            smaller = "drafter.ttt_steps lower"
            if batch > 1:
                smaller = (
                    f"per_device_train_batch_size={batch // 2} gradient_accumulation_steps={2 * steps} (now {batch} and "
                    f"{steps}; the same training in half the memory)"
                )
            raise UserError(
                f"out of memory on {args.device} ({text[:120]}); set {smaller}, or max_length or cache_gb lower; "
                f"{_kept(args)}"
            ) from error
        if is_disk_full(error):
            place = str(args.output_dir)
            free = 0
            if os.path.isdir(place):
                free = shutil.disk_usage(place).free
            raise UserError(
                f"output_dir={place!r}: no space left on the device while saving ({free / 1e6:.0f} MB free); free some "
                f"space, or set save_total_limit lower ({args.save_total_limit}); {_kept(args)}"
            ) from error
        raise


def _kept(args: TrainingArguments) -> str:
    """What the run has written so far."""
    if last := newest_checkpoint(args):
        return f"{last} is kept, the same command continues from there"
    return "no checkpoint was written before"
