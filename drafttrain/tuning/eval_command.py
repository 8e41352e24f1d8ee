"""`drafttrain eval`: measures a drafter against plain decoding, prints a table and writes results.json."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from functools import partial

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter
from drafttrain.errors import UserError, shown
from drafttrain.evaluation.diagnose import other_template_kwargs, print_findings
from drafttrain.evaluation.metrics import BASELINES, HF_SPECULATIVE, training_record
from drafttrain.evaluation.runner import EvalSettings, evaluate
from drafttrain.evaluation.suites import known_suites, load_suite, take_evenly
from drafttrain.files import Json
from drafttrain.flags import (
    add_drafter_flag,
    add_sampling_flags,
    add_target_flags,
    add_template_flag,
    load_target,
    sampling_of,
)
from drafttrain.folders import inputs_of, output_file
from drafttrain.inference import SamplingParams
from drafttrain.reports.report import print_results
from drafttrain.target import Target
from drafttrain.tuning.tune import TuneSettings, calibration_prompts, search_tree
from drafttrain.values import Count, File, Name, Place, adder

HELP = """Measure a drafter in the lossless tree decoder against plain decoding.

  drafttrain eval --target smollm2-135m --drafter runs/quickstart/drafter --output results.json
  drafttrain eval --target smollm2-135m --drafter ngram --suite mt_bench.jsonl --limit 10 --tree dynamic:4,4,8

Every prompt is answered by our engine with the drafter, by our engine without it (autoregressive) and by transformers'
generate on a model of its own, in rotating order. After an interruption the same command continues with the next prompt."""

ALL_BASELINES = (*BASELINES, *HF_SPECULATIVE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add = adder(parser)
    add_target_flags(parser)
    add_drafter_flag(parser, more=", or none")
    add("--suite", Place, default="drafttrain", help=f"{', '.join(known_suites())}, a JSONL file in FastChat's question "
        "format, or NAME:FILE for a public suite in a file")  # fmt: skip
    add_template_flag(parser, "; a question's own come first")
    add_sampling_flags(parser, penalties=True)
    add("--max-new-tokens", Count, default=128, help="per answer")
    add("--batch-size", Count, default=1, help="prompts at a time, on every side; --tree auto times single ones")
    add("--tree", help="none, chain:3, fanout:4x2x1, dynamic:5,8,24 or paths:0,1,0-0, optionally with @sample or @stop=P, or "
        "auto: the fastest of a list, found by timing (default: the tree in the drafter's decoding.json, else auto)"
    )  # fmt: skip
    add("--calibrate", File, metavar="FILE", help="prompts for --tree auto: JSONL of messages, turns or text")
    add("--limit", Count, help="questions at most, taken evenly from all categories")
    known = f"a list of {', '.join(ALL_BASELINES)}, or none (default: %(default)s)"
    add("--baselines", default=",".join(BASELINES), help=known)
    add("--assistant", Name, default="", help="draft model of hf_assisted: a causal LM's folder or Hub id (default: the "
        "target's own first layers)")  # fmt: skip
    add("--output", Place, default="results.json", help="results file")


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises UserError for values out of range, or anything that cannot be loaded."""
    settings = settings_of(args)
    suite = load_suite(args.suite, args.chat_template_kwargs)
    found = other_template_kwargs(args.chat_template_kwargs, training_record(args.drafter))
    print_findings([found] if found else [])
    take_evenly(suite.questions, args.limit)  # checks the limit before the models load
    target = load_target(args)
    search = partial(find_tree, calibrate=args.calibrate)
    results = evaluate(settings, target, load_drafter(args.drafter, target), suite, search)
    print_results(results)
    print_findings(results["diagnosis"])
    print(f"wrote {settings.output}")
    return 0


def settings_of(args: argparse.Namespace) -> EvalSettings:
    """Reads the command's flags. Raises UserError for a value out of range."""
    names = ("target", "drafter", "max_new_tokens", "batch_size", "tree", "calibrate", "limit", "seed", "assistant")
    chosen = {name: vars(args)[name] for name in (*names, "trust_remote_code", "chat_template_kwargs")}
    baselines = tuple(parse_baselines(args.baselines))
    output = output_file(args.output, "eval", inputs_of(args))
    return EvalSettings(**chosen, sampling=sampling_of(args), baselines=baselines, output=output)


def parse_baselines(text: str) -> list[str]:
    """Reads a comma-separated list of baselines, or `none`. Raises UserError for an unknown name."""
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in ALL_BASELINES]
    if unknown:
        raise UserError(
            f"baselines={shown(text)}: {shown(unknown[0])} is not one of {', '.join(ALL_BASELINES)}; or write none"
        )
    return names


def find_tree(
    target: Target, drafter: Drafter, sampling: SamplingParams, exclude: Collection[str], calibrate: str | None
) -> tuple[TreeSpec, list[Json]]:
    """Finds the fastest tree on calibration prompts that are not in the suite; returns it with a table of candidates."""
    search = search_tree(target, drafter, calibration_prompts(target, calibrate, exclude), TuneSettings(sampling))
    return search.best.spec, search.table()
