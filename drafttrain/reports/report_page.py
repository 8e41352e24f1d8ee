"""The page of `drafttrain report`: results.json files and sweeps, for readers who decide whether to deploy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from drafttrain.credentials import redact
from drafttrain.evaluation.baselines import BASELINES
from drafttrain.evaluation.metrics import accepted_length_histogram, rounds_of
from drafttrain.files import Json
from drafttrain.reports.charts import Chart, Series, Span, svg
from drafttrain.reports.output import render_page

# The settings that name a result, if the files differ in them.
_FIELDS: dict[str, Callable[[Json], str]] = {
    "target": lambda r: str(r["target"]),
    "drafter": lambda r: str(r["drafter"]),
    "tree": lambda r: str(r["decoding"].get("tree", {}).get("spec", "")),
    "suite": lambda r: str(r["suite"]),
    "dtype": lambda r: str(r["dtype"]),
    "temperature": lambda r: f"T={r['decoding']['temperature']:g}",
    "batch_size": lambda r: f"batch {r['decoding'].get('batch_size', 1)}",
    "device": lambda r: str(r.get("device", "")),
}
_NAMES = {
    "autoregressive": "plain decoding",
    "hf_generate": "transformers generate",
    "hf_prompt_lookup": "transformers prompt lookup",
    "hf_assisted": "transformers assisted",
}
_AXES = {name: name for name in ("tree", "temperature", "dtype")} | {
    "batch_size": "batch size",
    "context": "context length",
}
_CONTEXT = 160  # characters of agreement shown before two outputs differ
_DASH = "\u2013"
_times = "{:.2f}\u00d7".format


def run_names(runs: Sequence[Json], files: Sequence[str]) -> list[str]:
    """Names each result by the settings in which it differs from the others, and by its file if that is not enough."""
    if len(runs) == 1:
        return [str(runs[0]["drafter"])]
    differing = [show for show in _FIELDS.values() if len({show(run) for run in runs}) > 1]
    names = [", ".join(filter(None, (show(run) for show in differing))) for run in runs]
    return [
        name if name and names.count(name) == 1 else ", ".join(filter(None, (name, Path(file).stem)))
        for name, file in zip(names, files, strict=True)
    ]


class _ReportedRun(NamedTuple):
    """Results with their name and color."""

    name: str
    tone: int
    results: Json

    @property
    def overall(self) -> Json:
        return self.results["overall"]

    def parts(self, groups: Sequence[str]) -> list[Json]:
        """The figures of each group; empty for a category that the results lack."""
        return [{**self.results["categories"], "all": self.overall}.get(group, {}) for group in groups]


def main_charts(run: Json) -> list[Chart]:
    """The charts of a picture: speed-up by category, acceptance by depth, tokens per second; without empty ones."""
    runs = [_ReportedRun(str(run["drafter"]), 1, run)]
    return _with_values([_speedup(runs), _acceptance(runs), _rates(runs)])


def make_charts(runs: Sequence[Json], names: Sequence[str], sweeps: Sequence[Json]) -> list[Chart]:
    """Every chart that the files have figures for."""
    named = [_ReportedRun(name, tone, run) for tone, (name, run) in enumerate(zip(names, runs, strict=True), 1)]
    charts = [make(named) for make in (_speedup, _accepted_length, _acceptance, _histogram) if named]
    charts += [*_latencies(named), _rates(named)] if named else []
    charts += [chart for number, sweep in enumerate(sweeps, 1) for chart in _sweep_charts(sweep, number)]
    return _with_values(charts)


def _with_values(charts: Sequence[Chart]) -> list[Chart]:
    return [chart for chart in charts if any(value is not None for one in chart.series for value in one.values)]


def page(runs: Sequence[Json], names: Sequence[str], charts: Sequence[Chart], notes: Sequence[list[str]]) -> str:
    """Renders the page.

    Args:
        runs, names: results and their names. charts: of `make_charts`. notes: per run, lines below its verdict.
    """
    named = list(zip(names, runs, strict=True))
    return render_page(
        "report.html",
        title=names[0] if len(runs) == 1 else f"{len(runs)} drafters compared" if runs else "Sweep",
        runs=list(zip(names, runs, notes, strict=True)),
        verdicts=[verdict(run["overall"]) for run in runs],
        tiles=_tiles(runs[0]) if len(runs) == 1 else [],
        comparison=_comparison(runs),
        charts=[(chart, svg(chart, f"c{number}")) for number, chart in enumerate(charts)],
        categories=[(name, [*run["categories"].items(), ("all", run["overall"])]) for name, run in named],
        diffs=[(name, *_diffs(run)) for name, run in named],
        settings=_settings(runs),
        baseline=_NAMES.get,
    )


def verdict(overall: Json) -> tuple[str, str]:
    """One sentence on whether the drafter pays, and `good`, `bad` or nothing for its color."""
    factor = overall["speedup_vs_fastest"]
    length = f"{overall['accepted_length']:.2f} tokens per target pass"
    if factor is None:
        return f"{length}, {overall['tokens_per_second']:.1f} tokens per second; no baseline was run.", ""
    span = _span(overall, "speedup_vs_fastest")
    sure = f" (95 % interval {span[0]:.2f} to {span[1]:.2f})" if span else ""
    if factor < 1:
        return f"{factor:.2f} times the faster baseline{sure}: slower than not speculating, at {length}.", "bad"
    return f"{factor:.2f} times as fast as the faster baseline{sure}, at {length}.", "good" if factor > 1.02 else ""


# -- figures and their intervals --------------------------------------------------------------------------------------


def _figure(figures: Json, key: str, side: str = "") -> float | None:
    """A figure by its key; `speedup` takes the baseline, `side`."""
    return figures.get("speedup", {}).get(side) if key == "speedup" else figures.get(key)


def _span(figures: Json, key: str, side: str = "") -> Span | None:
    """The confidence interval of a figure, if the file has one. See `_figure`."""
    known = figures.get("confidence", {})
    if key == "speedup_vs_fastest":  # the interval of the baseline that gave this figure
        speedup = {name: figures["speedup"][name] for name in BASELINES if name in figures.get("speedup", {})}
        key, side = "speedup", min(speedup, key=lambda name: speedup[name], default="")
    ends = _figure(known, key, side)
    return (ends[0], ends[1]) if isinstance(ends, list) else None


def _series(name: str, parts: Sequence[Json], tone: int, key: str, side: str = "") -> Series:
    """One figure of several parts (categories, batch sizes, ...) with its intervals."""
    spans = [_span(part, key, side) for part in parts]
    return Series(name, [_figure(part, key, side) for part in parts], tone, spans=spans)


# -- charts -----------------------------------------------------------------------------------------------------------


def _groups(runs: Sequence[_ReportedRun]) -> list[str]:
    """All categories in order of first appearance, and `all`."""
    return [*dict.fromkeys(name for run in runs for name in run.results["categories"]), "all"]


def _speedup(runs: Sequence[_ReportedRun]) -> Chart:
    groups, over = _groups(runs), "the faster"
    series = [_series(run.name, run.parts(groups), run.tone, "speedup_vs_fastest") for run in runs]
    if len(runs) == 1:
        parts, over = runs[0].parts(groups), "each"
        sides = enumerate(runs[0].overall["speedup"], 1)
        series = [_series(f"over {_NAMES.get(side, side)}", parts, tone, "speedup", side) for tone, side in sides]
    note = f"Tokens per second over {over} baseline's. Left of the dashed line speculation does not pay."
    return Chart("speedup", "Speed-up by category", note, "bars", groups, series, show=_times, reference=1.0)


def _accepted_length(runs: Sequence[_ReportedRun]) -> Chart:
    groups = _groups(runs)
    series = [_series(run.name, run.parts(groups), run.tone, "accepted_length") for run in runs]
    note = "Tokens committed per target pass, the target's own token included; 1 is plain decoding."
    return Chart("accepted_length", "Accepted length by category", note, "bars", groups, series, reference=1.0)


def _acceptance(runs: Sequence[_ReportedRun]) -> Chart:
    deepest = max((len(run.overall["acceptance_by_depth"]["joint"]) for run in runs), default=0)
    series = []
    for run in runs:
        for kind in ("conditional", "joint"):
            shares = run.overall["acceptance_by_depth"][kind]
            name = f"{run.name}: {kind}" if len(runs) > 1 else kind
            series.append(Series(name, [*shares, *[None] * (deepest - len(shares))], run.tone, dashed=kind == "joint"))
    note = "Conditional: given that the token before was accepted. Joint: share of all rounds that accepted so many tokens."
    labels = [str(depth) for depth in range(1, deepest + 1)]
    return Chart("acceptance", "Acceptance by depth", note, "lines", labels, series, "depth", top=1.0)


def _histogram(runs: Sequence[_ReportedRun]) -> Chart:
    # Older versions of drafttrain did not write the histogram.
    key, every = "accepted_length_histogram", []
    for run in runs:
        every.append(run.overall.get(key) or accepted_length_histogram(rounds_of(run.results.get("prompts", []))))
    longest = max(map(len, every), default=0)
    first = 0 if any(counts and counts[0] for counts in every) else 1
    series = []
    for run, counts in zip(runs, every, strict=True):
        total = sum(counts)
        shares = [count / total for count in counts] + [0.0] * (longest - len(counts)) if total else [None] * longest
        series.append(Series(run.name, shares[first:], run.tone))
    title, labels = "Accepted length of rounds", [str(length) for length in range(first, longest)]
    note = "Share of rounds that committed so many tokens; 1 means that no drafted token was accepted."
    return Chart("histogram", title, note, "columns", labels, series, "tokens committed", show="{:.0%}".format)


def _latencies(runs: Sequence[_ReportedRun]) -> Iterable[Chart]:
    points = ["p50", "p95", "p99"]
    sides = [(run.name, run.tone, run.overall) for run in runs]
    if len(runs) == 1:
        sides.insert(0, ("plain decoding", 0, runs[0].overall["baselines"].get("autoregressive", {})))
    titles = {
        "ttft_ms": ("Time to first token", "Milliseconds from the start of a prompt to its first token."),
        "tpot_ms": ("Time per output token", "Mean milliseconds of each later token of a prompt."),
    }
    for key, (title, note) in titles.items():
        known = [(name, tone, figures[key]) for name, tone, figures in sides if key in figures]
        series = [Series(name, [values[point] for point in points], tone) for name, tone, values in known]
        yield Chart(key, title, f"{note} Percentiles over prompts.", "columns", points, series, show="{:,.0f}".format)


def _rates(runs: Sequence[_ReportedRun]) -> Chart:
    sides = list(dict.fromkeys(side for run in runs for side in run.overall["baselines"]))
    series = []
    for run in runs:
        theirs = [run.overall["baselines"].get(side, {}) for side in sides]
        series.append(_series(run.name, [run.overall, *theirs], run.tone, "tokens_per_second"))
    labels = ["with the drafter", *(_NAMES.get(side, side) for side in sides)]
    note = "New tokens over wall-clock time, prefill included, every side alike."
    return Chart("rates", "Tokens per second", note, "bars", labels, series, show="{:,.1f}".format)


def _cells(sweep: Json) -> list[tuple[Json, Json]]:
    """(settings, figures) of each cell that was compared with a baseline.

    Settings are under `cell` or beside the figures; figures are under `overall` or beside the settings.
    """
    found = []
    for cell in sweep["cells"]:
        figures = cell.get("overall", cell)
        if figures.get("speedup_vs_fastest") is not None:
            settings = dict(cell.get("cell") or {key: cell[key] for key in _AXES if key in cell})
            settings["tree"] = cell.get("spec") or settings.get("tree")
            found.append((settings, figures))
    return found


def _sweep_charts(sweep: Json, number: int) -> Iterable[Chart]:
    """Speed-up by batch size with a line per other setting; and by each other axis, the rest as in the first cell."""
    cells = _cells(sweep)
    suffix = "" if number == 1 else f"_{number}"
    differing = [key for key in _AXES if len({str(settings.get(key)) for settings, _ in cells}) > 1]
    others = [key for key in differing if key != "batch_size"]
    lines: dict[str, dict[int, Json]] = {}
    for settings, figures in cells:
        name = ", ".join(str(settings[key]) if key == "tree" else f"{_AXES[key]} {settings.get(key)}" for key in others)
        lines.setdefault(name or "speed-up", {})[settings.get("batch_size", 1)] = figures
    lines = {name: by_size for name, by_size in lines.items() if len(by_size) > 1}
    if lines:
        yield _crossover(lines, f"crossover{suffix}")
    for key in others:
        rest = [other for other in _AXES if other != key]
        own = {str(s.get(key)): f for s, f in cells if all(s.get(other) == cells[0][0].get(other) for other in rest)}
        series = [_series("speed-up", list(own.values()), 1, "speedup_vs_fastest")]
        title, note = f"Speed-up by {_AXES[key]}", "Over the faster baseline, all else as in the sweep's first cell."
        yield Chart(f"sweep_{key}{suffix}", title, note, "bars", list(own), series, show=_times, reference=1.0)


def _crossover(lines: dict[str, dict[int, Json]], key: str) -> Chart:
    """Args: lines: by the name of a setting, figures by batch size."""
    sizes = sorted({size for by_size in lines.values() for size in by_size})
    series = [
        _series(name, [by_size.get(size, {}) for size in sizes], tone, "speedup_vs_fastest")
        for tone, (name, by_size) in enumerate(lines.items(), 1)
    ]
    ends = "; ".join(f"{one.name}: {crossover(sizes, one.values)}" for one in series)
    note = f"Below the dashed line speculation does not pay. {ends[:1].upper()}{ends[1:]}."
    labels, label = [str(size) for size in sizes], "prompts at a time"
    return Chart(key, "Speed-up by batch size", note, "lines", labels, series, label, show=_times, reference=1.0)


def crossover(sizes: Sequence[int], factors: Sequence[float | None]) -> str:
    """The batch size at which a line of speed-ups falls below 1, in words."""
    known = [(size, factor) for size, factor in zip(sizes, factors, strict=True) if factor is not None]
    if not known:
        return "not measured"
    losing = next((i for i, (_, factor) in enumerate(known) if factor < 1), None)
    if losing is None:
        return f"pays up to {known[-1][0]} at least"
    if losing == 0:
        return f"does not pay, from {known[0][0]} on"
    return f"stops paying between {known[losing - 1][0]} and {known[losing][0]}"


# -- tables -----------------------------------------------------------------------------------------------------------


def _tiles(run: Json) -> list[tuple[str, str, str]]:
    """(name, figure, explanation) of the figures that matter most."""
    overall = run["overall"]

    def between(key: str) -> str:
        span = _span(overall, key)
        return f"; 95 % interval {span[0]:.2f} to {span[1]:.2f}" if span else ""

    note = "tokens per target pass" + between("accepted_length")
    tiles = [("Accepted length", f"{overall['accepted_length']:.2f}", note)]
    factor = overall["speedup_vs_fastest"]
    if factor is not None:
        tiles.insert(0, ("Speed-up", _times(factor), "over the faster baseline" + between("speedup_vs_fastest")))
    return [
        *tiles,
        ("Acceptance rate", f"{overall['acceptance_rate']:.0%}", "of the depth offered"),
        ("Tokens per second", f"{overall['tokens_per_second']:.1f}", "prefill included"),
        ("First token", f"{overall['ttft_ms']['p50']:,.0f} ms", "median"),
        ("Drafter's share", f"{overall['draft_fraction']:.0%}", "of the time"),
        ("MBSU", f"{overall['mbsu']:.2f}", "memory-bound speed-up"),
    ]


def _comparison(runs: Sequence[Json]) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Rows of a table with a column per run: (figure, [(value, is it the best)])."""
    # name, figure, format, sign of better (0: neither)
    rows: list[tuple[str, Callable[[Json], float | None], str, int]] = [
        ("Speed-up over the faster baseline", lambda o: o["speedup_vs_fastest"], "{:.2f}\u00d7", 1),
        ("Accepted length", lambda o: o["accepted_length"], "{:.2f}", 1),
        ("Acceptance rate", lambda o: o["acceptance_rate"], "{:.1%}", 1),
        ("Tokens per second", lambda o: o["tokens_per_second"], "{:,.1f}", 1),
        ("First token, p50, ms", lambda o: o["ttft_ms"]["p50"], "{:,.0f}", -1),
        ("Per token, p50, ms", lambda o: o["tpot_ms"]["p50"], "{:,.1f}", -1),
        ("Per token, p99, ms", lambda o: o["tpot_ms"]["p99"], "{:,.1f}", -1),
        ("Drafter's share of the time", lambda o: o["draft_fraction"], "{:.1%}", 0),
        ("MBSU", lambda o: o["mbsu"], "{:.2f}", 1),
        ("Outputs identical to plain decoding", lambda o: o["identical_outputs"], "{:.1%}", 0),
        ("Prompts", lambda o: o["prompts"], "{:,}", 0),
    ]
    table = []
    for name, figure, form, better in rows if len(runs) > 1 else []:
        values = [figure(run["overall"]) for run in runs]
        known = [value * better for value in values if value is not None]
        best = max(known) if better and len(set(known)) > 1 else None
        cells = [(_DASH if v is None else form.format(v), v is not None and v * better == best) for v in values]
        table.append((name, cells))
    return table


