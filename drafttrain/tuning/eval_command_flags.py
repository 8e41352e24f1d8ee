"""`drafttrain eval`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.evaluation.baselines import ALL_BASELINES, BASELINES
from drafttrain.evaluation.suites import known_suites
from drafttrain.flags import (
    add_drafter_flag,
    add_sampling_flags,
    add_target_flags,
    add_template_flag,
)
from drafttrain.values import Count, File, Name, Place, adder

HELP = """Measure a drafter in the lossless tree decoder against plain decoding.

  drafttrain eval --target smollm2-135m --drafter runs/quickstart/drafter --output results.json
  drafttrain eval --target smollm2-135m --drafter ngram --suite mt_bench.jsonl --limit 10 --tree dynamic:4,4,8

Every prompt is answered by our engine with the drafter, by our engine without it (autoregressive) and by transformers'
generate on a model of its own, in rotating order. After an interruption the same command continues with the next prompt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add_target_flags(parser)
    add_drafter_flag(parser, more=", or none")
    add("--suite", Place, default="drafttrain", help=f"{', '.join(known_suites())}, a JSONL file in FastChat's question "
        "format, or NAME:FILE for a public suite in a file")  # fmt: skip
    add_template_flag(parser, "; a question's own come first")
    add_sampling_flags(parser, penalties=True)
    add("--max-new-tokens", Count, default=128, help="per answer")
    add(
        "--batch-size",
        Count,
        default=1,
        help="prompts at a time, on every side; --tree auto times single ones",
    )
    add("--tree", help="none, chain:3, fanout:4x2x1, dynamic:5,8,24, paths:0,1,0-0, all with @sample, @stop=P or @cut=P, or "
        "auto: the fastest of a list, found by timing (default: the tree in the drafter's decoding.json, else auto)"
    )  # fmt: skip
    add(
        "--calibrate",
        File,
        metavar="FILE",
        help="prompts for --tree auto: JSONL of messages, turns or text",
    )
    add("--limit", Count, help="questions at most, taken evenly from all categories")
    known = f"a list of {', '.join(ALL_BASELINES)}, or none (default: %(default)s)"
    add("--baselines", default=",".join(BASELINES), help=known)
    add("--assistant", Name, default="", help="draft model of hf_assisted: a causal LM's folder or Hub id (default: the "
        "target's own first layers)")  # fmt: skip
    add("--output", Place, help="results file (default: results.json beside the drafter)")
