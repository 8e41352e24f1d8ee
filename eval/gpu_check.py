"""Whether drafttrain imports here, and on which device: the first step of eval/gpu_suite.sh.

    python eval/gpu_check.py --output eval/results/gpu/imports.json

Every module of the package is imported in this process. The result lists those that fail, the versions of what they need, and
what nvidia-smi says of the device: driver, clocks, memory.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "datasets",
    "pydantic",
    "numpy",
    "cyclopts",
)
QUERY = (
    "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
)
PACKED_COMMIT = (
    Path(__file__).resolve().parents[1] / "build" / "carried" / "commit"
)  # by gpu_pack.py
# vLLM imports these in its own processes.
ENGINE_SIDE = ("drafttrain.states.engines", "drafttrain.export.engines")


def failing_modules() -> dict[str, str]:
    """Modules of drafttrain that cannot be imported, each with its error."""
    import drafttrain

    failed = {}
    for module in pkgutil.walk_packages(drafttrain.__path__, "drafttrain."):
        if module.name.startswith(ENGINE_SIDE) or module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except Exception as error:
            failed[module.name] = f"{type(error).__name__}: {error}"
    return failed


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def device_state() -> dict[str, str]:
    """What nvidia-smi reports; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.splitlines()[0].split(", ")
    return dict(zip(QUERY.split(","), values, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    failed = failing_modules()
    from drafttrain.environment import describe_run

    result: dict[str, Any] = {
        "failed": failed,
        "python": sys.version.split()[0],
        "versions": versions(),
        "device": device_state(),
        **describe_run(),
    }
    if result["commit"] is None and PACKED_COMMIT.exists():  # a copy without .git
        result["commit"] = PACKED_COMMIT.read_text().strip()
    print(json.dumps(result, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
