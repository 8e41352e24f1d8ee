"""`drafttrain eval`: measures a drafter against plain decoding, and writes results.json."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.kinds import split_name
from drafttrain.drafters.registry import load_drafter, prepare
from drafttrain.evaluation.baselines import parse_baselines
from drafttrain.evaluation.diagnose import other_template_kwargs, print_findings
from drafttrain.evaluation.metrics import partial_file, training_record
from drafttrain.evaluation.runner import EvalSettings, TreeSearch, evaluate
from drafttrain.evaluation.suites import load_suite
from drafttrain.files import Json
from drafttrain.flags import load_target, sampling_of
from drafttrain.folders import beside, inputs_of, output_file
from drafttrain.inference import SamplingParams
from drafttrain.outcome import conclude, next_command
from drafttrain.reports.report import print_results
from drafttrain.target import Target
from drafttrain.tuning.tune import TuneSettings, calibration_prompts, search_tree


def run(
    args: argparse.Namespace,
    target: Target | None = None,
    drafter: Drafter | None = None,
) -> int:
    """Runs the command.

    Args:
        target, drafter: loaded already; `args` has their names.

    Raises:
        UserError: values out of range, or anything that cannot be loaded.
    """
    if args.output is None:
        args.output = str(beside(split_name(args.drafter)[0], "results.json"))
    settings = settings_of(
        args,
        output=output_file(args.output, "eval", inputs_of(args)),
        sampling=sampling_of(args),
    )
    suite = load_suite(args.suite, args.chat_template_kwargs)
    found = other_template_kwargs(args.chat_template_kwargs, training_record(args.drafter))
    if found:
        print_findings([found])

    if target is None:
        target = load_target(args)
    if drafter is not None and not drafter.name:
        partial_file(settings.output).unlink(missing_ok=True)  # perhaps of other weights
    if drafter is None:
        drafter = load_drafter(args.drafter, target)
    else:
        prepare(drafter, target)
    results = evaluate(settings, target, drafter, suite, find_tree(settings))
    print_results(results)
    print_findings(results["diagnosis"])
    page = settings.output.with_name("report.html")
    then = next_command("report", str(settings.output), output=page)
    conclude(results, [settings.output], then)
    return 0


def settings_of(args: argparse.Namespace, **changes: Any) -> EvalSettings:
    """The settings that flags of the same names give; also those of a sweep's cells.

    Args:
        changes: settings that have no flag of their name, or another value.

    Raises:
        UserError: a value out of range.
    """
    chosen = {}
    for each in fields(EvalSettings):
        if each.name in vars(args):
            chosen[each.name] = vars(args)[each.name]
    chosen["baselines"] = tuple(parse_baselines(args.baselines))
    return EvalSettings(**{**chosen, **changes})


def find_tree(settings: EvalSettings) -> TreeSearch:
    """The search for the fastest tree, on calibration prompts that are not in the suite."""

    def search(
        target: Target,
        drafter: Drafter,
        sampling: SamplingParams,
        exclude: Collection[str],
    ) -> tuple[TreeSpec, list[Json]]:
        kwargs = settings.chat_template_kwargs
        prompts = calibration_prompts(target, settings.calibrate, kwargs, exclude)
        found = search_tree(target, drafter, prompts, TuneSettings(sampling))
        return found.best.spec, found.table()

    return search
