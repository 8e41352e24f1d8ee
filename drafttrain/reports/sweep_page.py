"""The part of a report's page about a sweep: title, cells, charts, and where it stops paying."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from drafttrain.evaluation.baselines import NGRAM
from drafttrain.evaluation.verdicts import crossover, crossovers
from drafttrain.files import Json
from drafttrain.reports.charts import Chart
from drafttrain.reports.figures import (
    TIMES,
    conditions,
    sentence,
    series_of,
    settings_table,
    times,
)

# Axis of a sweep -> its name in words.
_AXES = {
    "tree": "tree",
    "temperature": "temperature",
    "dtype": "dtype",
    "batch_size": "batch size",
    "context": "context length",
}


def _cells(sweep: Json) -> list[tuple[Json, Json]]:
    """(settings, figures) of each cell that was compared with a baseline.

    Earlier versions wrote the settings beside the figures, or the figures under `overall`.
    """
    found = []
    for cell in sweep["cells"]:
        figures = cell.get("overall", cell)
        if figures.get("speedup_vs_fastest") is None:
            continue
        settings = dict(cell.get("cell", {}))
        if not settings:
            settings = {key: cell[key] for key in _AXES if key in cell}
        settings["tree"] = cell.get("spec") or settings.get("tree")
        found.append((settings, figures))
    return found


def _varied(cells: Sequence[tuple[Json, Json]]) -> list[str]:
    """The axes along which cells differ."""
    found = []
    for key in _AXES:
        values = {str(settings.get(key)) for settings, _ in cells}
        if len(values) > 1:
            found.append(key)
    return found


def sweep_charts(sweep: Json, number: int) -> Iterable[Chart]:
    """Speed-up by batch size with a line per other setting, and by each other axis.

    The charts of an axis take the other settings of the first cell.
    """
    cells = _cells(sweep)
    suffix = "" if number == 1 else f"_{number}"
    others = [key for key in _varied(cells) if key != "batch_size"]

    lines: dict[str, dict[int, Json]] = {}  # other settings -> batch size -> figures
    for settings, figures in cells:
        words = []
        for key in others:
            if key == "tree":
                words.append(str(settings[key]))
            else:
                words.append(f"{_AXES[key]} {settings.get(key)}")
        name = ", ".join(words)
        if not name:
            name = "speed-up"
        lines.setdefault(name, {})[settings.get("batch_size", 1)] = figures
    for name, by_size in list(lines.items()):
        if len(by_size) < 2:  # a point is not a line
            del lines[name]
    if lines:
        sizes = sorted(set().union(*lines.values()))
        series = []
        ends = []
        for tone, (name, by_size) in enumerate(lines.items(), 1):
            places = [(by_size.get(size, {}), "") for size in sizes]
            series.append(series_of(name, places, tone, "speedup_vs_fastest"))
            ends.append(f"{name}: {crossover('batch size', sorted(by_size.items()))}")
        yield Chart(
            f"crossover{suffix}",
            "Speed-up by batch size",
            f"Below the dashed line speculation does not pay. {sentence('; '.join(ends))}",
            "lines",
            [str(size) for size in sizes],
            series,
            "prompts at a time",
            TIMES,
            show=times,
            reference=1.0,
        )

    for key in others:
        own: dict[str, Json] = {}  # value along this axis -> figures
        for settings, figures in cells:
            first = cells[0][0]
            if all(settings.get(name) == first.get(name) for name in _AXES if name != key):
                own[str(settings.get(key))] = figures
        yield Chart(
            f"sweep_{key}{suffix}",
            f"Speed-up by {_AXES[key]}",
            "Over the faster baseline, all else as in the sweep's first cell.",
            "bars",
            list(own),
            [series_of("speed-up", [(each, "") for each in own.values()], 1, "speedup_vs_fastest")],
            _AXES[key],
            TIMES,
            show=times,
            reference=1.0,
        )


def sweep_title(sweep: Json) -> str:
    """Names a sweep by what was measured, as far as its summary says it."""
    models = (sweep.get("target"), sweep.get("drafter") or sweep.get("kind"))
    known = [str(model) for model in models if model]
    if known:
        return f"Sweep of {' + '.join(known)}"
    return "Sweep"


def sweep_section(sweep: Json) -> Json:
    """The part of a page about a sweep.

    Returns:
        title, conditions; axes: names of those that a cell sets; beside_ngrams: whether n-grams
        alone were measured; cells: settings and figures of each; crossovers: where speculation
        stops paying, in sentences; settings.
    """
    cells = _cells(sweep)
    axes = {}
    for key, name in _AXES.items():
        if any(settings.get(key) is not None for settings, _ in cells):
            axes[key] = name

    varied = _varied(cells)
    sentences = []
    for each in crossovers([{"cell": settings, **figures} for settings, figures in cells]):
        words = []
        for key, value in each["cell"].items():
            if key in varied:
                words.append(f"{_AXES[key]} {value}")
        text = each["verdict"]
        if words:
            text = f"{', '.join(words)}: {text}"
        sentences.append(sentence(text))
    if len({settings.get("batch_size") for settings, _ in cells}) < 2:
        sentences.append(
            "One batch size was measured, so it does not show where speculation stops paying."
        )

    facts = conditions(sweep)
    if "suite" in sweep:
        facts = ", ".join(filter(None, (f"suite {sweep['suite']}", facts)))
    limits = {key: sweep[key] for key in ("max_new_tokens", "limit") if key in sweep}
    return {
        "title": sweep_title(sweep),
        "conditions": facts,
        "axes": axes,
        "beside_ngrams": any(NGRAM in figures.get("speedup", {}) for _, figures in cells),
        "cells": cells,
        "crossovers": sentences,
        "settings": settings_table([{**sweep, "decoding": limits}]),
    }
