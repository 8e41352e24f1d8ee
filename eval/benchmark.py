"""Shared code of the benchmarks: interleaved sides in one process, medians, one JSON format."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from drafttrain.environment import describe_environment
from drafttrain.files import Json, write_json

T = TypeVar("T")


def alternate(sides: Mapping[str, Callable[[], T]], repeats: int, warm_up: bool = True) -> dict[str, list[T]]:
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


def median(runs: list[Json], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def write_result(
    output: Path | None, ratio: float, goal: float, sides: Json, device: torch.device, **more: object
) -> None:
    """Prints the headline and writes the result's JSON. ratio: ours over the other, above 1 is better."""
    result = {
        "ratio": round(ratio, 3),
        "goal": goal,
        "sides": sides,
        **more,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        **describe_environment(device),
    }
    print(f"ratio {ratio:.3f} (goal {goal})")
    if output is not None:
        write_json(output, result)
