"""drafttrain's version and data files; device, threads, versions and peak memory of a measurement.

torch and transformers load inside the functions, because `drafttrain --version` imports this
module.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import resource
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__version__ = "0.1.0"


def shipped_folder(name: str) -> Path:
    """A folder of files that come with drafttrain, such as `eval/suites`.

    It lies in the repository, or where a wheel installs it.
    """
    repository = Path(__file__).resolve().parents[1]
    if (repository / "pyproject.toml").is_file():
        return repository / name
    # Of pip install, of its --user, and of its --target, which is the folder of the package's own.
    user = sysconfig.get_path("data", sysconfig.get_preferred_scheme("user"))
    roots = (sysconfig.get_path("data"), user, repository)
    places = [Path(root, "share", "drafttrain", Path(name).name) for root in roots]
    for place in places:
        if place.is_dir():
            return place
    return places[0]


def suites_folder() -> Path:
    """The evaluation suites that come with drafttrain."""
    return shipped_folder("eval/suites")


def device_name(device: torch.device) -> str:
    """The GPU's or the CPU's name."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    for name in (_proc_field("cpuinfo", "model name"), platform.processor()):
        if name:
            return name
    return device.type


def describe_environment(device: torch.device) -> dict[str, object]:
    """The part of every result's JSON that names the versions and the machine."""
    import torch
    import transformers

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


def describe_run() -> dict[str, object]:
    """When, where and by which code a measurement was made, on which its figures do not depend.

    Returns:
        date; machine; commit: of a checkout of drafttrain, `-dirty` after changes; None for an
        installed package.
    """
    root = Path(__file__).parents[1]
    commit = None
    if (root / ".git").exists() and (root / "pyproject.toml").is_file():
        words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        words.append("--exclude=*")  # no tags
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                words,
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
            commit = done.stdout.strip()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "date": date,
        "commit": commit,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def reset_peak(device: torch.device) -> None:
    """Starts a new measurement of peak memory, where the system can."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # Linux only; elsewhere the peak is the process's so far
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated on the GPU since `reset_peak`, else resident in the process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    resident = _proc_field("self/status", "VmHWM")  # "1234 kB"
    if resident:
        return int(resident.split()[0]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":  # bytes there, kibibytes elsewhere
        return most
    return most * 1024


def _proc_field(file: str, name: str) -> str:
    """The value of the first line `name: value` of a file in /proc; '' where there is none."""
    path = Path("/proc") / file
    if not path.is_file():
        return ""
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""
