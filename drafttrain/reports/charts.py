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
_STYLE = (
    (Path(__file__).parent / "templates" / "style.css")
    .read_text(encoding="utf-8")
    .partition("@media")[0]
)
_COLORS = dict(re.findall(r"--(\w+): (#\w+);", _STYLE))
_LIGHT = {
    name: _COLORS[name]
    for name in ("ink", "muted", "grid", "card", *(f"s{tone}" for tone in range(7)))
}
# matplotlib accepts colors only, so each variable is drawn in an unused color and replaced in the
# SVG text.
_STAND_INS = {name: f"#fe01{index:02x}" for index, name in enumerate(_LIGHT)}
_MARKERS = "osD^vPX"
_TONES = 6
_WIDTH = 4.4  # inches
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
        return f"s{(self.tone - 1) % _TONES + 1 if self.tone else 0}"

    def points(self) -> list[tuple[float | None, Span | None]]:
        """Each value with its interval."""
        return list(zip(self.values, self.spans or [None] * len(self.values), strict=True))


@dataclass
class Chart:
    """A chart's content.

    Attributes:
        key: name of its file. title, note: what it shows and how to read it.
        form: bars (horizontal), columns or lines.
        labels: of the groups of bars or the points of lines. label: what the labels are.
        series: each with one value per label.
        show: formats a value. reference: position of a dashed line, such as a speed-up of 1.
        top: upper end of the value axis; None fits the values. Longer bars are cut there and say
            so.
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

        def cell(value: float | None, span: Span | None) -> str:
            text = "\u2013"
            if value is not None:
                text = self.show(value)
            return text + (f" ({self.show(span[0])} to {self.show(span[1])})" if span else "")

        columns = [[cell(*point) for point in one.points()] for one in self.series]
        return [
            (label, [column[index] for column in columns])
            for index, label in enumerate(self.labels)
        ]

    def longest(self) -> float:
        """The largest value, interval end or reference."""
        points = [point for one in self.series for point in one.points()]
        ends = [max(value or 0.0, span[1] if span else 0.0) for value, span in points]
        return max([self.reference or 0.0, *ends]) or 1.0

    def height(self, titled: bool) -> float:
        """Inches that the drawing takes."""
        drawing = 2.7
        if self.form == "bars":
            drawing = 0.5 + len(self.labels) * max(0.2 * len(self.series) + 0.1, 0.3)
        legend = 0
        if len(self.series) > 1:
            legend = len(self.series)
        return drawing + (0.4 + 0.2 * math.ceil(legend / self.legend_columns())) * titled

    def legend_columns(self) -> int:
        if max((len(one.name) for one in self.series), default=0) > 24:
            return 1
        return 2


def svg(chart: Chart, prefix: str) -> str:
    """The drawing as an SVG element for a page whose style defines the colors. prefix: makes its
    ids unique in the page.
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
    label = f"{chart.title}. {chart.note} The figures follow as a table.".replace(
        "&", "&amp;"
    ).replace('"', "&quot;")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None, "matplotlib writes one"
    head = (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {box[0]} role="img" aria-label="{label}">'
    )
    return head + text[text.index(">") + 1 :]


def picture(rows: Sequence[Sequence[Chart]], path: Path, headings: Sequence[str] = ()) -> None:
    """Writes rows of charts with titles and legends; the suffix (.png, .svg, .pdf) decides the
    format.

    Args:
        headings: one per row; default: none.

    Raises:
        UserError: the file cannot be written.
    """
    form = path.suffix[1:]
    sign = {("Software" if form == "png" else "Creator"): PICTURE_SIGN}
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
            metadata=sign,
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
    }
    style |= dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), colors["muted"])
    style["text.color"] = colors["ink"]
    heights = [max(chart.height(titled) for chart in row) + 0.5 * bool(headings) for row in rows]
    with plt.rc_context(style):
        figure = plt.figure(
            figsize=(_WIDTH * max(map(len, rows)), sum(heights)),
            layout="constrained",
        )
        try:
            lines = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
            for number, (line, row) in enumerate(zip(lines, rows, strict=True)):
                for place, chart in zip(
                    line.subfigures(1, len(row), squeeze=False)[0],
                    row,
                    strict=True,
                ):
                    _draw(chart, place, colors, titled)
                if headings:
                    line.suptitle(headings[number], x=0.01, ha="left", fontsize=11)
            figure.savefig(output, **options)
        finally:
            plt.close(figure)


