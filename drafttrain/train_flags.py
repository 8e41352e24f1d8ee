"""`drafttrain train`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.config import TrainConfig
from drafttrain.values import Place, adder, key_table

HELP = """Train a drafter from a YAML recipe.

  accelerate launch drafttrain/train.py configs/smollm2-135m/eagle3.yaml data=runs/data max_steps=500
  drafttrain train configs/smollm2-135m/eagle3.yaml drafter.ttt_steps=3     (one process, same result)
  accelerate launch -m drafttrain.train --recipe llama-3.1-8b/eagle3 data=runs/data       (drafttrain recipes lists the names)

Start an interrupted run again to continue it from its newest checkpoint;
a finished run is left unchanged. Ctrl-C and SIGTERM save a checkpoint after the running step and exit with status 130 and 143;
a second Ctrl-C ends at once. A recipe's keys are these, and every field of transformers TrainingArguments;
docs/reference/config.md has their types and ranges:

""" + key_table(TrainConfig)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("config", Place, nargs="?", help="a YAML recipe, or the name of one that comes with drafttrain")
    add("--recipe", Place, metavar="NAME", help="the same as a flag; drafttrain recipes lists the names")
    replaces = "replace a value of the recipe; a.b=c sets b in a"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=replaces)