def _settings(runs: Sequence[Json]) -> list[tuple[str, list[str], bool]]:
    """(setting, value per run, whether they differ)."""
    shown = ("target", "drafter", "kind", "suite", "suite_digest", "device", "threads", "dtype", "compute_dtype")
    tables: list[dict[str, str]] = []
    for run in runs:
        decoding = {**run["decoding"], "tree": run["decoding"].get("tree", {}).get("spec", "")}
        decoding = {"tree": decoding.pop("tree"), **decoding}
        table = {**{key: run[key] for key in shown if key in run}, **decoding, "drafttrain": run.get("drafttrain", "")}
        table |= {**run.get("versions", {}), "command": " ".join(redact(run.get("command", [])))}
        tables.append({key: str(value) for key, value in table.items()})
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [(key, [table.get(key, _DASH) for table in tables]) for key in keys]
    return [(key.replace("_", " "), values, len(set(values)) > 1) for key, values in rows]


def _diffs(run: Json) -> tuple[list[Json], int]:
    """Outputs that differ from a baseline's, with the differing words marked; and the number without stored text."""
    shown, bare = [], 0
    for record in run.get("prompts", []):
        for name in (name for name, same in record.get("identical", {}).items() if not same):
            outputs = record.get("outputs", {})
            if name not in outputs or "drafter" not in outputs:
                bare += 1
                continue
            before, after = mark(outputs[name], outputs["drafter"])
            where = f"{record['category']}, question {record['question_id']}, turn {record['turn'] + 1}"
            shown.append({"where": where, "side": _NAMES.get(name, name), "before": before, "after": after})
    return shown, bare


def mark(before: str, after: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Two texts as (kind, text) runs of words: `same`, or `del` in the first and `ins` in the second.

    Shortens a long common beginning: the first difference matters.
    """
    words: list[list[str]] = [re.findall(r"\s+|\w+|[^\w\s]", text) for text in (before, after)]
    matcher = difflib.SequenceMatcher(None, words[0], words[1], autojunk=False)
    left, right = list[tuple[str, str]](), list[tuple[str, str]]()
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            text = "".join(words[0][i:j])
            if not left and not right and len(text) > _CONTEXT:
                text = "\u2026" + text[-_CONTEXT:]
            left.append(("same", text))
            right.append(("same", text))
        else:
            left += [("del", "".join(words[0][i:j]))] if j > i else []
            right += [("ins", "".join(words[1][k:m]))] if m > k else []
    return left, right
