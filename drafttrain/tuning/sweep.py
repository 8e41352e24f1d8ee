"""`drafttrain sweep`: eval over temperatures, trees, batch sizes, context lengths and dtypes, a results file per cell."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.registry import load_drafter
from drafttrain.errors import UserError
from drafttrain.evaluation import runner
from drafttrain.evaluation.records import fingerprint, folder_state
from drafttrain.evaluation.suites import Question, Suite, load_suite, render
from drafttrain.files import write_json
from drafttrain.inference import token_limit
from drafttrain.reports.console import wide_console
from drafttrain.target import Target

HELP = """Measure a drafter over a range of settings; one results.json per cell, and summary.json over all of them.

  drafttrain sweep --target smollm2-135m --drafter runs/drafter --output runs/sweep --batch-sizes 1,2,4,8,16 \\
      --lengths 1,2,4,8 --temperatures 0,0.7,1 --contexts 0,512,2048 --limit 16

One axis varies at a time, the others stay at their first value; --grid crosses them all. Interrupted, the same command goes
on: finished cells are kept, an unfinished one goes on from its finished prompts. The summary says at which batch size
speculation stops paying."""

AXES = ("dtype", "tree", "temperature", "batch_size", "context")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True, help="short name, folder or Hub id")
    add("--drafter", required=True, help="as in drafttrain eval")
    add("--suite", default="drafttrain", help="as in drafttrain eval")
    add("--temperatures", default="0", help="a list, such as 0,0.7,1")
    add(
        "--trees",
        default="",
        help="a list separated by ; or spaces, such as 'chain:3 dynamic:3,4,8' (default: as in eval)",
    )
    add("--lengths", default="", help="speculation lengths, such as 1,2,4,8: chains, added to --trees")
    add("--batch-sizes", default="1", help="prompts at a time, such as 1,2,4,8,16")
    add("--contexts", default="0", help="least prompt lengths in tokens, such as 0,512,2048; 0 leaves prompts alone")
    add("--dtypes", default="auto", help="such as bfloat16,float32")
    add("--device", default="auto", help="cpu, cuda or auto")
    add("--max-new-tokens", type=int, default=64, help="per answer")
    add("--limit", type=int, help="questions at most per cell, taken evenly from all categories")
    add("--seed", type=int, default=0, help="of the sampling")
    add("--baselines", default="autoregressive", help="as in drafttrain eval (default: %(default)s)")
    add("--grid", action="store_true", help="cross all axes instead of varying one at a time")
    add("--output", default="sweep", help="folder for the cells and summary.json")
    add("--trust-remote-code", action="store_true", help="run model code that comes with the target")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    Raises:
        UserError: a value that is none, or anything that cannot be loaded or measured.
    """
    folder = Path(args.output).expanduser()
    axes = parse_axes(args)
    base = eval_arguments(args)
    every = list(cells(axes, args.grid))
    for cell in every:
        runner.check(cell_arguments(base, cell, folder))
    suite = load_suite(args.suite)
    loaded: tuple[str, Target, Drafter | None] | None = None
    summary = []
    for number, cell in enumerate(every, 1):
        own = cell_arguments(base, cell, folder)
        print(f"cell {number} of {len(every)}: {describe(cell)}")
        results = finished(own, cell, suite)
        if results is None:
            if loaded is None or loaded[0] != cell["dtype"]:
                loaded = None  # the last one's memory goes first
                target = Target.load(args.target, cell["dtype"], args.device, args.trust_remote_code)
                loaded = cell["dtype"], target, load_drafter(args.drafter, target)
            long_ = lengthen(loaded[1], suite, cell["context"], args.max_new_tokens)
            results = runner.evaluate(own, loaded[1], loaded[2], long_)
            results["sweep"] = {"cell": cell, "key": key_of(own, cell, suite)}
            write_json(Path(own.output), results)
        summary.append(row(cell, results, Path(own.output).name))
        write_json(folder / "summary.json", {"axes": axes, "cells": summary, "crossover": crossovers(summary)})
    print_summary(summary)
    print(f"wrote {folder / 'summary.json'}")
    return 0


def parse_axes(args: argparse.Namespace) -> dict[str, list[Any]]:
    """The values of each axis, in the order of AXES.

    Raises:
        UserError: a value that is no number, or out of range; a batch larger than the limit.
    """
    trees = args.trees.replace(";", " ").split() + [
        f"chain:{length}" for length in _numbers("lengths", args.lengths, int, 1)
    ]
    batches = _numbers("batch-sizes", args.batch_sizes, int, 1)
    if args.limit is not None and max(batches, default=0) > args.limit:
        raise UserError(
            f"batch-sizes={args.batch_sizes!r}: {max(batches)} prompts at a time take as many questions, but limit={args.limit}; "
            "raise --limit"
        )
    return {
        "dtype": [name.strip() for name in args.dtypes.split(",")],
        "tree": trees or [None],
        "temperature": _numbers("temperatures", args.temperatures, float, 0),
        "batch_size": batches,
        "context": _numbers("contexts", args.contexts, int, 0),
    }


def _numbers(name: str, text: str, kind: type, least: int) -> list[Any]:
    try:
        numbers = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UserError(f"{name}={text!r} is no list of numbers; write for example 1,2,4") from error
    if any(number < least for number in numbers):
        raise UserError(f"{name}={text!r}: every value must be at least {least}")
    return numbers


