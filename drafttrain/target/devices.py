"""Names of numeric formats and devices."""

from __future__ import annotations

import os

import torch

from drafttrain.errors import UserError, shown
from drafttrain.ops.packing import cpu_has_bfloat16

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str, device: torch.device | None = None) -> torch.dtype:
    """The dtype of a name. 'auto' is bfloat16 where `device` multiplies it natively, else float32.

    Raises UserError for an unknown name; without a device also for 'auto', as for files, which have a dtype and no device.
    """
    if name == "auto" and device is not None:
        fast = device.type == "cuda" or (device.type == "cpu" and cpu_has_bfloat16())
        return torch.bfloat16 if fast else torch.float32
    if not isinstance(name, str) or name not in DTYPES:
        names = DTYPES if device is None else ["auto", *DTYPES]
        raise UserError(f"dtype={shown(name)} is not one of {', '.join(names)}")
    return DTYPES[name]


def resolve_device(name: str = "auto") -> torch.device:
    """The device of a name. 'auto' is this process's GPU, or the CPU if there is none.

    Raises UserError for a device that torch does not know, or that this machine lacks.
    """
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    found = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if found is None else torch.accelerator.device_count()
    try:
        device = torch.device(name)
        if device.type == "cpu" or (found is not None and device.type == found.type and (device.index or 0) < count):
            return device
    except (RuntimeError, TypeError, ValueError):  # torch lists all types that it was ever built for
        pass
    here = ["auto", "cpu", *([found.type] if found else []), *(f"{found.type}:{n}" for n in range(count) if found)]
    raise UserError(f"device={shown(name)} is not one of {', '.join(here)}, which this machine has")


def share_of_gpus() -> dict[int | str, int] | None:
    """Bytes that a spread target may use of each GPU, of n processes on a machine every n-th; None without GPUs."""
    if not torch.cuda.is_available():
        return None
    processes, mine = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    # The first of a process's GPUs also holds the drafter, its optimizer and all activations.
    gpus = range(mine, torch.cuda.device_count(), processes)
    return {gpu: int(torch.cuda.mem_get_info(gpu)[0] * (0.5 if gpu == mine else 0.9)) for gpu in gpus}
