"""`drafttrain plan`: its help and flags."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, fields
from typing import Literal

from drafttrain.errors import UserError, shown
from drafttrain.flags import add_overrides
from drafttrain.tuning.hardware import DEVICES
from drafttrain.values import (  # fmt: skip
    File,
    Name,
    Place,
    PositiveAmount,
    PositiveFraction,
    Size,
    StoreDtype,
    adder,
    check_fields,
    default_of,
    key,
    kinds_of,
    reader,
    value,
)

HELP = """Memory, disk and hours of a training run, before anything is downloaded; and what to change if it does not fit.

  drafttrain plan llama-3.1-8b/eagle3 --gpu-memory 24
  drafttrain plan configs/smollm2-135m/eagle3.yaml per_device_train_batch_size=2 --gpus 8 --disk 4T --output plan.json

Memory comes from the training step itself, run on tensors without data. Hours come from a roofline and are not measured. Of the
target only its config.json is read: from --target-config, from target.json next to the recipe, or by the target's name."""

_UNITS = {"": 1.0, "G": 1.0, "T": 1e3, "M": 1e-3}


@dataclass(frozen=True)
class Job:
    """What is planned besides the recipe. Raises UserError for values out of range."""

    gpus: Size = key(
        0, "that train; 0 takes the processes of the accelerate file in --deepspeed, else 1"
    )
    device: Name = key("h100", f"rates and memory, one of {', '.join(DEVICES)}")
    gpu_memory: PositiveAmount | None = key(None, "GB of 10^9 bytes, instead of the device's")
    disk: PositiveAmount | None = key(
        None, "free space in GB, or such as 4T; without it there is no limit"
    )
    deepspeed: Name = key(
        "",
        "ZeRO stage from 0 to 3, DeepSpeed JSON or accelerate YAML; empty: the recipe's, else 2 on several GPUs, 0 on one",
    )
    states: Literal["", "online", "stored", "vllm"] = key(
        "",
        "where the target's come from: online, stored or vllm; empty: as the recipe and its data say",
    )
    store_dtype: StoreDtype = key("bfloat16", "of stored states")
    conversations: Size = key(0, "of the data; 0: as many as the recipe's data has, else 60,000")
    tokens: Size = key(0, "of a conversation on average; 0: as in the recipe's data, else 1024")
    prompt_tokens: Size = key(128, "of them in the prompt")
    target_config: File | None = key(None, "the target's config.json, where its name leads to none")
    init_config: File | None = key(None, "config.json of the model that the recipe's init names")
    compute_efficiency: PositiveFraction = key(0.4, "achieved share of the device's FLOP rate")
    memory_efficiency: PositiveFraction = key(0.75, "achieved share of the device's bandwidth")

    def __post_init__(self) -> None:
        check_fields(self)


def _gigabytes(word: str) -> float:
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([GTM]?)B?", word.strip().upper())
    if not found or not float(found[1]):
        raise UserError(f"={shown(word)} must be an amount such as 500G or 4T")
    return float(found[1]) * _UNITS[found[2]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    size = reader(_gigabytes, "gigabytes, or an amount such as 500G or 4T")
    kinds = kinds_of(Job)
    add("recipe", Place, help="a YAML recipe, or the name of one that comes with drafttrain")
    add_overrides(parser)
    for one in fields(Job):
        default = default_of(one)
        sized = one.name in ("gpu_memory", "disk")
        if default in (None, "", 0):
            shown_default = ""
        else:
            shown_default = " (default: %(default)s)"
        if sized:
            kind = size
        else:
            kind = value(kinds[one.name])
        flag = f"--{one.name.replace('_', '-')}"
        meaning = one.metadata["meaning"]
        parser.add_argument(flag, type=kind, default=default, help=meaning + shown_default)
    add("--output", Name, help="JSON file with the same figures")
