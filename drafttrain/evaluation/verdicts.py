"""Whether speculation pays: the one verdict that eval, tune, sweep, estimate, reports and model
cards print.

pays            the interval of the speed-up lies above 1, and drafted tokens were accepted
does not pay    the interval lies below 1, or no drafted token was accepted
inconclusive    the interval holds 1, is unknown, or rests on fewer than FEWEST prompts
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from drafttrain.evaluation.baselines import BASELINE_NAMES, BASELINES
from drafttrain.evaluation.resampling import FEWEST, Ratio, draws, ends
from drafttrain.files import Json

MOST = 5000  # prompts; a difference that takes more does not matter
PAYS = "pays"
LOSES = "does not pay"
OPEN = "inconclusive"
_OUTLIER = 3.5  # robust standard deviations of the log speed-up (Iglewicz and Hoaglin 1993)
_LEAST_OFF = 1.25  # an outlier's distance from the median, as a factor


class SpeedupVerdict(NamedTuple):
    """A measured speed-up and what follows. state: PAYS, LOSES, OPEN, or empty if nothing was
    drafted or compared.
    """

    state: str
    figures: str
    advice: str

    @property
    def text(self) -> str:
        return ": ".join(filter(None, (self.figures, self.advice)))


def judge(
    speedup: float,
    interval: Sequence[float] | None,
    prompts: int,
    over: str = "plain decoding",
    accepted: float = 1.0,
) -> SpeedupVerdict:
    """Judges a speed-up.

    Args:
        interval: [low, high], 95 % over prompts; None if unknown. over: what it is compared with.
            accepted: any measure of accepted tokens; 0 for none.
    """
    sure = ""
    if interval and prompts > 1:
        sure = f"95 % interval {interval[0]:.2f} to {interval[1]:.2f}, "
    figures = (
        f"{speedup:.2f}x as fast as {over} ({sure}{prompts} prompt{'s' if prompts != 1 else ''})"
    )
    if not accepted:
        return SpeedupVerdict(LOSES, figures, "it does not pay: no drafted token was accepted")
    if interval and prompts >= FEWEST and interval[0] > 1:
        return SpeedupVerdict(PAYS, figures, "it pays here")
    if interval and prompts >= FEWEST and interval[1] < 1:
        return SpeedupVerdict(LOSES, figures, "it does not pay here: it slows decoding down")
    if not interval:
        return SpeedupVerdict(
            OPEN,
            figures,
            f"inconclusive: no interval is known; measure at least {FEWEST} prompts or batches of them",
        )
    count = f"{prompts} prompt{'s are' if prompts != 1 else ' is'} too few"
    needed = prompts_needed(interval, prompts)
    if needed is None:
        more = "the difference is too small to matter"
        if not (prompts >= FEWEST):
            more = f"measure at least {FEWEST}"
    else:
        more = f"about {needed} would tell if the figure stays, so measure more"
    return SpeedupVerdict(OPEN, figures, f"inconclusive: {count}, {more}")


def prompts_needed(interval: Sequence[float], prompts: int) -> int | None:
    """How many prompts would exclude 1 from the interval, if its middle and spread stay; None for
    more than MOST.

    The half width of an interval, in logarithms, falls with the square root of the number of
    prompts.
    """
    low, high = (math.log(max(end, 1e-9)) for end in interval)
    middle = abs(low + high) / 2
    half = (high - low) / 2
    if prompts < 2 or not middle or half / middle > math.sqrt(MOST / prompts):
        return None
    return max(FEWEST, math.ceil(prompts * (half / middle) ** 2) + 1)


def fastest(figures: Json) -> str:
    """The plain baseline that a speed-up is claimed against, the faster one; empty if none was run."""
    speedup: dict[str, float] = {
        name: x for name, x in figures.get("speedup", {}).items() if name in BASELINES
    }
    return min(speedup, key=lambda name: speedup[name], default="")


def interval_of(figures: Json, baseline: str) -> list[float] | None:
    """The recorded interval of a speed-up; earlier versions wrote none."""
    return ((figures.get("confidence") or {}).get("speedup") or {}).get(baseline)


def verdict_of(figures: Json) -> SpeedupVerdict:
    """The verdict on figures of `metrics.summarize`, or on those of a sweep's cell."""
    speedup = figures.get("speedup_vs_fastest")
    name = fastest(figures)
    if "acceptance_by_depth" in figures and not figures["acceptance_by_depth"]["joint"]:
        return SpeedupVerdict("", "", "nothing was drafted, so there is no speed-up to judge")
    if speedup is None:
        return SpeedupVerdict(
            "",
            "",
            "no plain baseline was run: measure one to know whether speculation pays",
        )
    over = BASELINE_NAMES.get(name, "the faster baseline")
    rate = figures.get("acceptance_rate", 1.0)
    return judge(speedup, interval_of(figures, name), figures.get("prompts", 0), over, rate)


