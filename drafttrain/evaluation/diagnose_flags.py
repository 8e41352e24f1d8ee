"""`drafttrain diagnose`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.values import File, Name, adder

HELP = """Say why acceptance is what it is, from results.json, and what to do.

  drafttrain diagnose results.json
  drafttrain diagnose results.json --drafter runs/drafter --apply

--apply writes the categories that speculation slows down into the drafter's decoding.json (`off`); `drafttrain eval` and
`generate(..., category=...)` then decode them plainly. Categories that pay are removed from the list again. Several files of
one drafter are compared by temperature."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("results", File, nargs="+", help="files written by drafttrain eval; each is diagnosed")
    add(
        "--drafter",
        Name,
        default="",
        help="the drafter's folder (default: the one that the results name)",
    )
    add(
        "--apply",
        action="store_true",
        help="write the categories to switch off into the drafter's decoding.json",
    )
