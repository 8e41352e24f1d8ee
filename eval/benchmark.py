"""What the benchmarks of this folder share: sides in turn in one process, medians, one JSON form."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from drafttrain.environment import describe_environment
from drafttrain.files import write_json


def alternate(sides: Mapping[str, Callable[[], Any]], repeats: int, warm_up: bool = True) -> dict[str, list[Any]]:
    """Runs every side once to warm up, then all of them in turn, `repeats` times; their order rotates."""
    names = list(sides)
    for name in names if warm_up else ():
        sides[name]()
    runs: dict[str, list[Any]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            runs[name].append(sides[name]())
            print(f"repeat {repeat + 1}/{repeats} {name}: {runs[name][-1]}", flush=True)
    return runs


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def write_result(
    output: Path | None, ratio: float, goal: float, sides: dict[str, Any], device: torch.device, **more: Any
) -> None:
    """Prints the headline and writes the result's JSON. ratio: ours against the other, above 1 is better."""
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
