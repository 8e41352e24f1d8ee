"""The most memory that was in use: of the GPU, or of the process where there is none."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

import torch


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
