"""`drafttrain export`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.flags import SCHEDULE_HELP, WEIGHTS_HELP, add_drafter_flag
from drafttrain.formats.engines import FORMATS, GGUF_TYPES, engine_of
from drafttrain.values import Depth, File, FileDtype, Name, Place, adder

TARGET_GGUF = "target.gguf"

HELP = """Write a drafter in the form that an engine loads, and print how to serve it.

  drafttrain export --drafter runs/drafter --format vllm --output runs/export

Without --format, lists the formats that the drafter can be written in; docs/reference/cli.md lists those of every kind.
--format gguf --target-gguf float16 also writes the target as GGUF file, where none is at hand.
A drafter with features that the format does not support is an error that lists them. For n-grams, which engines
draft by themselves, --drafter with that kind's name prints their settings. Check the result by:

  drafttrain verify --drafter runs/drafter --exported runs/export"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add_drafter_flag(
        parser,
        trained=True,
        more=", or a kind without weights, to print its recipes only",
    )
    add("--format", choices=FORMATS, help="whose format")
    add("--output", Place, help="folder to write")
    newest = ", ".join(
        f"{form}: {engine_of(form).name} {engine_of(form).release}" for form in FORMATS
    )
    add(
        "--engine-version",
        Name,
        default="",
        help=f"release of the engine that is to load it (default: {newest})",
    )
    add("--dtype", FileDtype, default="bfloat16", help=WEIGHTS_HELP)
    add(
        "--target",
        Name,
        default="",
        help="name in recipes; has the tokenizer (default: the recorded one)",
    )
    more = f"with --format gguf: also write the target, as {TARGET_GGUF} of this type"
    add("--target-gguf", choices=GGUF_TYPES, help=more)
    add(
        "--speculative-tokens",
        Depth,
        help="drafted per round (default: the depth in decoding.json, else 3)",
    )
    add("--schedule", File, help=SCHEDULE_HELP)
