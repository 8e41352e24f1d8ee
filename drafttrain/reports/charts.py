"""Charts: described once as data, drawn as SVG in a page's colors or as a picture file.

Every chart is also a table, for readers who cannot see it or want the figures.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafttrain.extras import require
from drafttrain.files import Json, replacing, writing
from drafttrain.folders import PICTURE_SIGN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

# The colors of a page are CSS variables with values for light and dark; a picture has the light
# ones.
_STYLE = (Path(__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
_COLORS = dict(re.findall(r"--(\w+): (#\w+);", _STYLE.partition("@media")[0]))
_NAMES = ("ink", "muted", "grid", "card", "s0", "s1", "s2", "s3", "s4", "s5", "s6")
_LIGHT = {name: _COLORS[name] for name in _NAMES}
# matplotlib accepts colors only, so each variable is drawn in an unused color and replaced in the
# SVG text.
_STAND_INS = {name: f"#fe01{index:02x}" for index, name in enumerate(_LIGHT)}
_MARKERS = "osD^vPX"
_TONES = 6
_WIDTH = 4.4  # inches
_DASHED: Json = {"linewidth": 1, "linestyle": (0, (3, 2))}
_LABEL_ROOM = 60  # characters of labels beside each other
Span = tuple[float, float]


@dataclass
class Series:
    """One color of a chart.

    Attributes:
        name: in the legend. values: one per label, None if missing.
        tone: 0 is the grey of baselines, 1 to 6 are colors. dashed: a lighter line (lines only).
        spans: (low, high) of each value's confidence interval, None if unknown.
    """

    name: str
    values: Sequence[float | None]
    tone: int = 1
    dashed: bool = False
    spans: Sequence[Span | None] = ()

    @property
    def color(self) -> str:
        """Name of the CSS variable."""
        if self.tone == 0:
            return "s0"
        return f"s{(self.tone - 1) % _TONES + 1}"

    def points(self) -> list[tuple[float | None, Span | None]]:
        """Each value with its interval."""
        spans = self.spans
        if not spans:
            spans = [None] * len(self.values)
        return list(zip(self.values, spans, strict=True))


@dataclass
class Chart:
    """A chart's content.

    Attributes:
        key: name of its file. title, note: what it shows and how to read it.
        form: bars (horizontal), columns or lines.
        labels: of the groups of bars or the points of lines. label: what the labels are. unit:
            what the values are.
        series: each with one value per label.
        show: formats a value. reference: position of a dashed line, such as a speed-up of 1.
        top: upper end of the value axis; None fits the values. Longer bars are cut there and say
            so.
        marks: (index of a label, text) of dashed lines across (lines only).
    """

    key: str
    title: str
    note: str
    form: str
    labels: list[str]
    series: list[Series]
    label: str
    unit: str
    show: Callable[[float], str] = field(default=lambda value: f"{value:.2f}")
    reference: float | None = None
    top: float | None = None
    marks: Sequence[tuple[int, str]] = ()

    def rows(self) -> list[tuple[str, list[str]]]:
        """The chart as a table: each label with a cell per series."""
        rows: list[tuple[str, list[str]]] = [(label, []) for label in self.labels]
        for one in self.series:
            for (_, cells), (value, span) in zip(rows, one.points(), strict=True):
                text = "\u2013"
                if value is not None:
                    text = self.show(value)
                if span:
                    text += f" ({self.show(span[0])} to {self.show(span[1])})"
                cells.append(text)
        return rows

    def longest(self) -> float:
        """The largest value, interval end or reference; 1 if all are 0."""
        largest = 0.0
        if self.reference is not None:
            largest = self.reference
        for one in self.series:
            for value, span in one.points():
                if value is not None:
                    largest = max(largest, value)
                if span:
                    largest = max(largest, span[1])
        if largest == 0:
            return 1.0
        return largest

    def height(self, titled: bool) -> float:
        """Inches that the drawing takes."""
        inches = 2.7
        if self.form == "bars":
            inches = 0.5 + len(self.labels) * max(0.2 * len(self.series) + 0.1, 0.3)
        if titled:
            inches += 0.4
            if len(self.series) > 1:  # rows of the legend
                inches += 0.2 * math.ceil(len(self.series) / self.legend_columns())
        return inches

    def legend_columns(self) -> int:
        if max((len(one.name) for one in self.series), default=0) > 24:
            return 1
        return 2


def svg(chart: Chart, prefix: str) -> str:
    """The drawing as an SVG element for a page whose style defines the colors.

    Args:
        prefix: makes its ids unique in the page.
    """
    buffer = io.StringIO()
    _save([[chart]], buffer, _STAND_INS, False, format="svg", transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for name, stand_in in _STAND_INS.items():
        text = text.replace(stand_in, f"var(--{name})")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r" font-family: [^;]*;", "", text)  # the page sets the font

    # matplotlib's own opening tag has a fixed size and no text for screen readers.
    label = f"{chart.title}. {chart.note} The figures follow as a table."
    label = label.replace("&", "&amp;").replace('"', "&quot;")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None, "matplotlib writes one"
    link = 'xmlns:xlink="http://www.w3.org/1999/xlink"'
    head = f'<svg {link} {box[0]} role="img" aria-label="{label}">'
    return head + text[text.index(">") + 1 :]


def picture(rows: Sequence[Sequence[Chart]], path: Path, headings: Sequence[str] = ()) -> None:
    """Writes rows of charts with titles and legends.

    Args:
        path: its suffix (.png, .svg, .pdf) decides the format.
        headings: one per row; default: none.

    Raises:
        UserError: the file cannot be written.
    """
    form = path.suffix[1:]
    signed = "Software" if form == "png" else "Creator"
    with writing(path), replacing(path) as part:
        _save(
            rows,
            part,
            _LIGHT,
            True,
            headings,
            dpi=150,
            facecolor=_LIGHT["card"],
            format=form,
            metadata={signed: PICTURE_SIGN},
        )


def _save(
    rows: Sequence[Sequence[Chart]],
    output: Path | io.StringIO,
    colors: dict[str, str],
    titled: bool,
    headings: Sequence[str] = (),
    **options: Any,
) -> None:
    require("matplotlib", "a chart").use("Agg")
    from matplotlib import pyplot as plt

    style: Any = {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "svg.hashsalt": rows[0][0].key,
        "font.size": 10.5,
        "text.color": colors["ink"],
        "axes.labelcolor": colors["muted"],
        "xtick.color": colors["muted"],
        "ytick.color": colors["muted"],
    }
    heights = []
    for row in rows:
        height = max(chart.height(titled) for chart in row)
        if headings:
            height += 0.5
        heights.append(height)
    width = _WIDTH * max(len(row) for row in rows)
    with plt.rc_context(style):
        figure = plt.figure(figsize=(width, sum(heights)), layout="constrained")
        try:
            lines = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
            for number, (line, row) in enumerate(zip(lines, rows, strict=True)):
                places = line.subfigures(1, len(row), squeeze=False)[0]
                for place, chart in zip(places, row, strict=True):
                    _draw(chart, place, colors, titled)
                if headings:
                    line.suptitle(
                        headings[number],
                        x=0.01,
                        ha="left",
                        fontsize=11,
                    )
            figure.savefig(output, **options)
        finally:
            plt.close(figure)


def _draw(
    chart: Chart,
    figure: FigureBase,
    colors: dict[str, str],
    titled: bool,
) -> None:
    axes = figure.subplots()
    if chart.form == "lines":
        _lines(axes, chart, colors)
    else:
        _bars(axes, chart, colors)
    axes.set_frame_on(False)
    axes.tick_params(length=0)
    if titled:
        axes.set_title(
            chart.title,
            loc="left",
            fontweight="bold",
            color=colors["ink"],
            fontsize=11,
        )
        if len(chart.series) > 1:
            figure.legend(
                loc="outside lower left",
                frameon=False,
                fontsize=8,
                ncols=chart.legend_columns(),
            )


def _bars(axes: Axes, chart: Chart, colors: dict[str, str]) -> None:
    """A group of bars per label with intervals and values: horizontal, or standing for columns."""
    upright = chart.form == "columns"
    longest = chart.top or chart.longest()
    room = 0.8 / len(chart.series)  # of a bar
    # Values fit above a few columns only.
    named = not upright or len(chart.series) * len(chart.labels) <= 12
    for number, one in enumerate(chart.series):
        # The bars of a group stand around its integer position.
        offset = (number - (len(chart.series) - 1) / 2) * room
        lengths = []
        errors = []  # of each bar, below and above its end
        texts = []
        for value, span in one.points():
            length = min(value or 0.0, longest)
            lengths.append(length)
            errors.append((0.0, 0.0))
            if span and (chart.top is None or span[1] <= chart.top):
                errors[-1] = (max(length - span[0], 0.0), max(span[1] - length, 0.0))
            text = ""
            if value is not None and named:
                text = chart.show(value)
            if text and length < (value or 0.0):
                text += ", bar cut"
            texts.append(text)
        spans: dict[str, Any] = {"yerr" if upright else "xerr": list(zip(*errors, strict=True))}
        draw = axes.bar if upright else axes.barh
        bars = draw(
            [group + offset for group in range(len(chart.labels))],
            lengths,
            0.88 * room,
            color=colors[one.color],
            label=one.name,
            error_kw={"ecolor": colors["ink"], "elinewidth": 1.1, "zorder": 4},
            **spans,
        )
        # On the dashed line a value stays legible.
        paper = {"facecolor": colors["card"], "edgecolor": "none", "pad": 0.5}
        axes.bar_label(bars, texts, padding=3, fontsize=9, zorder=5, bbox=paper)
    if upright:
        _scale(axes, chart, colors)
        return
    axes.set_yticks(range(len(chart.labels)), chart.labels, color=colors["ink"])
    axes.set_ylim(len(chart.labels) - 0.5, -0.5)
    around = 1.17 if chart.top is None else 1.7  # for values, and for "bar cut"
    axes.set_xlim(0, longest * around)
    axes.set_xticks([])
    axes.set_xlabel(chart.unit, loc="left")
    axes.set_ylabel(chart.label)
    if chart.reference is not None:
        axes.axvline(chart.reference, color=colors["ink"], **_DASHED)


def _lines(axes: Axes, chart: Chart, colors: dict[str, str]) -> None:
    for one in chart.series:
        places = []
        values = []
        for place, value in enumerate(one.values):
            if value is not None:
                places.append(place)
                values.append(value)
        width = 2.2
        style: object = "-"
        size = 6
        if one.dashed:
            width = 1.6
            style = (0, (4, 2))
            size = 4
        marker = _MARKERS[one.tone % len(_MARKERS)]
        axes.plot(
            places,
            values,
            label=one.name,
            marker=marker,
            zorder=3,
            linewidth=width,
            linestyle=style,
            markersize=size,
            color=colors[one.color],
        )
        for place, (_, span) in enumerate(one.points()):
            if span:
                axes.vlines(place, *span, color=colors["ink"], linewidth=1.1, zorder=4)
    axes.set_xlim(-0.3, len(chart.labels) - 0.7)
    _scale(axes, chart, colors)
    for place, text in chart.marks:
        axes.axvline(place, color=colors["muted"], **_DASHED)
        # Along the line, where few curves are.
        axes.text(place, 0, text, rotation=90, va="bottom", ha="right", fontsize=7)
    if chart.reference is not None:
        axes.axhline(chart.reference, color=colors["ink"], **_DASHED)


def _scale(axes: Axes, chart: Chart, colors: dict[str, str]) -> None:
    """The axes of columns and lines."""
    # As many labels as there is room for; all of them are in the table.
    wide = sum(len(label) + 2 for label in chart.labels)
    every = math.ceil(wide / _LABEL_ROOM)
    axes.set_xticks(range(0, len(chart.labels), every), chart.labels[::every])
    axes.set_ylim(0, chart.top or chart.longest() * 1.12)
    axes.grid(
        axis="y",
        color=colors["grid"],
        linewidth=1,
    )
    axes.set_axisbelow(True)
    axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: chart.show(value))
    axes.set_xlabel(chart.label)
    axes.set_ylabel(chart.unit)
