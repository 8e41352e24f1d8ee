"""Compilation of Triton kernels for GPUs that this machine lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def compile_for_gpus(script: str, lines: list[str], cache: Path) -> None:
    """Runs a script that compiles a kernel for each line, in a process without Triton's interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    words = [sys.executable, "-c", script, *lines]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
