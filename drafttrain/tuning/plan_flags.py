"""`drafttrain plan`: its help and flags."""

from __future__ import annotations

import argparse
import re
from typing import get_args

from drafttrain.errors import UserError, shown
from drafttrain.tuning.hardware import DEVICES
from drafttrain.values import Count, File, Name, Place, PositiveFraction, StoreDtype, adder, reader

HELP = """Memory, disk and hours of a training run, before anything is downloaded; and what to change if it does not fit.

  drafttrain plan llama-3.1-8b/eagle3 --gpu-memory 24
  drafttrain plan configs/smollm2-135m/eagle3.yaml per_device_train_batch_size=2 --gpus 8 --disk 4T --output plan.json

Memory comes from the training step itself, run on tensors without data. Hours come from a roofline and are not measured. Of the
target only its config.json is read: from --target-config, from target.json next to the recipe, or by the target's name."""

_UNITS = {"": 1.0, "G": 1.0, "T": 1e3, "M": 1e-3}


def _gigabytes(word: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([GTM]?)B?", word.strip().upper())
    if not found or not float(found[1]):
        raise UserError(f"={shown(word)} must be an amount such as 500G or 4T")
    return float(found[1]) * _UNITS[found[2]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add, size = adder(parser), reader(_gigabytes, "gigabytes, or an amount such as 500G or 4T")
    add("recipe", Place, help="a YAML recipe, or the name of one that comes with drafttrain")
    replaces = "replace a value of the recipe; a.b=c sets b in a"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=replaces)
    add("--gpus", Count, default=0, help="that train (default: the processes of --deepspeed's accelerate file, else 1)")
    add("--device", choices=sorted(DEVICES), default="h100", help="rates and memory (default: %(default)s)")
    add("--gpu-memory", size, help="GB of 10^9 bytes, instead of the device's")
    add("--disk", size, help="free space, such as 4T (default: no limit)")
    stage = (
        "ZeRO stage 0 to 3, DeepSpeed JSON or accelerate YAML (default: the recipe's; else 2 on several GPUs, 0 on one)"
    )
    add("--deepspeed", Name, default="", help=stage)
    states = "where the target's states come from (default: as the recipe and its data say)"
    add("--states", choices=("online", "stored", "vllm"), default="", help=states)
    add("--store-dtype", choices=get_args(StoreDtype), default="bfloat16", help="of stored states")
    add("--conversations", Count, default=0, help="of the data (default: those of the recipe's data, else 60000)")
    add("--tokens", Count, default=0, help="of a conversation on average (default: as in the data, else 1024)")
    add("--prompt-tokens", Count, default=128, help="of them in the prompt (default: %(default)s)")
    add("--target-config", File, help="the target's config.json")
    add("--init-config", File, help="config.json of the model that the recipe's init names")
    share = "achieved share of the device's {} (default: %(default)s)"
    add("--compute-efficiency", PositiveFraction, default=0.4, help=share.format("FLOP rate"))
    add("--memory-efficiency", PositiveFraction, default=0.75, help=share.format("bandwidth"))
    add("--output", Name, help="JSON file with the same figures")
