"""`drafttrain sweep`: eval over temperatures, trees, batch sizes, context lengths and dtypes, one
results file per cell.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.kinds import split_name
from drafttrain.drafters.registry import load_drafter
from drafttrain.errors import UserError
from drafttrain.evaluation import runner
from drafttrain.evaluation.baselines import parse_baselines
from drafttrain.evaluation.metrics import fingerprint, folder_state
from drafttrain.evaluation.results_schema import Results
from drafttrain.evaluation.runner import EvalSettings
from drafttrain.evaluation.suites import Question, Suite, load_suite
from drafttrain.evaluation.verdicts import crossovers, verdict_of
from drafttrain.files import Json, read_json, write_json
from drafttrain.folders import OutputFolder, beside, inputs_of
from drafttrain.inference import SamplingParams, token_limit
from drafttrain.outcome import command_line, conclude, next_command
from drafttrain.reports.output import table_of, wide_console
from drafttrain.target import Target
from drafttrain.tuning.eval_command import find_tree

AXES = ("dtype", "tree", "temperature", "batch_size", "context")
FIGURES = ("prompts", "accepted_length", "acceptance_rate", "acceptance_by_depth", "tokens_per_second", "speedup",
           "speedup_vs_fastest", "confidence", "draft_fraction", "tpot_ms")  # fmt: skip
# What the page of a sweep names: keys of each cell's results.
SETTINGS = ("drafttrain", "versions", "date", "commit", "machine", "device", "threads", "compute_dtype", "target", "drafter",
            "kind", "suite", "suite_digest")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises UserError for an invalid value, or anything that cannot be loaded or
    measured.
    """
    args.output = args.output or beside(split_name(args.drafter)[0], "sweep")
    with OutputFolder(args.output, "sweep", inputs_of(args)) as output:
        summary = measure_cells(args, output.path)
    print_summary(summary)
    place = output.path / "summary.json"
    conclude(
        {"cells": summary},
        [place],
        next_command("report", str(place), output=output.path / "report.html"),
    )
    return 0


def measure_cells(args: argparse.Namespace, folder: Path) -> list[Json]:
    """Measures the cells that are not finished; returns the summary's row of each cell."""
    axes = parse_axes(args)
    every = [(cell, cell_settings(args, cell, folder)) for cell in cells(axes, args.grid)]
    suite = load_suite(args.suite, args.chat_template_kwargs)
    loaded: tuple[str, Target, Drafter | None] | None = None
    summary: list[Json] = []
    for number, (cell, settings) in enumerate(every, 1):
        print(f"cell {number} of {len(every)}: {describe(cell)}")
        key = key_of(args, cell, suite)
        results = finished(settings.output, key)
        if results is None:
            if loaded is None or loaded[0] != cell["dtype"]:
                loaded = None  # frees the memory of the previous models
                target = Target.load(
                    args.target,
                    cell["dtype"],
                    args.device,
                    args.trust_remote_code,
                )
                loaded = cell["dtype"], target, load_drafter(args.drafter, target)
            _, target, drafter = loaded
            longer = lengthen(target, suite, cell["context"], args.max_new_tokens)
            results = runner.evaluate(
                settings,
                target,
                drafter,
                longer,
                partial(find_tree, calibrate=None, kwargs=args.chat_template_kwargs),
            )
            results["sweep"] = {"cell": cell, "key": key}
            write_json(settings.output, results)
        spec = results["decoding"]["tree"]["spec"]
        figures = results["overall"]
        row = {
            "cell": cell,
            "file": settings.output.name,
            "spec": spec,
            **{name: figures[name] for name in FIGURES},
        }
        summary.append(row)
        head = {name: results[name] for name in SETTINGS if name in results}
        head |= {"command": command_line(), "max_new_tokens": args.max_new_tokens}
        content = {
            **head,
            "limit": args.limit,
            "axes": axes,
            "cells": summary,
            "crossover": crossovers(summary),
        }
        write_json(folder / "summary.json", content)
    return summary


def parse_axes(args: argparse.Namespace) -> dict[str, list[object]]:
    """The values of each axis, in the order of AXES. Raises UserError for a wrong number, or a
    batch larger than the limit.
    """
    chains = [f"chain:{length}" for length in args.lengths]
    trees = args.trees.replace(";", " ").split() + chains
    batches = args.batch_sizes
    largest = max(args.batch_sizes)
    if args.limit is not None and largest > args.limit:
        reason = f"{largest} prompts at a time take as many questions, but limit={args.limit}"
        raise UserError(f"batch-sizes={batches}: {reason}; raise --limit")
    return {
        "dtype": args.dtypes,
        "tree": trees or [None],
        "temperature": args.temperatures,
        "batch_size": batches,
        "context": args.contexts,
    }


