"""Runs a script or a module under a pretend GPU: `python -m tests.gpu.under eval/bench_loss.py --tokens 8`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")


def main() -> None:
    name, *words = sys.argv[1:]
    sys.argv = [name, *words]
    from tests.gpu.pretend import PretendGpu

    with PretendGpu():
        if name.endswith(".py"):
            sys.path.insert(0, str(Path(name).parent))
            runpy.run_path(name, run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
