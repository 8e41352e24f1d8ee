"""SPEED-Bench's rows, by NVIDIA's own script: `drafttrain suites prepare speed-bench`."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

from drafttrain.errors import UserError, first_line
from drafttrain.evaluation.suites import load_suite
from drafttrain.outcome import conclude, next_command

# A commit names the script's content.
SCRIPT = (
    "https://raw.githubusercontent.com/NVIDIA-NeMo/Skills/aeda1da41ec2888848ffa094305b7669df493f6c/"
    "nemo_skills/dataset/speed-bench/prepare.py"
)
NEEDS = ("datasets", "numpy", "pandas", "tiktoken")
# Config -> the suite that reads its file.
SUITES = {"qualitative": "speed_bench"} | {
    f"throughput_{size}": f"speed_bench_{size}" for size in ("1k", "2k", "8k", "16k", "32k")
}


def run(args: argparse.Namespace) -> int:
    if not args.trust_remote_code:
        raise UserError(
            f"suites prepare speed-bench runs NVIDIA's script ({SCRIPT}), which downloads other owners' texts; read it, and "
            "give --trust-remote-code"
        )
    missing = [package for package in NEEDS if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(
            f"NVIDIA's script needs {', '.join(missing)}, which is not installed: pip install {' '.join(missing)}"
        )
    output = Path(args.output)
    if output.exists() and not output.is_dir():
        raise UserError(f"output={output} is a file; name a folder")
    wanted = list(SUITES) if args.config == "all" else [args.config]
    written = []
    rows = {}
    output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=output, prefix=".preparing-") as scratch:
        for config in wanted:
            file = output / f"{config}.jsonl"
            if not file.exists():
                write_config(config, file, Path(scratch))
                written.append(file)
            rows[config] = len(load_suite(f"{SUITES[config]}:{output}").questions)
            print(f"{config}: {rows[config]} rows", flush=True)
    first = SUITES[wanted[0]]
    then = next_command("eval", target="TARGET", drafter="DRAFTER", suite=f"{first}:{output}")
    conclude({"rows": rows}, written, then)
    return 0


def write_config(config: str, file: Path, scratch: Path) -> None:
    """Writes a config's rows; an interrupted script leaves no file.

    Raises:
        UserError: the script cannot be downloaded, or stops.
    """
    script = scratch / "prepare.py"
    if not script.exists():
        try:
            with urllib.request.urlopen(SCRIPT, timeout=60) as answer:
                script.write_bytes(answer.read())
        except OSError as error:
            raise UserError(
                f"NVIDIA's script cannot be downloaded from {SCRIPT} ({first_line(error)}); check the network"
            ) from error
    command = [sys.executable, str(script), "--config", config, "--output_dir", str(scratch)]
    status = subprocess.run(command, check=False).returncode
    made = scratch / file.name
    if status or not made.is_file():
        raise UserError(
            f"NVIDIA's script stopped at config={config} (exit status {status}; its lines are above); configs that are "
            "written are kept, so run the command again"
        )
    made.replace(file)
