"""Whether speculation pays: the one verdict that eval, tune, sweep, estimate, reports and model cards print.

pays            the interval of the speed-up lies above 1, and drafted tokens were accepted
does not pay    the interval lies below 1, or no drafted token was accepted
inconclusive    the interval holds 1, is unknown, or rests on fewer than FEWEST prompts
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from drafttrain.evaluation.baselines import BASELINE_NAMES, BASELINES
from drafttrain.evaluation.resampling import Ratio, draws, ends
from drafttrain.files import Json

FEWEST = 4  # prompts that a verdict needs
MOST = 5000  # prompts; a difference that takes more does not matter
PAYS, LOSES, OPEN = "pays", "does not pay", "inconclusive"
_OUTLIER = 3.5  # robust standard deviations of the log speed-up (Iglewicz and Hoaglin 1993)
_LEAST_OFF = 1.25  # an outlier's distance from the median, as a factor


class SpeedupVerdict(NamedTuple):
    """A measured speed-up and what follows. state: PAYS, LOSES, OPEN, or empty if nothing was drafted or compared."""

    state: str
    figures: str
    advice: str

    @property
    def text(self) -> str:
        return ": ".join(filter(None, (self.figures, self.advice)))


def judge(
    speedup: float, interval: Sequence[float] | None, prompts: int, over: str = "plain decoding", accepted: float = 1.0
) -> SpeedupVerdict:
    """Judges a speed-up.

    Args:
        interval: [low, high], 95 % over prompts; None if unknown. over: what it is compared with. accepted: any measure of
            accepted tokens; 0 for none.
    """
    sure = f"95 % interval {interval[0]:.2f} to {interval[1]:.2f}, " if interval and prompts > 1 else ""
    figures = f"{speedup:.2f}x as fast as {over} ({sure}{prompts} prompt{'s' if prompts != 1 else ''})"
    if not accepted:
        return SpeedupVerdict(LOSES, figures, "it does not pay: no drafted token was accepted")
    if interval and prompts >= FEWEST and interval[0] > 1:
        return SpeedupVerdict(PAYS, figures, "it pays here")
    if interval and prompts >= FEWEST and interval[1] < 1:
        return SpeedupVerdict(LOSES, figures, "it does not pay here: it slows decoding down")
    if not interval:
        return SpeedupVerdict(OPEN, figures, "inconclusive: no interval is recorded; measure again to get one")
    count, needed = f"{prompts} prompt{'s are' if prompts != 1 else ' is'} too few", prompts_needed(interval, prompts)
    if needed is None:
        more = "the difference is too small to matter" if prompts >= FEWEST else f"measure at least {FEWEST}"
    else:
        more = f"about {needed} would tell if the figure stays, so measure more"
    return SpeedupVerdict(OPEN, figures, f"inconclusive: {count}, {more}")


def prompts_needed(interval: Sequence[float], prompts: int) -> int | None:
    """How many prompts would exclude 1 from the interval, if its middle and spread stay; None for more than MOST.

    The half width of an interval, in logarithms, falls with the square root of the number of prompts.
    """
    low, high = (math.log(max(end, 1e-9)) for end in interval)
    middle, half = abs(low + high) / 2, (high - low) / 2
    if prompts < 2 or not middle or half / middle > math.sqrt(MOST / prompts):
        return None
    return max(FEWEST, math.ceil(prompts * (half / middle) ** 2) + 1)


def fastest(figures: Mapping[str, Any]) -> str:
    """The plain baseline that a speed-up is claimed against, the faster one; empty if none was run."""
    speedup: dict[str, float] = {name: x for name, x in figures.get("speedup", {}).items() if name in BASELINES}
    return min(speedup, key=lambda name: speedup[name], default="")


def interval_of(figures: Mapping[str, Any], baseline: str) -> list[float] | None:
    """The recorded interval of a speed-up; earlier versions wrote none."""
    return ((figures.get("confidence") or {}).get("speedup") or {}).get(baseline)


def verdict_of(figures: Mapping[str, Any]) -> SpeedupVerdict:
    """The verdict on figures of `metrics.summarize`, or on those of a sweep's cell."""
    speedup, name = figures.get("speedup_vs_fastest"), fastest(figures)
    if "acceptance_by_depth" in figures and not figures["acceptance_by_depth"]["joint"]:
        return SpeedupVerdict("", "", "nothing was drafted, so there is no speed-up to judge")
    if speedup is None:
        return SpeedupVerdict("", "", "no plain baseline was run: measure one to know whether speculation pays")
    over, rate = BASELINE_NAMES.get(name, "the faster baseline"), figures.get("acceptance_rate", 1.0)
    return judge(speedup, interval_of(figures, name), figures.get("prompts", 0), over, rate)


