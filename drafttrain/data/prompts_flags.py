"""`drafttrain prompts`: its help and flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from drafttrain.flags import add_target_flags
from drafttrain.values import (
    Amount,
    Count,
    File,
    Fraction,
    Place,
    PositiveFraction,
    Seed,
    Size,
    Temperature,
    adder,
    value,
)

HELP = """Collect prompts for the target to answer, one JSON object per line: {"id", "messages" or "text", "source"}.

  drafttrain prompts --source magpie --target smollm2-135m --count 2000 --output prompts.jsonl
  drafttrain prompts --source magpie --target T --url http://a:8000 --url http://b:8000 --output prompts.jsonl
  drafttrain prompts --source file --input chats.jsonl --output prompts.jsonl
  drafttrain prompts --source HuggingFaceH4/ultrachat_200k --split train_sft --count 50000 --output prompts.jsonl

magpie   the target writes the user turns itself, from its chat template's opening (no template: free-running text)
file     JSONL: FastChat turns, ShareGPT conversations, OpenAI messages, prompt or instruction (+ input), plain text;
         tools (OpenAI, ShareGPT, xLAM, ToolACE, Hermes) and chat_template_kwargs of a row are kept
ID       a data set of the Hub, or a local folder of one; --columns maps columns with other names

Prompts are shuffled by --seed and filtered by length. Duplicates are dropped, and so are prompts that share --ngram
consecutive words with a file of --exclude or with the evaluation suites of drafttrain. An interrupted magpie run
continues when run again; a finished file is not changed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--source", Place, required=True, help="magpie, file, or a data set id")
    add(
        "--output",
        value(Place, Path),
        required=True,
        help="JSONL file to write; FILE.summary.json holds the counts",
    )
    add("--count", Count, help="number of prompts (default: 1000 for magpie, else all)")
    add("--input", value(File, Path), help="for file: the JSONL file")
    add("--subset", help="for a data set: its configuration")
    add("--split", default="train", help="for a data set (default: train)")
    add(
        "--columns",
        default="",
        help="for a data set: our names = its names: messages=conversations,system=preamble",
    )
    described = (
        "for magpie: the model that writes; its tokenizer also counts --min-tokens and --max-tokens"
    )
    add_target_flags(parser, described, required=False, default=None, prefix="for magpie: ")
    add(
        "--temperature",
        Temperature,
        default=0.8,
        help="for magpie; large models stay coherent at 1.0 (default: 0.8)",
    )
    add(
        "--top-p",
        PositiveFraction,
        default=1.0,
        help="for magpie; below 1 is slow on a CPU (default: 1.0)",
    )
    add(
        "--url",
        action="append",
        default=[],
        help="for magpie: server of the target; repeat it for several (default: run here)",
    )
    add(
        "--openings",
        Place,
        default="builtin",
        help="for magpie: builtin, none, or a file with one beginning per line",
    )
    add(
        "--opening-share",
        Fraction,
        default=0.5,
        help="share of prompts that get an opening (default: 0.5)",
    )
    add(
        "--max-prompt-tokens",
        Count,
        default=256,
        help="for magpie: longer prompts are dropped (default: 256)",
    )
    add(
        "--slots",
        Count,
        default=128,
        help="for magpie: sequences that run together (default: 128)",
    )
    add(
        "--max-minutes",
        Amount,
        help="for magpie: stop after this time and keep the prompts so far",
    )
    add("--min-chars", Size, default=10, help="(default: 10)")
    add("--max-chars", Size, default=8000, help="0: no limit (default: 8000)")
    add("--min-tokens", Size, default=0, help="needs --target")
    add("--max-tokens", Size, default=0, help="needs --target")
    add(
        "--exclude",
        value(File, Path),
        nargs="+",
        default=[],
        metavar="FILE",
        help="drop overlaps with these",
    )
    flag = argparse.BooleanOptionalAction
    add(
        "--exclude-suites",
        action=flag,
        default=True,
        help="also drop prompts that overlap with drafttrain's suites",
    )
    add(
        "--ngram",
        Count,
        default=8,
        help="consecutive shared words that count as overlap (default: 8)",
    )
    add("--seed", Seed, default=0, help="of the order and of what magpie samples")
    add(
        "--overwrite",
        action="store_true",
        help="replace an earlier result, when the new one is complete",
    )
