"""`drafttrain verify`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.flags import TARGET_HELP, add_drafter_flag, add_template_flag
from drafttrain.formats.engines import FORMATS, PACKAGES
from drafttrain.values import Count, Depth, FileDtype, Name, Place, adder

# Largest relative difference of accepted lengths. In half precision near ties fall differently on
# both sides, and so do texts.
TOLERANCE = 0.02
HALF_TOLERANCE = 0.05

HELP = f"""Prove that an exported drafter computes what it computes here.

  drafttrain verify --drafter runs/drafter --exported runs/export
  drafttrain verify --drafter runs/drafter --engine vllm --engine-python ~/vllm/bin/python --output verify.json
  drafttrain verify --drafter runs/draft --engine transformers
  drafttrain verify --drafter runs/drafter --engine all --engine-python vllm=~/vllm/bin/python llama.cpp=~/llama/bin/python
  drafttrain verify --all-kinds --engine all --engine-python vllm=~/vllm/bin/python --output kinds.json

Always: every tensor of the export must have the name, shape and dtype that the engine's loader expects and be finite; then the
export is read back as a drafter, which must draft what the original drafts on random inputs. With --engine: the engine answers
prompts greedily with a chain of --speculative-tokens, and so does our decoder; texts and accepted lengths are compared.

--engine all has a row for every engine; those that cannot run here are rows that say so, with the release whose rules the
files follow. A row that differs or fails is exit status 1: in float32 any other text and accepted lengths more than
{TOLERANCE:.0%} apart; in half precision, where near ties fall differently, {HALF_TOLERANCE:.0%}.

--all-kinds trains a tiny drafter of each kind for a tiny random target on the spot. Finished rows are in
OUTPUT.partial.jsonl; the same command continues there.
scripts/verify_engines_cpu.sh makes an environment for each engine that runs on a CPU and runs all of this."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    add_drafter_flag(which, trained=True, required=False)
    which.add_argument(
        "--all-kinds",
        action="store_true",
        help="a tiny drafter of every kind that engines load, in float32",
    )
    add(
        "--exported",
        Place,
        help="folder written by drafttrain export (default: export it now, for the engine)",
    )
    add(
        "--format",
        choices=FORMATS,
        help="of what is exported now (default: the engine's, else the kind's first)",
    )
    add("--dtype", FileDtype, default="bfloat16", help="of what is exported now, and of the target")
    engines = ("auto", "none", "all", *PACKAGES)
    add(
        "--engine",
        choices=engines,
        default="auto",
        help="also run it there (default: vllm or llama.cpp if installed)",
    )
    paths = "interpreters that have vllm, or xllamacpp for llama.cpp; with several engines each as ENGINE=PATH"
    add(
        "--engine-python",
        Place,
        nargs="+",
        default=[],
        metavar="[ENGINE=]PATH",
        help=f"{paths} (default: this one)",
    )
    add("--target", Name, default="", help=f"{TARGET_HELP} (default: the recorded one)")
    add(
        "--suite",
        Place,
        default="drafttrain",
        help="where prompts come from: a suite's name or JSONL file",
    )
    add_template_flag(parser, "; a question's own come first")
    add("--prompts", Count, default=8, help="at most, taken evenly from all categories")
    add("--max-new-tokens", Count, default=64, help="per answer")
    add(
        "--speculative-tokens",
        Depth,
        help="length of the chain (default: the tuned depth, else 3)",
    )
    add("--output", Place, help="JSON file to write")
