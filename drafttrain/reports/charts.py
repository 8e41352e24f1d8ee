"""Charts of results: made once as data, drawn as SVG that follows a page's colours, or as PNG.

Every chart also is a table, for those who cannot see it and for those who want the figures.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError

# Colours of a PNG; in a page they are the style's variables of these names, which know light and dark.
_LIGHT = {
    "ink": "#191c20",
    "muted": "#5b6470",
    "grid": "#e9eae6",
    "card": "#ffffff",
    "s0": "#8a929c",
    "s1": "#2563c9",
    "s2": "#c2570c",
    "s3": "#0b7a6b",
    "s4": "#7c3fc4",
    "s5": "#b3326b",
    "s6": "#6b6a10",
}
# matplotlib wants colours, so each variable is drawn in one of its own that no chart uses, and replaced afterwards.
_STAND_INS = {name: f"#fe01{index:02x}" for index, name in enumerate(_LIGHT)}
_MARKERS = "osD^vPX"
_TONES = 6


@dataclass
class Series:
    """One colour of a chart.

    Attributes:
        name: as in the legend. values: one per label, None where there is none.
        tone: 0 is the grey of baselines, 1 to 6 are colours. dashed: drawn lighter, of lines only.
        spans: (low, high) of each value's confidence interval, None where there is none.
    """

    name: str
    values: Sequence[float | None]
    tone: int = 1
    dashed: bool = False
    spans: Sequence[tuple[float, float] | None] = ()

    @property
    def colour(self) -> str:
        return f"s{(self.tone - 1) % _TONES + 1 if self.tone else 0}"


@dataclass
class Chart:
    """What is drawn.

    Attributes:
        key: name of its file; title, note: what it shows and how to read it.
        form: bars (horizontal), columns or lines.
        labels: of the groups of bars or the points of lines; label: what they are.
        series: of one value per label.
        show: writes a value; reference: where a line is drawn, such as a speed-up of 1.
        top: upper end of the values' axis, or None.
    """

    key: str
    title: str
    note: str
    form: str
    labels: list[str]
    series: list[Series]
    label: str = ""
    show: Callable[[float], str] = field(default=lambda value: f"{value:.2f}")
    reference: float | None = None
    top: float | None = None

    def rows(self) -> list[tuple[str, list[str]]]:
        """The chart as a table: each label with a cell per series."""
        table = []
        for index, label in enumerate(self.labels):
            cells = []
            for one in self.series:
                value, span = one.values[index], one.spans[index] if one.spans else None
                cell = "\u2013" if value is None else self.show(value)
                cells.append(cell + (f" ({self.show(span[0])} to {self.show(span[1])})" if span else ""))
            table.append((label, cells))
        return table


def svg(chart: Chart, prefix: str) -> str:
    """The drawing as an SVG element for a page whose style defines the colours.

    Args:
        prefix: makes its ids unique in the page.
    """
    buffer = io.StringIO()
    _draw(chart, _STAND_INS, lambda figure: figure.savefig(buffer, format="svg", transparent=True))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for name, stand_in in _STAND_INS.items():
        text = text.replace(stand_in, f"var(--{name})")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r" font-family: [^;]*;", "", text)  # the page's own
    label = f"{chart.title}. {chart.note} The figures follow as a table.".replace("&", "&amp;").replace('"', "&quot;")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None, "matplotlib writes one"
    return (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {box[0]} role="img" aria-label="{label}">'
        + text[text.index(">") + 1 :]
    )


def png(chart: Chart, path: Path) -> None:
    """Raises UserError where the place cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _draw(chart, _LIGHT, lambda figure: figure.savefig(path, dpi=150, facecolor=_LIGHT["card"]), titled=True)
    except OSError as error:
        raise UserError(f"output={str(path)!r} cannot be written ({error.strerror}); choose another place") from error


