"""`drafttrain ngram-store`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.flags import TARGET_HELP
from drafttrain.values import Count, Depth, File, Place, adder

HELP = """Count the tokens that follow each n-gram of a corpus: a drafter without training. The target's answers work best.

  drafttrain ngram-store --data runs/data --output runs/store.safetensors
  drafttrain ngram-store --text corpus.txt --target smollm2-135m --output runs/store.safetensors
  drafttrain eval --target smollm2-135m --drafter runs/drafter+suffix:runs/store.safetensors"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add(
        "--data",
        Place,
        metavar="DIR",
        help="a data set made by drafttrain generate: its responses are counted",
    )
    add(
        "--text",
        File,
        metavar="FILE",
        help="JSON lines with text or messages, or plain text with a document per line",
    )
    add("--target", Place, help="tokenizes --text: " + TARGET_HELP)
    add("--output", Place, required=True, metavar="FILE.safetensors", help="the store")
    add("--max-n", Depth, default=4, help="longest context, in tokens")
    add(
        "--max-entries",
        Count,
        default=4_000_000,
        help="continuations kept, 16 bytes each; the most frequent stay",
    )
