"""Names of numeric formats and devices."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from pathlib import Path

import torch

from drafttrain.errors import UserError, shown, text_of
from drafttrain.ops.packing import cpu_has_bfloat16

logger = logging.getLogger(__name__)
_PCI = Path("/sys/bus/pci/devices")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(
    name: str | torch.dtype,
    device: torch.device | None = None,
) -> torch.dtype:
    """The dtype of a name, or one of DTYPES itself.

    'auto' is bfloat16 where `device` multiplies it natively, else float32.

    Raises:
        UserError: an unknown name; without a device also 'auto', as for files, which have a dtype
            and no device.
    """
    if name == "auto" and device is not None:
        fast = False
        if device.type == "cuda":
            fast = has_bfloat16()
        elif device.type == "cpu":
            fast = cpu_has_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    if isinstance(name, torch.dtype) and name in DTYPES.values():
        return name
    if not isinstance(name, str) or name not in DTYPES:
        names = list(DTYPES)
        if device is not None:
            names.insert(0, "auto")
        raise UserError(f"dtype={shown(name)} is not one of {', '.join(names)}")
    return DTYPES[name]


def has_bfloat16() -> bool:
    """Whether this process's GPU multiplies bfloat16 natively.

    Compute capability 8.0 or higher and ROCm do.
    """
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def resolve_device(name: str | torch.device = "auto") -> torch.device:
    """The device of a name, or a device itself.

    'auto' is this process's GPU, or the CPU if there is none; the log says which and why.

    Raises:
        UserError: a device that torch does not know, or that this machine lacks; 'auto' where a GPU
            cannot be used.
    """
    if name == "auto":
        name = usual_device()
    here = ["auto", "cpu"]
    found = torch.accelerator.current_accelerator(check_available=True)
    count = 0
    if found is not None:
        count = torch.accelerator.device_count()
        here.append(found.type)
        here += [f"{found.type}:{n}" for n in range(count)]
    # torch's own message lists all types that it was ever built for.
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        device = torch.device(name)
        index = 0 if device.index is None else device.index
        on_accelerator = found is not None and device.type == found.type and index < count
        if device.type == "cpu" or on_accelerator:
            return device
    raise UserError(f"device={shown(name)} is not one of {', '.join(here)}, which this machine has")


@functools.cache  # the line is printed once
def usual_device() -> str:
    """This process's GPU, or the CPU on machines without one.

    Raises:
        UserError: a GPU that torch cannot use (its driver is too old or absent). The CPU would
            replace it at a hundredth of its speed.
    """
    name = "cpu"
    reason = cuda_failure()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not reason:
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        reason = torch.cuda.get_device_name(name)
    elif torch.version.cuda and not hidden and _expects_gpu(reason):
        raise UserError(
            f"device='auto': torch {torch.__version__} is built for CUDA {torch.version.cuda}, but no GPU can be used "
            f"({reason}); install a driver for it, or torch for the driver's CUDA, or choose the CPU: --device cpu "
            "(training: use_cpu=true)"
        )
    logger.info(f"device {name}: {reason}")
    return name


def cuda_failure() -> str:
    """Why torch has no usable GPU, as a short text; '' if it has one."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError for drivers, AssertionError for builds
        return text_of(error).partition(". ")[0]
    return "no GPU is visible"


def _expects_gpu(reason: str) -> bool:
    """Whether the machine has a driver, or a display or compute device of NVIDIA on its PCI bus."""
    if "no NVIDIA driver" not in reason:
        return True
    for vendor in _PCI.glob("*/vendor"):
        if vendor.read_text().strip() != "0x10de":  # NVIDIA's number
            continue
        if (vendor.parent / "class").read_text().startswith("0x03"):
            return True
    return False


def share_of_gpus() -> dict[int | str, int] | None:
    """Bytes that a spread target may use of each GPU; None without GPUs.

    Of n processes on a machine each uses every n-th GPU.
    """
    if not torch.cuda.is_available():
        return None
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    mine = int(os.environ.get("LOCAL_RANK", 0))
    shares: dict[int | str, int] = {}
    for gpu in range(mine, torch.cuda.device_count(), processes):
        # The first of a process's GPUs also holds the drafter, its optimizer and all activations.
        share = 0.5 if gpu == mine else 0.9
        free, _ = torch.cuda.mem_get_info(gpu)
        shares[gpu] = int(free * share)
    return shares