def _draw(chart: Chart, colours: dict[str, str], save: Callable[[Any], None], titled: bool = False) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    groups, bars = len(chart.labels), len(chart.series)
    height = 0.5 + groups * max(0.2 * bars + 0.1, 0.3) if chart.form == "bars" else 2.7
    style: Any = {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "svg.hashsalt": chart.key,
        "font.size": 10.5,
        "text.color": colours["ink"],
        "axes.labelcolor": colours["muted"],
        "xtick.color": colours["muted"],
        "ytick.color": colours["muted"],
    }
    with plt.rc_context(style):
        names = [one.name for one in chart.series] if titled and len(chart.series) > 1 else []
        columns = 1 if max(map(len, names), default=0) > 24 else 2
        height += 0.4 * titled + 0.2 * -(-len(names) // columns)
        figure, axes = plt.subplots(figsize=(4.4, height), layout="constrained")
        try:
            {"bars": _bars, "columns": _columns, "lines": _lines}[chart.form](axes, chart, colours)
            axes.set_frame_on(False)
            axes.tick_params(length=0)
            if titled:
                axes.set_title(chart.title, loc="left", fontweight="bold", color=colours["ink"], fontsize=11)
                if names:
                    figure.legend(loc="outside lower left", frameon=False, fontsize=8, ncols=columns)
            save(figure)
        finally:
            plt.close(figure)


def _bars(axes: Any, chart: Chart, colours: dict[str, str]) -> None:
    thick = 0.78 / len(chart.series)
    longest = _longest(chart)
    for number, one in enumerate(chart.series):
        places = [group + (number - (len(chart.series) - 1) / 2) * thick for group in range(len(chart.labels))]
        values = [value or 0.0 for value in one.values]
        axes.barh(places, values, thick * 0.86, color=colours[one.colour], label=one.name)
        _whiskers(axes, chart, one, places, colours)
        for place, value, span in zip(places, one.values, one.spans or [None] * len(values), strict=True):
            if value is not None:
                end = max(value, span[1] if span else 0.0)
                if chart.reference is not None and 0 <= chart.reference - end < 0.18 * longest:
                    end = chart.reference  # beside its line, not under it
                axes.text(end + 0.012 * longest, place, chart.show(value), va="center", fontsize=9.5)
    axes.set_yticks(range(len(chart.labels)), chart.labels, color=colours["ink"])
    axes.set_ylim(len(chart.labels) - 0.5, -0.5)
    axes.set_xlim(0, longest * 1.17)
    axes.set_xticks([])
    if chart.reference is not None:
        axes.axvline(chart.reference, color=colours["ink"], linewidth=1, linestyle=(0, (3, 2)))


def _columns(axes: Any, chart: Chart, colours: dict[str, str]) -> None:
    wide = 0.8 / len(chart.series)
    longest = _longest(chart)
    for number, one in enumerate(chart.series):
        places = [group + (number - (len(chart.series) - 1) / 2) * wide for group in range(len(chart.labels))]
        values = [value or 0.0 for value in one.values]
        axes.bar(places, values, wide * 0.9, color=colours[one.colour], label=one.name, zorder=2)
        if len(chart.series) * len(chart.labels) <= 12:
            for place, value in zip(places, one.values, strict=True):
                if value is not None:
                    axes.text(place, value + 0.015 * longest, chart.show(value), ha="center", fontsize=9)
    axes.set_xticks(range(len(chart.labels)), chart.labels)
    axes.set_ylim(0, chart.top or longest * 1.12)
    _scale(axes, chart, colours)


def _lines(axes: Any, chart: Chart, colours: dict[str, str]) -> None:
    for one in chart.series:
        points = [(place, value) for place, value in enumerate(one.values) if value is not None]
        axes.plot(
            [place for place, _ in points],
            [value for _, value in points],
            color=colours[one.colour],
            label=one.name,
            linewidth=1.6 if one.dashed else 2.2,
            linestyle=(0, (4, 2)) if one.dashed else "-",
            marker=_MARKERS[one.tone % len(_MARKERS)],
            markersize=4 if one.dashed else 6,
            zorder=3,
        )
        _whiskers(axes, chart, one, list(range(len(chart.labels))), colours)
    axes.set_xticks(range(len(chart.labels)), chart.labels)
    axes.set_xlim(-0.3, len(chart.labels) - 0.7)
    axes.set_ylim(0, chart.top or _longest(chart) * 1.12)
    _scale(axes, chart, colours)
    if chart.reference is not None:
        axes.axhline(chart.reference, color=colours["ink"], linewidth=1, linestyle=(0, (3, 2)))


def _scale(axes: Any, chart: Chart, colours: dict[str, str]) -> None:
    axes.grid(axis="y", color=colours["grid"], linewidth=1)
    axes.set_axisbelow(True)
    axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: chart.show(value))
    if chart.label:
        axes.set_xlabel(chart.label)


def _whiskers(axes: Any, chart: Chart, one: Series, places: list[float], colours: dict[str, str]) -> None:
    """Confidence intervals, where known."""
    for place, span in zip(places, one.spans, strict=False):
        if span is not None:
            ends = ([*span], [place, place]) if chart.form == "bars" else ([place, place], [*span])
            axes.plot(*ends, color=colours["ink"], linewidth=1.1, solid_capstyle="butt", zorder=4)


def _longest(chart: Chart) -> float:
    values = [value for one in chart.series for value in one.values if value is not None]
    spans = [span[1] for one in chart.series for span in one.spans if span is not None]
    return max([*values, *spans, chart.reference or 0.0], default=1.0) or 1.0
