"""`drafttrain trace`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.flags import (
    add_drafter_flag,
    add_sampling_flags,
    add_target_flags,
    add_template_flag,
)
from drafttrain.values import Count, Place, adder

HELP = """Show who produced each token of one answer, and what a round drafted.

  drafttrain trace --target smollm2-135m --drafter runs/drafter --prompt "Name three rivers." --output trace.html
  drafttrain trace --target smollm2-135m --drafter ngram --prompt "Count to ten, twice." --tree chain:4 --round 12

The drafter's tokens are shaded by the depth at which they were accepted; the others are the target's own. The page shows the
tree of every round, the terminal that of --round (default: the round that accepted most)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add_target_flags(parser)
    add_drafter_flag(parser)
    add("--prompt", required=True, help="the user's message; the chat template is applied")
    add_template_flag(parser)
    add(
        "--tree",
        help="chain:3, dynamic:5,8,24, ... (default: the tree in the drafter's decoding.json, else chain:3)",
    )
    add_sampling_flags(parser)
    add("--max-new-tokens", Count, default=96, help="length of the answer")
    add("--round", Count, help="the round whose tree is shown")
    add("--output", Place, help="page to write (.html)")
