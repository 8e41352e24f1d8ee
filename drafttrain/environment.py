"""What a measurement depends on besides its settings (device, threads, versions), and the memory it took."""

from __future__ import annotations

import contextlib
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from drafttrain import __version__


def device_name(device: torch.device) -> str:
    """The GPU's or the CPU's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or device.type)


def describe_environment(device: torch.device) -> dict[str, Any]:
    """The part of every result's JSON that says where it was measured."""
    return {
        "drafttrain": __version__,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }


def reset_peak(device: torch.device) -> None:
    """Forgets earlier peaks, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # Linux, and a kernel that allows it; else the peak is the process's so far
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated on the GPU since `reset_peak`, else resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    own = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
    unit = 1 if sys.platform == "darwin" else 1024
    return own or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
