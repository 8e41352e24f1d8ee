"""`drafttrain recipes`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.values import Place, adder

HELP = """List the recipes that come with drafttrain, print one, or copy it to edit.

  drafttrain recipes                                      one line each: name, GPUs, memory, disk, hours
  drafttrain recipes llama-3.1-8b/eagle3                  prints it: commands, GPUs, memory, hours, sources, keys
  drafttrain recipes llama-3.1-8b/eagle3 --copy .         writes it to configs/ here, with accelerate's and DeepSpeed's files
  drafttrain train --recipe llama-3.1-8b/eagle3 data=runs/data learning_rate=5e-5

The plans are sums over shapes and a roofline (drafttrain plan), not measurements."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("name", Place, nargs="?", help="a recipe as the list names it, TARGET/KIND, or a YAML file")
    add(
        "--copy",
        Place,
        metavar="DIR",
        help="write it below DIR/configs, from where the commands of its head work",
    )