def cells(axes: dict[str, list[Any]], grid: bool) -> Iterator[dict[str, Any]]:
    """Each combination, or each single axis with the others at their first value; dtypes outermost, no cell twice."""
    first = {name: values[0] for name, values in axes.items()}
    if grid:
        found = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    else:
        found = [{**first, name: value} for name, values in axes.items() for value in values]
    seen = []
    for cell in sorted(found, key=lambda cell: axes["dtype"].index(cell["dtype"])):
        if cell not in seen:
            seen.append(cell)
    yield from seen


def describe(cell: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.items() if value is not None)


def eval_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """Arguments of `drafttrain eval` that all cells share."""
    parser = argparse.ArgumentParser()
    runner.add_arguments(parser)
    base = parser.parse_args(["--target", args.target, "--drafter", args.drafter])
    for name in ("suite", "device", "max_new_tokens", "limit", "seed", "baselines", "trust_remote_code"):
        setattr(base, name, getattr(args, name))
    return base


def cell_arguments(base: argparse.Namespace, cell: dict[str, Any], folder: Path) -> argparse.Namespace:
    own = copy.copy(base)
    own.dtype, own.tree, own.temperature, own.batch_size = (cell[name] for name in AXES[:4])
    own.output = str(folder / f"{fingerprint(cell)}.json")
    return own


def key_of(args: argparse.Namespace, cell: dict[str, Any], suite: Suite) -> str:
    """What a finished cell must have been measured with to be kept."""
    names = ("target", "drafter", "device", "max_new_tokens", "limit", "seed", "baselines")
    files = folder_state(args.drafter.partition("+")[0])
    return fingerprint({**{name: getattr(args, name) for name in names}, **cell, "suite": suite.digest, "files": files})


def finished(args: argparse.Namespace, cell: dict[str, Any], suite: Suite) -> dict[str, Any] | None:
    """The results of a cell that was measured before, with these very settings."""
    path = Path(args.output)
    results = json.loads(path.read_text()) if path.is_file() else {}
    return results if results.get("sweep", {}).get("key") == key_of(args, cell, suite) else None


def lengthen(target: Target, suite: Suite, context: int, max_new_tokens: int) -> Suite:
    """The suite with other questions' texts before each first turn, so that prompts have `context` tokens or a few more.

    Raises:
        UserError: the target reads fewer tokens.
    """
    if not context:
        return suite
    token_limit(target, context, max_new_tokens)
    texts = [turn for question in suite.questions for turn in question.turns]

    def longer(index: int, question: Question) -> Question:
        notes: list[str] = []
        missing = context - len(render(target.tokenizer, question.turns[:1], []))
        others = itertools.cycle(texts[index + 1 :] + texts[: index + 1])
        while missing > 0:
            ids = target.tokenizer(next(others), add_special_tokens=False).input_ids[:missing]
            notes.append(target.tokenizer.decode(ids))
            missing -= len(ids) + 1
        first = "\n".join(["Some notes, which the question below may ignore:", *notes, "", question.turns[0]])
        return Question(
            question.question_id, question.category, (first, *question.turns[1:]) if notes else question.turns
        )

    questions = tuple(longer(i, question) for i, question in enumerate(suite.questions))
    return Suite(f"{suite.name} at {context} tokens", questions, f"{suite.digest}:{context}")


def row(cell: dict[str, Any], results: dict[str, Any], file: str) -> dict[str, Any]:
    """A cell's line in the summary."""
    overall = results["overall"]
    names = (
        "accepted_length",
        "acceptance_rate",
        "tokens_per_second",
        "speedup",
        "speedup_vs_fastest",
        "draft_fraction",
    )
    tree = results["decoding"]["tree"]["spec"]
    return {
        "cell": cell,
        "file": file,
        "spec": tree,
        **{name: overall[name] for name in names},
        "tpot_ms": overall["tpot_ms"],
    }


def crossovers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where speculation stops paying, for each set of cells that differ in batch size only.

    Returns:
        cell: what they share; batch_size: where the speed-up falls to 1, read off between two sizes on a logarithmic
        scale; None if it pays at every size that was measured, 0 if at none.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in rows:
        shared = {name: value for name, value in each["cell"].items() if name != "batch_size"}
        if each["speedup_vs_fastest"] is not None:
            groups.setdefault(json.dumps(shared), []).append(each)
    found = []
    for shared_text, group in groups.items():
        points = sorted((each["cell"]["batch_size"], each["speedup_vs_fastest"]) for each in group)
        if len(points) < 2:
            continue
        at: float | None = 0 if points[0][1] < 1 else None
        for (left, high), (right, low) in itertools.pairwise(points):
            if high >= 1 > low:
                share = (high - 1) / (high - low)
                at = round(math.exp(math.log(left) + share * math.log(right / left)), 2)
                break
        found.append({"cell": json.loads(shared_text), "batch_size": at, "speedups": dict(points)})
    return found


def print_summary(rows: Sequence[dict[str, Any]], console: Console | None = None) -> None:
    """A table with a row per cell, and the crossovers."""
    console = console or wide_console()
    table = Table(*AXES, "accepted\nlength", "tokens/s", "speed-up")
    for each in rows:
        cell = {**each["cell"], "tree": each["spec"]}
        speedup = each["speedup_vs_fastest"]
        figures = (f"{each['accepted_length']:.2f}", f"{each['tokens_per_second']:.1f}")
        table.add_row(*(str(cell[name]) for name in AXES), *figures, f"{speedup:.2f}x" if speedup is not None else "")
    console.print(table)
    for found in crossovers(rows):
        at = found["batch_size"]
        where = "pays at every batch size measured" if at is None else f"stops paying at batch size {at:g}"
        where = "pays at no batch size measured" if at == 0 else where
        console.print(f"{describe(found['cell'])}: speculation {where}", highlight=False, soft_wrap=True)
