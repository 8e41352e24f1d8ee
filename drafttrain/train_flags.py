"""`drafttrain train`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.config import TrainConfig, TrainerKeys
from drafttrain.flags import add_overrides
from drafttrain.values import Place, adder, key_table

HELP = f"""Train a drafter from a YAML recipe.

  accelerate launch drafttrain/train.py configs/smollm2-135m/eagle3.yaml data=runs/data max_steps=500
  drafttrain train configs/smollm2-135m/eagle3.yaml drafter.ttt_steps=3     (one process, same result)
  accelerate launch -m drafttrain.train --recipe llama-3.1-8b/eagle3 data=runs/data       (drafttrain recipes lists the names)

Start an interrupted run again to continue it from its newest checkpoint;
a finished run is left unchanged. Ctrl-C and SIGTERM save a checkpoint after the running step and exit with status 130 and 143;
a second Ctrl-C ends at once. `max_steps=4` may also be written `--max_steps 4`, `--max_steps=4` or `--max-steps 4`. A recipe's
keys are these, with their defaults; docs/reference/config.md has their types and ranges:

{key_table(TrainConfig)}

Keys of the trainer, as is every other field of transformers TrainingArguments:

{key_table(TrainerKeys)}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add(
        "config",
        Place,
        nargs="?",
        help="a YAML recipe, or the name of one that comes with drafttrain",
    )
    add(
        "--recipe",
        Place,
        metavar="NAME",
        help="the same as a flag; drafttrain recipes lists the names",
    )
    add_overrides(parser)
