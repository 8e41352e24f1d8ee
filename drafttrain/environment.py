"""What a measurement depends on besides its settings: device, threads, versions."""

from __future__ import annotations

import platform
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
