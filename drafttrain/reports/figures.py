"""What pages of results and of sweeps share: figures with intervals, conditions, settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from drafttrain.credentials import redact
from drafttrain.evaluation.verdicts import FEWEST, LOSES, PAYS, fastest
from drafttrain.files import Json
from drafttrain.reports.charts import Series, Span

COLORS = {PAYS: "good", LOSES: "bad"}  # of a verdict
DASH = "\u2013"
TIMES = "times as fast"  # the unit of a speed-up
times = "{:.2f}\u00d7".format
# What a page names first of the settings of a run: keys of its results.
_SHOWN = (
    "target",
    "drafter",
    "kind",
    "suite",
    "suite_digest",
    "date",
    "machine",
    "device",
    "threads",
    "dtype",
    "compute_dtype",
)


def conditions(run: Json) -> str:
    """When, where and how a result was measured, as far as the file says it."""
    parts = []
    day = str(run.get("date", ""))[:10]
    if day:
        parts.append(f"measured {day}")
    if run.get("device"):
        parts.append(run["device"])
    if run.get("threads"):
        parts.append(f"{run['threads']} threads")
    dtype = run.get("dtype")
    computed = run.get("compute_dtype")
    if dtype and computed and computed != dtype:
        parts.append(f"{dtype} computed in {computed}")
    elif dtype:
        parts.append(dtype)
    if "drafttrain" in run:
        version = f"drafttrain {run['drafttrain']}"
        if run.get("commit"):
            version += f" at {run['commit']}"
        parts.append(version)
    return ", ".join(parts)


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def figure_of(figures: Json, key: str, part: str = "") -> float | None:
    """A figure by its key.

    Args:
        part: of a figure that has several: the baseline of a speed-up, the percentile of a time.
    """
    value = figures.get(key)
    if part:
        return (value or {}).get(part)
    return value


def span_of(figures: Json, key: str, part: str = "") -> Span | None:
    """The confidence interval of a figure, if the file has one and enough prompts for it.

    See `figure_of`.
    """
    if figures.get("prompts", FEWEST) < FEWEST:
        return None
    if key == "speedup_vs_fastest":  # the interval of the baseline that gave this figure
        key = "speedup"
        part = fastest(figures)
    span = (figures.get("confidence") or {}).get(key)
    if span and part:
        span = span.get(part)
    if span:
        return (span[0], span[1])
    return None


def lengths_text(figures: Json) -> str:
    """Tokens of the prompts and answers, in words; empty for files of earlier versions."""
    words = []
    for name in ("prompt", "answer"):
        found = figures.get(f"{name}_lengths")
        if found:
            words.append(
                f"{name}s of {found['least']:,} to {found['most']:,} tokens, {found['mean']:,.0f} on average"
            )
    return "; ".join(words)


def interval_text(span: Span | None) -> str:
    """An interval in brackets, as it follows a figure; empty if unknown."""
    if span is None:
        return ""
    return f" ({span[0]:.2f} to {span[1]:.2f})"


def series_of(name: str, places: Iterable[tuple[Json, str]], tone: int, key: str) -> Series:
    """One figure of several places with its intervals.

    Args:
        places: the figures of a category, a batch size, ..., and the part; see `figure_of`.
    """
    values = []
    spans = []
    for figures, part in places:
        values.append(figure_of(figures, key, part))
        spans.append(span_of(figures, key, part))
    return Series(name, values, tone, spans=spans)


def settings_table(runs: Sequence[Json]) -> list[tuple[str, list[str], bool]]:
    """(setting, value per run, whether they differ)."""
    tables = [_settings(run) for run in runs]
    rows = []
    for key in dict.fromkeys(itertools.chain(*tables)):  # of all runs, in order
        values = [table.get(key, DASH) for table in tables]
        rows.append((key.replace("_", " "), values, len(set(values)) > 1))
    return rows


def _settings(run: Json) -> dict[str, str]:
    """The settings of a run that are not empty, as text."""
    every: Json = {key: run[key] for key in _SHOWN if key in run}
    # The tree stands before the other settings of decoding, by its text alone.
    every["tree"] = run["decoding"].get("tree", {}).get("spec", "")
    for key, value in run["decoding"].items():
        if key != "tree":
            every[key] = value
    for key in ("drafttrain", "commit"):
        every[key] = run.get(key) or ""
    every |= run.get("versions", {})  # of packages
    every["command"] = " ".join(redact(run.get("command", [])))
    return {key: str(value) for key, value in every.items() if str(value)}
