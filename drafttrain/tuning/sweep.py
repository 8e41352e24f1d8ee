"""`drafttrain sweep`: eval over temperatures, trees, batch sizes, contexts and dtypes."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.kinds import split_name
from drafttrain.drafters.registry import load_drafter
from drafttrain.errors import UserError
from drafttrain.evaluation import runner
from drafttrain.evaluation.baselines import NGRAM
from drafttrain.evaluation.metrics import fingerprint, folder_state
from drafttrain.evaluation.results_schema import Results
from drafttrain.evaluation.suites import Suite, load_suite
from drafttrain.evaluation.verdicts import crossovers, verdict_of
from drafttrain.files import Json, read_json, write_json
from drafttrain.folders import OutputFolder, beside, inputs_of
from drafttrain.inference import SamplingParams, token_limit
from drafttrain.outcome import command_line, conclude, next_command
from drafttrain.reports.output import table_of, wide_console
from drafttrain.target import Target
from drafttrain.tuning.eval_command import find_tree, settings_of

AXES = ("dtype", "tree", "temperature", "batch_size", "context")
# What a row of the summary holds: keys of a cell's overall figures.
FIGURES = (
    "prompts",
    "accepted_length",
    "acceptance_rate",
    "acceptance_by_depth",
    "tokens_per_second",
    "speedup",
    "decoding_speedup",
    "speedup_vs_fastest",
    "confidence",
    "draft_fraction",
    "tpot_ms",
)
# What the page of a sweep names: keys of each cell's results.
SETTINGS = (
    "drafttrain",
    "versions",
    "date",
    "commit",
    "machine",
    "device",
    "threads",
    "compute_dtype",
    "target",
    "drafter",
    "kind",
    "suite",
    "suite_digest",
)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        UserError: an invalid value, or anything that cannot be loaded or measured.
    """
    if args.output is None:
        args.output = str(beside(split_name(args.drafter)[0], "sweep"))
    with OutputFolder(args.output, "sweep", inputs_of(args)) as output:
        summary = measure_cells(args, output.path)
    print_summary(summary)
    place = output.path / "summary.json"
    then = next_command("report", str(place), output=output.path / "report.html")
    conclude({"cells": summary}, [place], then)
    return 0


def measure_cells(args: argparse.Namespace, folder: Path) -> list[Json]:
    """Measures the cells that are not finished; returns the summary's row of each cell."""
    axes = parse_axes(args)
    every = []
    for cell in cells(axes, args.grid):
        settings = settings_of(
            args,
            tree=cell["tree"],
            batch_size=cell["batch_size"],
            sampling=SamplingParams(temperature=cell["temperature"]),
            output=folder / f"{fingerprint(cell)}.json",
        )
        every.append((cell, settings))
    suite = load_suite(args.suite, args.chat_template_kwargs)
    target: Target | None = None
    drafter: Drafter | None = None
    dtype = ""  # of the loaded target
    files = fingerprint({"files": folder_state(args.target)})
    summary: list[Json] = []
    for number, (cell, settings) in enumerate(every, 1):
        print(f"cell {number} of {len(every)}: {describe(cell)}")
        note: Json = {"cell": cell, "key": key_of(args, cell, suite), "target_files": files}
        results = finished(settings.output, note)
        if results is None:
            if target is None or dtype != cell["dtype"]:
                dtype = cell["dtype"]
                target = drafter = None  # frees the memory of the previous models
                target = Target.load(args.target, dtype, args.device, args.trust_remote_code)
                drafter = load_drafter(args.drafter, target)
            longer = lengthen(target, suite, cell["context"], args.max_new_tokens)
            results = runner.evaluate(settings, target, drafter, longer, find_tree(settings))
            results["sweep"] = note
            write_json(settings.output, results)

        row = {
            "cell": cell,
            "file": settings.output.name,
            "spec": results["decoding"]["tree"]["spec"],
        }
        for name in FIGURES:
            if name in results["overall"]:  # cells of earlier versions lack some
                row[name] = results["overall"][name]
        summary.append(row)
        # Written after every cell, so that an interrupted sweep has a summary.
        content = {name: results[name] for name in SETTINGS if name in results}
        content |= {
            "command": command_line(),
            "max_new_tokens": args.max_new_tokens,
            "limit": args.limit,
            "axes": axes,
            "cells": summary,
            "crossover": crossovers(summary),
        }
        write_json(folder / "summary.json", content)
    return summary


def parse_axes(args: argparse.Namespace) -> dict[str, list[object]]:
    """The values of each axis, in the order of AXES.

    Raises:
        UserError: a batch larger than the limit.
    """
    largest = max(args.batch_sizes)
    if args.limit is not None and largest > args.limit:
        raise UserError(
            f"batch-sizes={args.batch_sizes}: {largest} prompts at a time take as many questions, "
            f"but limit={args.limit}; raise --limit"
        )
    trees: list[object] = list(args.trees.replace(";", " ").split())
    trees += [f"chain:{length}" for length in args.lengths]
    if not trees:
        trees = [None]  # as in eval
    return {
        "dtype": args.dtypes,
        "tree": trees,
        "temperature": args.temperatures,
        "batch_size": args.batch_sizes,
        "context": args.contexts,
    }


