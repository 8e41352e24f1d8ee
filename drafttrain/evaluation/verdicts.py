"""Whether speculation pays: the verdict that eval, tune, sweep, estimate, reports and cards print.

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

from drafttrain.evaluation.baselines import BASELINE_NAMES, BASELINES, NGRAM
from drafttrain.evaluation.metrics import Record, intervals, records_by_category
from drafttrain.evaluation.resampling import FEWEST, Ratio, paired_ratio, totals
from drafttrain.files import Json, value_of

MOST = 5000  # prompts; a difference that takes more does not matter
PAYS = "pays"
LOSES = "does not pay"
OPEN = "inconclusive"
# What a drafter adds to n-grams alone, by the state of its speed-up over them.
_ADDED = {
    PAYS: "training adds to n-grams alone",
    LOSES: "n-grams alone, which need no training, are faster",
    OPEN: "what training adds to n-grams alone is within noise",
}
_OUTLIER = 3.5  # robust standard deviations of the log speed-up (Iglewicz and Hoaglin 1993)
_LEAST_OFF = 1.25  # an outlier's distance from the median, as a factor


class SpeedupVerdict(NamedTuple):
    """A measured speed-up and what follows.

    Attributes:
        state: PAYS, LOSES, OPEN, or empty if nothing was drafted or compared.
        figures: the evidence. advice: what to do.
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
        interval: [low, high], 95 % over prompts; None if unknown. over: name of the baseline.
            accepted: any measure of accepted tokens; 0 for none.
    """
    sure = ""
    if interval and prompts > 1:
        sure = f"95 % interval {interval[0]:.2f} to {interval[1]:.2f}, "
    counted = f"{prompts} prompts"
    too_few = f"{prompts} prompts are too few"
    if prompts == 1:
        counted = "1 prompt"
        too_few = "1 prompt is too few"
    figures = f"{speedup:.2f}x as fast as {over} ({sure}{counted})"

    if not accepted:
        return SpeedupVerdict(LOSES, figures, "it does not pay: no drafted token was accepted")
    if interval and prompts >= FEWEST and interval[0] > 1:
        return SpeedupVerdict(PAYS, figures, "it pays here")
    if interval and prompts >= FEWEST and interval[1] < 1:
        return SpeedupVerdict(LOSES, figures, "it does not pay here: it slows decoding down")
    if not interval:
        more = f"measure at least {FEWEST} prompts or batches of them"
        return SpeedupVerdict(OPEN, figures, f"inconclusive: no interval is known; {more}")

    needed = prompts_needed(interval, prompts)
    if needed is not None:
        more = f"about {needed} would tell if the figure stays, so measure more"
    elif prompts >= FEWEST:
        more = "the difference is too small to matter"
    else:
        more = f"measure at least {FEWEST}"
    return SpeedupVerdict(OPEN, figures, f"inconclusive: {too_few}, {more}")


def prompts_needed(interval: Sequence[float], prompts: int) -> int | None:
    """Number of prompts that would exclude 1 from the interval; None for more than MOST.

    Assumes that the interval's middle and spread stay. Its half width, in logarithms, falls with
    the square root of the number of prompts.
    """
    low = math.log(max(interval[0], 1e-9))
    high = math.log(max(interval[1], 1e-9))
    middle = abs(low + high) / 2
    half = (high - low) / 2
    if prompts < 2 or not middle or half / middle > math.sqrt(MOST / prompts):
        return None  # no number, or too large a one
    return max(FEWEST, math.ceil(prompts * (half / middle) ** 2) + 1)


def fastest(figures: Json) -> str:
    """The plain baseline that a speed-up is claimed against: the faster one, empty without one."""
    speedups: dict[str, float] = figures.get("speedup", {})
    plain = [name for name in speedups if name in BASELINES]
    return min(plain, key=lambda name: speedups[name], default="")


def _speedup(figures: Json, baseline: str) -> float | None:
    """The recorded speed-up over a baseline."""
    return value_of(figures, "speedup", {}).get(baseline)


def interval_of(figures: Json, baseline: str) -> list[float] | None:
    """The recorded interval of a speed-up; earlier versions wrote none."""
    confidence = value_of(figures, "confidence", {})
    return value_of(confidence, "speedup", {}).get(baseline)


def verdict_of(figures: Json) -> SpeedupVerdict:
    """The verdict on figures of `metrics.summarize`, or on those of a sweep's cell.

    Where n-grams alone were measured it also says what the drafter adds to them.
    """
    speedup = figures.get("speedup_vs_fastest")
    name = fastest(figures)
    if "acceptance_by_depth" in figures and not figures["acceptance_by_depth"]["joint"]:
        return SpeedupVerdict("", "", "nothing was drafted, so there is no speed-up to judge")
    if speedup is None:
        advice = "no plain baseline was run: measure one to know whether speculation pays"
        return SpeedupVerdict("", "", advice)
    found = judge(
        speedup,
        interval_of(figures, name),
        figures.get("prompts", 0),
        over=BASELINE_NAMES.get(name, "the faster baseline"),
        accepted=figures.get("acceptance_rate", 1.0),
    )
    added = _speedup(figures, NGRAM)
    if added is None:
        return found
    over_ngrams = judge(
        added,
        interval_of(figures, NGRAM),
        figures.get("prompts", 0),
        over=BASELINE_NAMES[NGRAM],
    )
    return SpeedupVerdict(
        found.state,
        f"{found.figures}, {over_ngrams.figures}",
        f"{found.advice}; {_ADDED[over_ngrams.state]}",
    )


def categories_of(results: Json) -> dict[str, list[Record]]:
    """The prompts of each category that has enough of them to be judged.

    Empty if only one category was measured.
    """
    found = records_by_category(results.get("prompts", []))
    if len(found) < 2:
        return {}
    return {name: part for name, part in found.items() if len(part) >= FEWEST}


def category_states(results: Json) -> dict[str, str]:
    """The state of each category that has enough prompts, against the faster plain baseline.

    The intervals are widened for the number of categories, because one of ten is often slow by
    chance.
    """
    baseline = fastest(results["overall"])
    if not baseline:
        return {}
    parts = categories_of(results)
    found = {}
    for name, part in parts.items():
        speedup = _speedup(results["categories"][name], baseline)
        if speedup is not None:
            span = intervals(part, [baseline], len(parts))["speedup"][baseline]
            found[name] = judge(speedup, span, len(part)).state
    return found


def verdict_on(results: Json) -> SpeedupVerdict:
    """The verdict on a results file: over all prompts, then by category.

    A category is judged only by an interval; a slower one without is named as undecided, so that
    the verdict over all prompts does not hide it.
    """
    overall = verdict_of(results["overall"])
    categories = value_of(results, "categories", {})
    if not overall.figures or len(categories) < 2:
        return overall
    states = category_states(results)
    baseline = fastest(results["overall"])
    undecided = []
    for name, figures in categories.items():
        speedup = _speedup(figures, baseline)
        if speedup and speedup < 1 and states.get(name, OPEN) == OPEN:
            undecided.append(f"{name} ({speedup:.2f}x)")
    parts = []
    for state, words in ((PAYS, "it pays in"), (LOSES, "it slows down")):
        names = [name for name, own in states.items() if own == state]
        if names:
            parts.append(f"{words} {', '.join(names)}")
    if undecided:
        parts.append(f"slower, but within noise or on too few prompts: {', '.join(undecided)}")
    if not parts:
        return overall
    return overall._replace(advice=f"{overall.advice}; by category: {', '.join(parts)}")


def crossover(label: str, points: Sequence[tuple[float, Json]]) -> str:
    """Says where speculation stops paying along an axis, or that it does not.

    Args:
        label: name of the axis. points: (value, figures) in increasing order; figures as in
            `verdict_of`.
    """
    known = [point for point in points if point[1].get("speedup_vs_fastest") is not None]
    if not known:
        return "not measured"
    unsure = _unsure(known)
    pays = []  # (value, whether it pays there) where that is sure
    for value, figures in known:
        if value not in unsure:
            pays.append((value, figures["speedup_vs_fastest"] > 1))
    if not pays:
        return f"inconclusive at every {label} measured, so no crossover can be named"

    first, pays_first = pays[0]
    last = pays[-1][0]
    turns = []
    for (left, before), (right, after) in itertools.pairwise(pays):
        if before != after:
            word = "stops" if before else "starts"
            turns.append(f"{word} paying between {label} {left:g} and {right:g}")
    if turns:
        text = ", ".join(turns)
    elif len(pays) == 1:
        word = "pays" if pays_first else "does not pay"
        text = f"{word} at {label} {first:g}, the only one"
        if len(known) > 1:
            text += " that is sure"
    elif pays_first:
        text = f"pays from {label} {first:g} to {last:g}, no crossover seen"
    else:
        text = f"pays at no {label} from {first:g} to {last:g}"
    if unsure:
        shown = [f"{value:g}" for value in unsure]
        text += f" (inconclusive at {', '.join(shown)})"
    return text


def _unsure(points: Sequence[tuple[float, Json]]) -> list[float]:
    """Where a measured speed-up is within noise of 1, or of no draft. Estimates have no noise."""
    found = []
    for value, figures in points:
        if "confidence" in figures and verdict_of(figures).state in (OPEN, ""):
            found.append(value)
    return found


def crossovers(rows: Sequence[Json]) -> list[Json]:
    """Finds where speculation stops paying along batch size, context and temperature.

    Returns:
        Per axis and per set of cells that differ along it only:
        cell: the settings that they share; axis; verdict: in words; speedups: by value.
        batch_size, along the batch size only: where the speed-up first falls to 1, interpolated
        between two conclusive ones on a logarithmic scale; None if it does at none, 0 if it is
        below 1 from the first.
    """
    found = []
    measured = [row for row in rows if row.get("speedup_vs_fastest") is not None]
    for axis in ("batch_size", "context", "temperature"):
        groups: dict[str, dict[float, Json]] = {}  # shared settings -> value -> row
        for row in measured:
            if axis in row["cell"]:
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
            if axis == "batch_size":
                unsure = _unsure(points)
                conclusive = [point for point in speedups.items() if point[0] not in unsure]
                each["batch_size"] = _falls_at(conclusive)
            each["speedups"] = speedups
            found.append(each)
    return found


def _falls_at(points: Sequence[tuple[float, float]]) -> float | None:
    for (left, high), (right, low) in itertools.pairwise(points):
        if high >= 1 > low:
            # Between the two on a straight line over the logarithm of the size.
            share = (high - 1) / (high - low)
            return round(left * (right / left) ** share, 2)
    if points and points[0][1] < 1:
        return 0
    return None


def against(first: Json, other: Json) -> tuple[Ratio, int] | None:
    """Compares two comparable runs on the prompts that both answered, paired.

    Returns:
        how many times as fast the other is, and the number of prompts; None without common prompts.
        Where both measured plain decoding, rates are divided by it, which takes out that the
        machine was faster in one of the runs.
    """
    ours = _sides_by_prompt(first)
    theirs = _sides_by_prompt(other)
    common = [key for key in ours if key in theirs]
    if not common:
        return None

    def amounts(run: dict[tuple[str, int], Json], side: str, key: str) -> list[float]:
        return [run[prompt][side][key] for prompt in common]

    over = [amounts(ours, "drafter", "seconds"), amounts(theirs, "drafter", "tokens")]
    under = [amounts(ours, "drafter", "tokens"), amounts(theirs, "drafter", "seconds")]
    if all("autoregressive" in run[key] for run in (ours, theirs) for key in common):
        over.append(amounts(theirs, "autoregressive", "seconds"))
        over.append(amounts(ours, "autoregressive", "tokens"))
        under.append(amounts(theirs, "autoregressive", "tokens"))
        under.append(amounts(ours, "autoregressive", "seconds"))
    return paired_ratio(over, under), len(common)


def _sides_by_prompt(run: Json) -> dict[tuple[str, int], Json]:
    found = {}
    for record in run.get("prompts", []):
        found[record["question_id"], record["turn"]] = record["sides"]
    return found


def outliers(results: Json) -> list[str]:
    """Prompts whose speed-up over plain decoding lies far from that of the others, a line each."""
    known = [record for record in results.get("prompts", []) if "autoregressive" in record["sides"]]
    if len(known) < 2 * FEWEST:
        return []
    alone = np.arange(len(known))[:, None]  # each prompt by itself

    def pace(side: str) -> np.ndarray:  # [prompts] seconds per token
        seconds = [record["sides"][side]["seconds"] for record in known]
        tokens = [record["sides"][side]["tokens"] for record in known]
        return totals(seconds, alone) / totals(tokens, alone)

    logs = np.log(pace("autoregressive") / pace("drafter"))
    median = float(np.median(logs))
    off = np.abs(logs - median)
    # The median over 0.6745 is a robust standard deviation.
    far = max(_OUTLIER * float(np.median(off)) / 0.6745, math.log(_LEAST_OFF))
    lines = []
    for record, log, distance in zip(known, logs, off, strict=True):
        if distance > far:
            lines.append(
                f"{record['category']}, question {record['question_id']}, turn {record['turn'] + 1}: "
                f"{math.exp(log):.2f}x, of {math.exp(median):.2f}x at the median prompt"
            )
    return lines
