"""Shared by the benchmarks of this folder: interleaved sides, comparison with another checkout, medians, one JSON form."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from drafttrain.environment import describe_environment, describe_run
from drafttrain.errors import UserError
from drafttrain.files import Json, write_json
from drafttrain.folders import output_file

T = TypeVar("T")


def result_path(text: str) -> Path:
    """The type of --output: a place that can be written, and no file but an earlier result."""
    try:
        return output_file(text, "benchmark")
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def alternate(
    sides: Mapping[str, Callable[[], T]], repeats: int, warm_up: bool = True
) -> dict[str, list[T]]:
    """Runs every side once to warm up, then all sides `repeats` times in rotating order."""
    names = list(sides)
    for name in names if warm_up else ():
        sides[name]()
    runs: dict[str, list[T]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            runs[name].append(sides[name]())
            print(f"repeat {repeat + 1}/{repeats} {name}: {runs[name][-1]}", flush=True)
    return runs


def against(other: Path, key: str, sides: list[str], repeats: int, output: Path | None) -> None:
    """Runs the calling benchmark with the present arguments in this checkout and in another, alternating, once per repeat.

    Each checkout runs its own script on its own package, in a process of its own, so their internals may differ.

    Args:
        other: root of the other checkout.
        key: the figure to compare, in each of `sides`' entries of the result; higher is better.
        repeats: pairs of runs. output: results file; see `write_result` for the ratio.
    """
    script = Path(sys.argv[0]).resolve()
    roots = {"here": script.parents[1], "there": other.expanduser().resolve()}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in roots}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        for repeat in range(repeats):
            for name in list(roots)[:: 1 if repeat % 2 else -1]:
                command = [
                    sys.executable,
                    str(roots[name] / "eval" / script.name),
                    *_single_run(),
                    "--output",
                    str(result),
                ]
                environment = {**os.environ, "PYTHONPATH": str(roots[name])}
                subprocess.run(
                    command, check=True, cwd=roots[name], env=environment, stdout=subprocess.DEVNULL
                )
                found = json.loads(result.read_text())["sides"]
                runs[name].append({side: found[side][key] for side in sides})
                print(f"repeat {repeat + 1}/{repeats} {name}: {runs[name][-1]}", flush=True)
    ratios = {side: median(runs["here"], side) / median(runs["there"], side) for side in sides}
    pairs = {
        side: [a[side] / b[side] for a, b in zip(runs["here"], runs["there"], strict=True)]
        for side in sides
    }
    entries: dict[str, object] = {"ratios": ratios, "ratio_per_pair": pairs, **runs}
    write_result(output, ratios[sides[0]], 1.0, entries, torch.device("cpu"), against=str(other))


def _single_run() -> list[str]:
    """The present arguments for one repeat, without those that `against` sets."""
    kept = []
    words = iter(sys.argv[1:])
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in ("--against", "--repeats", "--output"):
            kept.append(word)
        elif not equals:
            next(words, None)
    return [*kept, "--repeats", "1"]


def median(runs: list[Json], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def write_result(
    output: Path | None,
    ratio: float,
    goal: float,
    sides: Json,
    device: torch.device,
    **more: object,
) -> None:
    """Prints the headline and writes the result's JSON. ratio: ours over the other, above 1 is better."""
    result = {
        "ratio": round(ratio, 3),
        "goal": goal,
        "sides": sides,
        **more,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        **describe_environment(device),
        **describe_run(),
    }
    print(f"ratio {ratio:.3f} (goal {goal})")
    if output is not None:
        write_json(output, result)
