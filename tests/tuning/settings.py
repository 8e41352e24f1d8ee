"""A setting of a training run, to be planned."""

from __future__ import annotations

import torch

from drafttrain.tuning.plan_memory import Setting

SETTING = Setting(
    rows=4,
    length=1024,
    eval_rows=0,
    prompt=128,
    gpu=True,
    target_dtype=torch.bfloat16,
    half=True,
    checkpointing=False,
    states="online",
)
