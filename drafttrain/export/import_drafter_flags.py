"""`drafttrain import`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.flags import TARGET_HELP
from drafttrain.values import Place, adder

HELP = """Bring a published drafter into drafttrain, to measure, tune or train it further.

Import reads what trainers and engines publish: docs/reference/cli.md lists the forms,
docs/publishing.md the projects and releases.

  drafttrain import --checkpoint yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --target meta-llama/Llama-3.1-8B-Instruct \\
      --allow-pickle --output runs/eagle3-llama
  drafttrain eval --target meta-llama/Llama-3.1-8B-Instruct --drafter runs/eagle3-llama --output results.json

Before the drafter is kept, it is exported and checked as by drafttrain verify. Of the target only config and tokenizer are read,
and the embedding if the drafter brings one.
Nothing runs on load: weights are safetensors, unless --allow-pickle admits a .bin file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--checkpoint", Place, required=True, help="folder or Hub id of the drafter")
    add("--target", Place, required=True, help=f"the model it was trained for: {TARGET_HELP}")
    add("--output", Place, required=True, help="folder to write")
    add(
        "--allow-pickle",
        action="store_true",
        help="also read .bin and .pt files (torch.load with weights_only)",
    )
    add(
        "--trust-remote-code",
        action="store_true",
        help="run model code that comes with the target",
    )