def cells(axes: dict[str, list[object]], grid: bool) -> list[Json]:
    """All combinations (grid), or each axis with the others at their first value; dtypes outermost,
    no duplicates.
    """
    first = {name: values[0] for name, values in axes.items()}
    found = [{**first, name: value} for name, values in axes.items() for value in values]
    if grid:
        found = [
            dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
        ]
    unique = [cell for number, cell in enumerate(found) if cell not in found[:number]]
    return sorted(unique, key=lambda cell: axes["dtype"].index(cell["dtype"]))


def describe(cell: Json) -> str:
    """A cell in words."""
    return ", ".join(f"{name} {value}" for name, value in cell.items() if value is not None)


def cell_settings(args: argparse.Namespace, cell: Json, folder: Path) -> EvalSettings:
    """The evaluation settings of one cell. Raises UserError for a value out of range."""
    names = (
        "target",
        "drafter",
        "max_new_tokens",
        "limit",
        "seed",
        "trust_remote_code",
        "chat_template_kwargs",
    )
    return EvalSettings(
        **{name: vars(args)[name] for name in names},
        **{name: cell[name] for name in ("tree", "batch_size")},
        baselines=tuple(parse_baselines(args.baselines)),
        sampling=SamplingParams(temperature=cell["temperature"]),
        output=folder / f"{fingerprint(cell)}.json",
    )


def key_of(args: argparse.Namespace, cell: Json, suite: Suite) -> str:
    """Hash of everything that a finished cell depends on."""
    names = ("target", "drafter", "device", "max_new_tokens", "limit", "seed", "baselines")
    more = {"suite": suite.digest, "files": folder_state(split_name(args.drafter)[0])}
    return fingerprint({**{name: vars(args)[name] for name in names}, **cell, **more})


def finished(path: Path, key: str) -> Json | None:
    """The results of a cell that was measured before with the same key. Raises UserError: damaged
    ones.
    """
    fix = "delete that file to measure its cell again"
    results: Json
    if path.is_file():
        results = {**read_json(path, "results", fix, Results)}
    else:
        results = {}
    if results.get("sweep", {}).get("key") == key:
        return results
    return None


def lengthen(target: Target, suite: Suite, context: int, max_new_tokens: int) -> Suite:
    """Puts other questions before each first turn, up to `context` tokens. Raises UserError if the
    target reads fewer.
    """
    if not context:
        return suite
    token_limit(target, context, max_new_tokens)
    texts = [turn for question in suite.questions for turn in question.turns]

    def longer(index: int, question: Question) -> Question:
        notes: list[str] = []
        missing = context - len(question.prompt(target.tokenizer))
        others = itertools.cycle(texts[index + 1 :] + texts[: index + 1])
        while missing > 0:
            ids = target.tokenizer(next(others), add_special_tokens=False).input_ids[:missing]
            notes.append(target.tokenizer.decode(ids))
            missing -= len(ids) + 1
        first = "\n".join(
            ["Some notes, which the question below may ignore:", *notes, "", question.turns[0]]
        )
        if notes:
            return replace(question, turns=(first, *question.turns[1:]))
        return question

    questions = tuple(longer(i, question) for i, question in enumerate(suite.questions))
    return Suite(f"{suite.name} at {context} tokens", questions, f"{suite.digest}:{context}")


def print_summary(rows: Sequence[Json]) -> None:
    """Prints a table with a row per cell, and the crossovers."""
    console = wide_console()
    shown = []
    for row in rows:
        cell = {**row["cell"], "tree": row["spec"]}
        speedup = row["speedup_vs_fastest"]
        figures = [f"{row['accepted_length']:.2f}", f"{row['tokens_per_second']:.1f}"]
        figures += ["" if speedup is None else f"{speedup:.2f}x", verdict_of(row).state]
        shown.append([*(str(cell[name]) for name in AXES), *figures])
    console.print(table_of((*AXES, "accepted\nlength", "tokens/s", "speed-up", "verdict"), shown))
    found = crossovers(rows)
    for each in found:
        console.print(f"{describe(each['cell'])}: {each['verdict']}", soft_wrap=True)
    if not any(each["axis"] == "batch_size" for each in found):
        console.print(
            "no crossover: one batch size was measured; --batch-sizes 1,4,16 shows where it stops paying"
        )