def crossover(label: str, points: Sequence[tuple[float, Json]]) -> str:
    """Says where speculation stops paying along an axis, or that it does not.

    Args:
        label: of the axis. points: (value, figures) in increasing order; figures as in
            `verdict_of`.
    """
    known = [
        (value, figures)
        for value, figures in points
        if figures.get("speedup_vs_fastest") is not None
    ]
    if not known:
        return "not measured"
    unsure = _unsure(known)
    if len(unsure) == len(known):
        return f"inconclusive at every {label} measured, so no crossover can be named"
    over = [
        (value, figures["speedup_vs_fastest"] > 1)
        for value, figures in known
        if value not in unsure
    ]
    (first, _), (last, _) = over[0], over[-1]
    turns = [
        f"{'stops' if before else 'starts'} paying between {label} {left:g} and {right:g}"
        for (left, before), (right, after) in itertools.pairwise(over)
        if before != after
    ]
    if len(over) == 1:
        turns = [
            f"{'pays' if over[0][1] else 'does not pay'} at {label} {first:g}, the only one"
            + " that is sure" * (len(known) > 1)
        ]
    elif not turns and over[0][1]:
        turns = [f"pays from {label} {first:g} to {last:g}, no crossover seen"]
    elif not turns:
        turns = [f"pays at no {label} from {first:g} to {last:g}"]
    return ", ".join(turns) + (
        f" (inconclusive at {', '.join(f'{x:g}' for x in unsure)})" if unsure else ""
    )


def _unsure(points: Sequence[tuple[float, Json]]) -> list[float]:
    """Where a measured speed-up is within noise of 1. Estimates have no noise."""
    return [
        x for x, figures in points if "confidence" in figures and verdict_of(figures).state == OPEN
    ]


def crossovers(rows: Sequence[Json]) -> list[Json]:
    """Finds where speculation stops paying, for each set of cells that differ in batch size,
    context or temperature only.

    Returns:
        cell: what they share; axis; verdict: in words; speedups: by value. Along the batch size
            also batch_size: where the
        speed-up first falls to 1, interpolated between two conclusive ones on a logarithmic scale;
        None if it does at none,
        0 if it is below 1 from the first.
    """
    found = []
    measured = [row for row in rows if row.get("speedup_vs_fastest") is not None]
    for axis in ("batch_size", "context", "temperature"):
        groups: dict[str, dict[float, Json]] = {}
        for row in (row for row in measured if axis in row["cell"]):
            shared = {name: value for name, value in row["cell"].items() if name != axis}
            groups.setdefault(json.dumps(shared), {})[row["cell"][axis]] = row
        for shared_text, group in groups.items():
            points = sorted(group.items())
            if len(points) < 2:
                continue
            speedups = {value: row["speedup_vs_fastest"] for value, row in points}
            each = {
                "cell": json.loads(shared_text),
                "axis": axis,
                "verdict": crossover(axis.replace("_", " "), points),
            }
            unsure = _unsure(points)
            sure = [point for point in speedups.items() if point[0] not in unsure]
            if axis == "batch_size":
                at = {"batch_size": _falls_at(sure)}
            else:
                at = {}
            found.append({**each, **at, "speedups": speedups})
    return found


def _falls_at(points: Sequence[tuple[float, float]]) -> float | None:
    falling = (pair for pair in itertools.pairwise(points) if pair[0][1] >= 1 > pair[1][1])
    for (left, high), (right, low) in falling:
        return round(left * (right / left) ** ((high - 1) / (high - low)), 2)
    if points and points[0][1] < 1:
        return 0
    return None


def _pace(sides: Sequence[Json], name: str, drawn: np.ndarray) -> np.ndarray:
    """Seconds per token of a side. sides: of each prompt. drawn: [..., n] prompts that belong
    together.
    """
    totals = (
        np.array([each[name][key] for each in sides], float)[drawn].sum(-1)
        for key in ("seconds", "tokens")
    )
    seconds, tokens = (np.maximum(total, 1e-9) for total in totals)
    return seconds / tokens


def against(first: Json, other: Json) -> tuple[Ratio, int] | None:
    """Compares two comparable runs on the prompts that both answered, paired.

    Returns:
        how many times as fast the other is, and the number of prompts; None without common prompts.
        Where both measured plain
        decoding, rates are divided by it, which takes out that the machine was faster in one of the
        runs.
    """
    runs = [
        {(r["question_id"], r["turn"]): r["sides"] for r in run.get("prompts", [])}
        for run in (first, other)
    ]
    common = [key for key in runs[0] if key in runs[1]]
    if not common:
        return None
    drawn = np.vstack(
        [np.arange(len(common)), draws(len(common))]
    )  # the first row is the figure itself
    ours, theirs = ([run[key] for key in common] for run in runs)
    ratios = _pace(ours, "drafter", drawn) / _pace(theirs, "drafter", drawn)
    if all("autoregressive" in sides for sides in (*ours, *theirs)):
        ratios *= _pace(theirs, "autoregressive", drawn) / _pace(ours, "autoregressive", drawn)
    return Ratio(float(ratios[0]), *ends(ratios[1:], len(common))), len(common)


def outliers(results: Json) -> list[str]:
    """Prompts whose speed-up over plain decoding lies far from that of the others, a line each."""
    known = [record for record in results.get("prompts", []) if "autoregressive" in record["sides"]]
    if len(known) < 2 * FEWEST:
        return []
    sides = [record["sides"] for record in known]
    each = np.arange(len(known))[:, None]
    logs = np.log(_pace(sides, "autoregressive", each) / _pace(sides, "drafter", each))
    off = np.abs(logs - np.median(logs))
    far = max(
        _OUTLIER * float(np.median(off)) / 0.6745, math.log(_LEAST_OFF)
    )  # the median over 0.6745 is robust
    return [
        f"{record['category']}, question {record['question_id']}, turn {record['turn'] + 1}: {math.exp(log):.2f}x, of "
        f"{math.exp(np.median(logs)):.2f}x at the median prompt"
        for record, log, distance in zip(known, logs, off, strict=True)
        if distance > far
    ]