def cells(axes: dict[str, list[object]], grid: bool) -> list[Json]:
    """The combinations to measure; dtypes outermost, no duplicates.

    Args:
        grid: all combinations; else each axis with the others at their first value.
    """
    found: list[Json] = []
    if grid:
        for values in itertools.product(*axes.values()):
            found.append(dict(zip(axes, values, strict=True)))
    else:
        first = {name: values[0] for name, values in axes.items()}
        for name, choices in axes.items():
            found += [{**first, name: choice} for choice in choices]
    unique: list[Json] = []
    for cell in found:
        if cell not in unique:
            unique.append(cell)
    return sorted(unique, key=lambda cell: axes["dtype"].index(cell["dtype"]))


def describe(cell: Json) -> str:
    """A cell in words."""
    return ", ".join(f"{name} {value}" for name, value in cell.items() if value is not None)


def key_of(args: argparse.Namespace, cell: Json, suite: Suite) -> str:
    """Hash of everything that a finished cell depends on."""
    settings: Json = {}
    for name in ("target", "drafter", "device", "max_new_tokens", "limit", "seed"):
        settings[name] = vars(args)[name]
    # As in evaluate: cells that were measured without n-grams alone are finished.
    words = args.baselines.split(",")
    settings["baselines"] = ",".join(word for word in words if word.strip() != NGRAM)
    settings |= cell
    settings["suite"] = suite.digest
    settings["files"] = folder_state(split_name(args.drafter)[0])
    return fingerprint(settings)


def finished(path: Path, note: Json) -> Json | None:
    """The results of a cell that was measured before with the same key and files of the target.

    Raises:
        UserError: damaged results.
    """
    if not path.is_file():
        return None
    fix = "delete that file to measure its cell again"
    results: Json = {**read_json(path, "results", fix, Results)}
    earlier = results.get("sweep", {})
    files = note["target_files"]  # earlier versions did not note them
    if earlier.get("key") == note["key"] and earlier.get("target_files", files) == files:
        return results
    return None


def lengthen(target: Target, suite: Suite, context: int, max_new_tokens: int) -> Suite:
    """Puts other questions before each first turn, up to `context` tokens.

    Raises:
        UserError: the target reads fewer tokens.
    """
    if not context:
        return suite
    token_limit(target, context, max_new_tokens)
    texts: list[str] = []
    for question in suite.questions:
        texts += question.turns

    questions = []
    for index, question in enumerate(suite.questions):
        notes: list[str] = []
        missing = context - len(question.prompt(target.tokenizer))
        others = itertools.cycle(texts[index + 1 :] + texts[: index + 1])
        while missing > 0:
            ids = target.tokenizer(next(others), add_special_tokens=False).input_ids[:missing]
            notes.append(target.tokenizer.decode(ids))
            missing -= len(ids) + 1
        if notes:
            lines = ["Some notes, which the question below may ignore:", *notes]
            first = "\n".join([*lines, "", question.turns[0]])
            question = replace(question, turns=(first, *question.turns[1:]))
        questions.append(question)
    name = f"{suite.name} at {context} tokens"
    return Suite(name, tuple(questions), f"{suite.digest}:{context}")


def print_summary(rows: Sequence[Json]) -> None:
    """Prints a table with a row per cell, and the crossovers."""
    console = wide_console()
    beside = any(NGRAM in row["speedup"] for row in rows)
    shown = []
    for row in rows:
        settings = {**row["cell"], "tree": row["spec"]}
        cells = [str(settings[name]) for name in AXES]
        cells.append(f"{row['accepted_length']:.2f}")
        cells.append(f"{row['tokens_per_second']:.1f}")
        speedup = row["speedup_vs_fastest"]
        cells.append("" if speedup is None else f"{speedup:.2f}x")
        if beside:
            added = row["speedup"].get(NGRAM)
            cells.append("" if added is None else f"{added:.2f}x")
        cells.append(verdict_of(row).state)
        shown.append(cells)
    headings = [*AXES, "accepted\nlength", "tokens/s", "speed-up"]
    if beside:
        headings.append("over\nn-grams")
    headings.append("verdict")
    console.print(table_of(headings, shown))
    for each in crossovers(rows):
        console.print(f"{describe(each['cell'])}: {each['verdict']}", soft_wrap=True)
    if len({row["cell"]["batch_size"] for row in rows}) < 2:
        console.print(
            "no crossover: one batch size was measured; "
            "--batch-sizes 1,4,16 shows where it stops paying"
        )
