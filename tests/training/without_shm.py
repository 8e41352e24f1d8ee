"""Runs drafttrain/train.py without the C++ all-reduce for one machine that DeepSpeed would compile first.

Training never calls that all-reduce, which is one for inference; its compilation takes two minutes of a CPU.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
train = Path(__file__).resolve().parents[2] / "drafttrain" / "train.py"
runpy.run_path(str(train), run_name="__main__")
