"""`drafttrain eval`: measures a drafter against plain decoding, prints a table and writes
results.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from functools import partial
from pathlib import Path

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.kinds import split_name
from drafttrain.drafters.registry import load_drafter
from drafttrain.evaluation.baselines import parse_baselines
from drafttrain.evaluation.diagnose import other_template_kwargs, print_findings
from drafttrain.evaluation.metrics import training_record
from drafttrain.evaluation.runner import EvalSettings, evaluate
from drafttrain.evaluation.suites import load_suite, take_evenly
from drafttrain.files import Json
from drafttrain.flags import load_target, sampling_of
from drafttrain.folders import beside, inputs_of, output_file
from drafttrain.inference import SamplingParams
from drafttrain.outcome import conclude, next_command
from drafttrain.reports.report import print_results
from drafttrain.target import Target
from drafttrain.tuning.tune import TuneSettings, calibration_prompts, search_tree


def run(args: argparse.Namespace, target: Target | None = None) -> int:
    """Runs the command; target: loaded already. Raises UserError for values out of range, or
    anything that cannot be loaded.
    """
    settings = settings_of(args)
    suite = load_suite(args.suite, args.chat_template_kwargs)
    found = other_template_kwargs(args.chat_template_kwargs, training_record(args.drafter))
    print_findings([found] if found else [])
    take_evenly(suite.questions, args.limit)  # checks the limit before the models load
    target = target or load_target(args)
    search = partial(find_tree, calibrate=args.calibrate, kwargs=args.chat_template_kwargs)
    results = evaluate(settings, target, load_drafter(args.drafter, target), suite, search)
    print_results(results)
    print_findings(results["diagnosis"])
    page = Path(settings.output).with_name("report.html")
    conclude(results, [settings.output], next_command("report", str(settings.output), output=page))
    return 0


def settings_of(args: argparse.Namespace) -> EvalSettings:
    """Reads the command's flags. Raises UserError for a value out of range."""
    names = (
        "target",
        "drafter",
        "max_new_tokens",
        "batch_size",
        "tree",
        "calibrate",
        "limit",
        "seed",
        "assistant",
    )
    chosen = {
        name: vars(args)[name] for name in (*names, "trust_remote_code", "chat_template_kwargs")
    }
    baselines = tuple(parse_baselines(args.baselines))
    output = output_file(
        args.output or beside(split_name(args.drafter)[0], "results.json"),
        "eval",
        inputs_of(args),
    )
    return EvalSettings(**chosen, sampling=sampling_of(args), baselines=baselines, output=output)


def find_tree(
    target: Target,
    drafter: Drafter,
    sampling: SamplingParams,
    exclude: Collection[str],
    calibrate: str | None,
    kwargs: Json,
) -> tuple[TreeSpec, list[Json]]:
    """Finds the fastest tree on calibration prompts that are not in the suite; returns it with a
    table of candidates.
    """
    prompts = calibration_prompts(target, calibrate, kwargs, exclude)
    search = search_tree(target, drafter, prompts, TuneSettings(sampling))
    return search.best.spec, search.table()
