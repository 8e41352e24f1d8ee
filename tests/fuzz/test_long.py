"""The fuzz tests with thirty times the examples, chosen anew each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_many_more_examples():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-m",
        "not slow",
        str(Path(__file__).parent),
    ]
    scaled = {**os.environ, "FUZZ_SCALE": os.environ.get("FUZZ_SCALE", "30")}
    subprocess.run(command, check=True, env=scaled)
