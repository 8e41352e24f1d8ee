"""The part of a report's page about a sweep: title, table of cells, charts and where speculation
stops paying.
"""

from __future__ import annotations

from collections.abc import Iterable

from drafttrain.evaluation.verdicts import OPEN, crossover, crossovers, verdict_of
from drafttrain.files import Json
from drafttrain.reports.charts import Chart
from drafttrain.reports.figures import (
    COLORS,
    DASH,
    conditions,
    sentence,
    series_of,
    settings_table,
    span_of,
    times,
)

_AXES = {name: name for name in ("tree", "temperature", "dtype")} | {
    "batch_size": "batch size",
    "context": "context length",
}


def _cells(sweep: Json) -> list[tuple[Json, Json]]:
    """(settings, figures) of each cell that was compared with a baseline.

    Settings are under `cell` or beside the figures; figures are under `overall` or beside the
    settings.
    """
    found = []
    for cell in sweep["cells"]:
        figures = cell.get("overall", cell)
        if figures.get("speedup_vs_fastest") is not None:
            settings = dict(cell.get("cell") or {key: cell[key] for key in _AXES if key in cell})
            settings["tree"] = cell.get("spec") or settings.get("tree")
            found.append((settings, figures))
    return found


def sweep_charts(sweep: Json, number: int) -> Iterable[Chart]:
    """Speed-up by batch size with a line per other setting; and by each other axis, the rest as in
    the first cell.
    """
    cells = _cells(sweep)
    suffix = ""
    if number != 1:
        suffix = f"_{number}"
    differing = [key for key in _AXES if len({str(settings.get(key)) for settings, _ in cells}) > 1]
    others = [key for key in differing if key != "batch_size"]
    lines: dict[str, dict[int, Json]] = {}
    for settings, figures in cells:
        name = ", ".join(
            str(settings[key]) if key == "tree" else f"{_AXES[key]} {settings.get(key)}"
            for key in others
        )
        lines.setdefault(name or "speed-up", {})[settings.get("batch_size", 1)] = figures
    lines = {name: by_size for name, by_size in lines.items() if len(by_size) > 1}
    if lines:
        yield _crossover(lines, f"crossover{suffix}")
    for key in others:
        rest = [other for other in _AXES if other != key]
        own = {
            str(s.get(key)): f
            for s, f in cells
            if all(s.get(other) == cells[0][0].get(other) for other in rest)
        }
        series = [series_of("speed-up", list(own.values()), 1, "speedup_vs_fastest")]
        title = f"Speed-up by {_AXES[key]}"
        note = "Over the faster baseline, all else as in the sweep's first cell."
        yield Chart(
            f"sweep_{key}{suffix}",
            title,
            note,
            "bars",
            list(own),
            series,
            show=times,
            reference=1.0,
        )


def _crossover(lines: dict[str, dict[int, Json]], key: str) -> Chart:
    """Args: lines: by the name of a setting, figures by batch size."""
    sizes = sorted({size for by_size in lines.values() for size in by_size})
    series = [
        series_of(name, [by_size.get(size, {}) for size in sizes], tone, "speedup_vs_fastest")
        for tone, (name, by_size) in enumerate(lines.items(), 1)
    ]
    ends = [
        f"{name}: {crossover('batch size', sorted(by_size.items()))}"
        for name, by_size in lines.items()
    ]
    note = f"Below the dashed line speculation does not pay. {sentence('; '.join(ends))}"
    labels = [str(size) for size in sizes]
    label = "prompts at a time"
    return Chart(
        key,
        "Speed-up by batch size",
        note,
        "lines",
        labels,
        series,
        label,
        show=times,
        reference=1.0,
    )


def sweep_title(sweep: Json) -> str:
    """Names a sweep by what was measured, as far as its summary says it."""
    drafter = sweep.get("drafter") or sweep.get("kind", "")
    return f"Sweep of {' + '.join(filter(None, (sweep.get('target'), drafter)))}".removesuffix(
        " of "
    )


def sweep_section(sweep: Json) -> Json:
    """Title, conditions, a row per cell (axes, figures, verdict, its color), where speculation
    stops paying, and settings.
    """
    cells = _cells(sweep)
    axes = [key for key in _AXES if any(settings.get(key) is not None for settings, _ in cells)]
    rows = []
    for settings, figures in cells:
        found = verdict_of(figures)
        span = span_of(figures, "speedup_vs_fastest")
        known = [figures.get(key) for key in ("accepted_length", "tokens_per_second")]
        shown = [DASH if value is None else f"{value:,.2f}" for value in known]
        shown.append(
            times(figures["speedup_vs_fastest"])
            + (f" ({span[0]:.2f} to {span[1]:.2f})" if span else "")
        )
        state = "no interval recorded"
        if not (found.state == OPEN and not span):
            state = found.state
        rows.append(
            (
                [str(settings.get(key, DASH)) for key in axes],
                shown,
                state,
                COLORS.get(found.state, ""),
            )
        )
    varied = {key for key in _AXES if len({str(settings.get(key)) for settings, _ in cells}) > 1}
    words = []
    for each in crossovers([{"cell": settings, **figures} for settings, figures in cells]):
        shared = [f"{_AXES[key]} {value}" for key, value in each["cell"].items() if key in varied]
        words.append(sentence(": ".join(filter(None, (", ".join(shared), each["verdict"])))))
    if len({settings.get("batch_size") for settings, _ in cells}) < 2:
        words.append(
            "One batch size was measured, so it does not show where speculation stops paying."
        )
    suite = ""
    if "suite" in sweep:
        suite = f"suite {sweep['suite']}"
    limits = {key: sweep[key] for key in ("max_new_tokens", "limit") if key in sweep}
    return {
        "title": sweep_title(sweep),
        "conditions": ", ".join(filter(None, (suite, conditions(sweep)))),
        "axes": [_AXES[key] for key in axes],
        "rows": rows,
        "crossovers": words,
        "settings": settings_table([{**sweep, "decoding": limits}]),
    }
