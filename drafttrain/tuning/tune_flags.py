"""`drafttrain tune`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.flags import (
    add_drafter_flag,
    add_sampling_flags,
    add_target_flags,
    add_template_flag,
)
from drafttrain.values import Count, File, Place, adder

TOKENS = 64
ROWS = 6
REPEATS = 2

HELP = """Find the fastest tree for a drafter on this machine, and keep it as the drafter's default.

  drafttrain tune --target smollm2-135m --drafter runs/quickstart/drafter+ngram --output tune.json

Takes about a minute for a small model: records acceptance once, measures costs by nodes and depth, predicts all candidates
from both, and measures the best one against plain decoding. Writes decoding.json into the drafter's folder, which
`drafttrain eval` and `drafttrain.generate` read. Speed-ups are of decoding; the prompt's pass is not counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add_target_flags(parser)
    add_drafter_flag(parser)
    add_template_flag(parser, "; those of a row of --calibrate come first")
    add_sampling_flags(parser, seed=False)
    add(
        "--calibrate",
        File,
        metavar="FILE",
        help="JSONL of messages, turns or text (default: built-in prompts)",
    )
    add("--prompts", Count, default=ROWS, help="prompts at most (default: %(default)s)")
    add("--max-new-tokens", Count, default=TOKENS, help="per prompt (default: %(default)s)")
    add("--repeats", Count, default=REPEATS, help="of the final measurement (default: %(default)s)")
    add(
        "--output",
        Place,
        help="what was measured and predicted (default: tune.json beside the drafter)",
    )
    add("--dry-run", action="store_true", help="leave the drafter's decoding.json as it is")