def _draw(chart: Chart, figure: FigureBase, colors: dict[str, str], titled: bool) -> None:
    axes = figure.subplots()
    (_lines if chart.form == "lines" else _bars)(axes, chart, colors)
    axes.set_frame_on(False)
    axes.tick_params(length=0)
    if titled:
        axes.set_title(chart.title, loc="left", fontweight="bold", color=colors["ink"], fontsize=11)
        if len(chart.series) > 1:
            figure.legend(
                loc="outside lower left",
                frameon=False,
                fontsize=8,
                ncols=chart.legend_columns(),
            )


def _bars(axes: Axes, chart: Chart, colors: dict[str, str]) -> None:
    """Horizontal bars or columns; those of a group stand side by side around the group's integer
    position.
    """
    flat = chart.form == "bars"
    longest = chart.top or chart.longest()
    count = len(chart.series)
    draw = axes.barh if flat else axes.bar
    share = 0.78 if flat else 0.8
    filled = 0.86 if flat else 0.9
    for number, one in enumerate(chart.series):
        places = [
            group + (number - (count - 1) / 2) * share / count for group in range(len(chart.labels))
        ]
        values = [min(value or 0.0, longest) for value in one.values]
        draw(
            places,
            values,
            share / count * filled,
            color=colors[one.color],
            label=one.name,
            zorder=1 if flat else 2,
        )
        _whiskers(axes, chart, one, places, colors)
        for place, (value, span) in zip(places, one.points(), strict=True):
            if value is not None and flat:
                end = min(max(value, span[1] if span else 0.0), longest)
                if chart.reference is not None and 0 <= chart.reference - end < 0.18 * longest:
                    end = chart.reference  # next to the dashed line, not under it
                text = chart.show(value) + (", bar cut" if value > longest else "")
                axes.text(end + 0.012 * longest, place, text, va="center", fontsize=9.5)
            elif value is not None and count * len(chart.labels) <= 12:
                axes.text(
                    place,
                    value + 0.015 * longest,
                    chart.show(value),
                    ha="center",
                    fontsize=9,
                )
    if not flat:
        return _scale(axes, chart, colors)
    axes.set_yticks(range(len(chart.labels)), chart.labels, color=colors["ink"])
    axes.set_ylim(len(chart.labels) - 0.5, -0.5)
    axes.set_xlim(0, longest * (1.17 if chart.top is None else 1.7))
    axes.set_xticks([])
    if chart.reference is not None:
        axes.axvline(chart.reference, color=colors["ink"], linewidth=1, linestyle=(0, (3, 2)))


def _lines(axes: Axes, chart: Chart, colors: dict[str, str]) -> None:
    for one in chart.series:
        points = [(place, value) for place, value in enumerate(one.values) if value is not None]
        style: object
        if one.dashed:
            width = 1.6
            style = (0, (4, 2))
            size = 4
        else:
            width = 2.2
            style = "-"
            size = 6
        line: Json = {
            "linewidth": width,
            "linestyle": style,
            "markersize": size,
            "color": colors[one.color],
        }
        marker = _MARKERS[one.tone % len(_MARKERS)]
        axes.plot(
            *zip(*points, strict=True) if points else ([], []),
            label=one.name,
            marker=marker,
            zorder=3,
            **line,
        )
        _whiskers(axes, chart, one, range(len(chart.labels)), colors)
    axes.set_xlim(-0.3, len(chart.labels) - 0.7)
    _scale(axes, chart, colors)
    if chart.reference is not None:
        axes.axhline(chart.reference, color=colors["ink"], linewidth=1, linestyle=(0, (3, 2)))


def _scale(axes: Axes, chart: Chart, colors: dict[str, str]) -> None:
    """The axes of columns and lines."""
    axes.set_xticks(range(len(chart.labels)), chart.labels)
    axes.set_ylim(0, chart.top or chart.longest() * 1.12)
    axes.grid(axis="y", color=colors["grid"], linewidth=1)
    axes.set_axisbelow(True)
    axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: chart.show(value))
    if chart.label:
        axes.set_xlabel(chart.label)


def _whiskers(
    axes: Axes,
    chart: Chart,
    one: Series,
    places: Sequence[float],
    colors: dict[str, str],
) -> None:
    """Draws confidence intervals, if known."""
    for place, span in zip(places, one.spans, strict=False):
        if span is not None and (chart.top is None or span[1] <= chart.top):
            if chart.form == "bars":
                ends = ([*span], [place, place])
            else:
                ends = ([place, place], [*span])
            axes.plot(*ends, color=colors["ink"], linewidth=1.1, solid_capstyle="butt", zorder=4)
