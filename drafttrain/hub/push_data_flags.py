"""`drafttrain push-data`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.hub.push_flags import add_publishing_flags
from drafttrain.values import Place, adder

HELP = """Publish a distillation data set on the Hugging Face Hub with a data card.

  drafttrain push-data --data runs/data --repo user/name-data --prompt-license "MIT (magpie, written by the target)" \\
      --dry-run --output runs/publish-data

The conversations are uploaded as JSON lines that drafttrain and datasets read; stored target states are not, they can be computed
again. --dry-run writes the folder and prints what would be uploaded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--data", Place, required=True, help="folder written by drafttrain generate")
    add(
        "--prompt-license",
        "--prompt-licence",
        required=True,
        help="license of the prompts (their source's), in words",
    )
    add(
        "--license",
        "--licence",
        default="",
        help="of the data set, as the Hub spells it (default: none stated)",
    )
    add_publishing_flags(parser)