def crossover(label: str, points: Sequence[tuple[float, Mapping[str, Any]]]) -> str:
    """Says where speculation stops paying along an axis, or that it does not.

    Args:
        label: of the axis. points: (value, figures) in increasing order; figures as in `verdict_of`.
    """
    known = [(value, figures) for value, figures in points if figures.get("speedup_vs_fastest") is not None]
    if not known:
        return "not measured"
    (first, _), (last, _) = known[0], known[-1]
    over = [figures["speedup_vs_fastest"] > 1 for _, figures in known]
    unsure = [f"{x:g}" for x, figures in known if "confidence" in figures and verdict_of(figures).state == OPEN]
    doubt = f" (inconclusive at {', '.join(unsure)})" if unsure else ""
    if len(known) == 1:
        text = f"{'pays' if over[0] else 'does not pay'} at {label} {first:g}, the only one"
    elif all(over):
        text = f"pays from {label} {first:g} to {last:g}, no crossover seen"
    elif not any(over):
        text = f"pays at no {label} from {first:g} to {last:g}"
    else:
        turns = [
            f"{'stops' if before else 'starts'} paying between {label} {left:g} and {right:g}"
            for (before, after), ((left, _), (right, _)) in zip(
                itertools.pairwise(over), itertools.pairwise(known), strict=True
            )
            if before != after
        ]
        text = ", ".join(turns)
    return text + doubt


def crossovers(rows: Sequence[Json]) -> list[Json]:
    """Finds where speculation stops paying, for each set of cells that differ in batch size, context or temperature only.

    Returns:
        cell: what they share; axis; verdict: in words; speedups: by value. Along the batch size also batch_size: where the
        speed-up first falls to 1, interpolated between two sizes on a logarithmic scale; None if it does at no measured size,
        0 if it is below 1 from the first.
    """
    found = []
    for axis in ("batch_size", "context", "temperature"):
        groups: dict[str, list[Json]] = {}
        for row in rows:
            shared = {name: value for name, value in row["cell"].items() if name != axis}
            if row.get("speedup_vs_fastest") is not None and axis in row["cell"]:
                groups.setdefault(json.dumps(shared), []).append(row)
        for shared_text, group in groups.items():
            points = sorted(((row["cell"][axis], row) for row in group), key=lambda point: point[0])
            if len(points) < 2:
                continue
            speedups = {value: row["speedup_vs_fastest"] for value, row in points}
            at = {"batch_size": falls_at(speedups)} if axis == "batch_size" else {}
            words = crossover(axis.replace("_", " "), points)
            found.append({"cell": json.loads(shared_text), "axis": axis, **at, "verdict": words, "speedups": speedups})
    return found


def falls_at(speedups: Mapping[float, float]) -> float | None:
    """See `crossovers`. speedups: by increasing batch size."""
    points = list(speedups.items())
    if points[0][1] < 1:
        return 0
    for (left, high), (right, low) in itertools.pairwise(points):
        if high >= 1 > low:
            return round(left * (right / left) ** ((high - 1) / (high - low)), 2)
    return None


def against(first: Json, other: Json) -> tuple[Ratio, int] | None:
    """Compares two comparable runs on the prompts that both answered, paired.

    Returns:
        how many times as fast the other is, and the number of prompts; None without common prompts. Where both measured plain
        decoding, rates are divided by it, which takes out that the machine was faster in one of the runs.
    """
    sides = [{(r["question_id"], r["turn"]): r["sides"] for r in run.get("prompts", [])} for run in (first, other)]
    common = [key for key in sides[0] if key in sides[1]]
    if not common:
        return None
    drawn = np.vstack([np.arange(len(common)), draws(len(common))])  # the first row is the figure itself
    rates = []
    for by_key in sides:
        used = ["drafter", "autoregressive"]
        used = used if all("autoregressive" in each[key] for each in sides for key in common) else used[:1]
        totals = [
            np.array([[by_key[key][side][what] for key in common] for what in ("tokens", "seconds")])[:, drawn].sum(-1)
            for side in used
        ]  # [2, 1 + RESAMPLES] each
        rate = totals[0][0] / totals[0][1]
        rates.append(rate if len(used) == 1 else rate * totals[1][1] / totals[1][0])
    ratios = rates[1] / rates[0]
    return Ratio(float(ratios[0]), *ends(ratios[1:], len(common))), len(common)


def outliers(results: Mapping[str, Any]) -> list[str]:
    """Prompts whose speed-up over plain decoding lies far from that of the others, a line each."""
    known = []
    for record in results.get("prompts", []):
        ours, plain = record["sides"]["drafter"], record["sides"].get("autoregressive")
        if plain and all(part[key] for part in (ours, plain) for key in ("tokens", "seconds")):
            known.append((record, ours["tokens"] / ours["seconds"] * plain["seconds"] / plain["tokens"]))
    if len(known) < 2 * FEWEST:
        return []
    logs = np.log([speedup for _, speedup in known])
    off = logs - np.median(logs)
    spread = max(float(np.median(np.abs(off))) / 0.6745, 1e-3)  # robust standard deviation
    middle = math.exp(float(np.median(logs)))
    return [
        f"{record['category']}, question {record['question_id']}, turn {record['turn'] + 1}: {speedup:.2f}x, of {middle:.2f}x "
        "at the median prompt"
        for (record, speedup), far in zip(known, off, strict=True)
        if abs(far) > max(_OUTLIER * spread, math.log(_LEAST_OFF))
    ]
