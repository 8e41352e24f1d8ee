"""The page of `drafttrain report`: results and sweeps, for readers who decide whether to deploy."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from drafttrain.evaluation.baselines import BASELINE_NAMES, NGRAM
from drafttrain.evaluation.diagnose import diagnose
from drafttrain.evaluation.metrics import accepted_length_histogram, rounds_of
from drafttrain.evaluation.resampling import Ratio
from drafttrain.evaluation.verdicts import (
    LOSES,
    PAYS,
    against,
    judge,
    outliers,
    verdict_of,
    verdict_on,
)
from drafttrain.files import Json
from drafttrain.reports.charts import Chart, Series, svg
from drafttrain.reports.figures import (
    COLORS,
    DASH,
    TIMES,
    conditions,
    figure_of,
    interval_text,
    lengths_text,
    sentence,
    series_of,
    settings_table,
    span_of,
    times,
)
from drafttrain.reports.journal_page import clock, journal_chart
from drafttrain.reports.output import render_page
from drafttrain.reports.sweep_page import sweep_charts, sweep_section

# The settings that name a result, if the files differ in them, and how.
_FIELDS = {
    "target": "{}",
    "drafter": "{}",
    "tree": "{}",
    "suite": "{}",
    "dtype": "{}",
    "temperature": "T={:g}",
    "batch_size": "batch {}",
    "device": "{}",
}
# What two runs must share for a ratio between them: keys of the results or of their decoding
# settings.
_SHARED = (
    "target",
    "suite_digest",
    "questions",
    "device",
    "machine",
    "threads",
    "dtype",
    "compute_dtype",
    "max_new_tokens",
    "batch_size",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
)
_WORD = r"\s+|\w+|[^\w\s]"
_CONTEXT = 160  # characters of agreement shown before two outputs differ
_FAR = 3.0  # times the next bar, from where on a bar is cut


def run_names(runs: Sequence[Json], files: Sequence[str]) -> list[str]:
    """Names each result by the settings in which it differs from the others.

    A file's name is added where that is not enough.
    """
    if len(runs) == 1:
        return [str(runs[0]["drafter"])]
    parts: list[list[str]] = [[] for _ in runs]
    for key, form in _FIELDS.items():
        shown = []
        for run in runs:
            tree = run["decoding"].get("tree", {}).get("spec")
            settings = {"batch_size": 1, **run["decoding"], **run, "tree": tree}
            value = settings.get(key)
            shown.append("" if value is None else form.format(value))
        if len(set(shown)) > 1:
            for own, word in zip(parts, shown, strict=True):
                if word:
                    own.append(word)
    names = [", ".join(own) for own in parts]
    unique = []  # with the file's name where two would be the same
    for name, own, file in zip(names, parts, files, strict=True):
        if not name or names.count(name) > 1:
            name = ", ".join([*own, Path(file).stem])
        unique.append(name)
    return unique


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
        every = {**self.results["categories"], "all": self.overall}
        return [every.get(group, {}) for group in groups]


def main_charts(run: Json) -> list[Chart]:
    """The charts of a picture: speed-up by category, acceptance by depth, tokens per second.

    Empty ones are left out.
    """
    runs = [_ReportedRun(str(run["drafter"]), 1, run)]
    return _with_values([_speedup(runs), _acceptance(runs), _rates(runs)])


def make_charts(
    runs: Sequence[Json],
    names: Sequence[str],
    sweeps: Sequence[Json],
    journals: Sequence[list[Json]] = (),
) -> list[Chart]:
    """Every chart that the files have figures for."""
    named = []
    for tone, (name, run) in enumerate(zip(names, runs, strict=True), 1):
        named.append(_ReportedRun(name, tone, run))
    charts: list[Chart] = []
    if named:
        charts.append(_speedup(named))
        charts.append(_other_speedups(named))
        charts.append(_accepted_length(named))
        charts.append(_acceptance(named))
        charts.append(_histogram(named))
        charts += _latencies(named)
        charts.append(_rates(named))
    for number, sweep in enumerate(sweeps, 1):
        charts += sweep_charts(sweep, number)
    for number, journal in enumerate(journals, 1):
        charts.append(journal_chart(journal, number))
    return _with_values(charts)


def _with_values(charts: Sequence[Chart]) -> list[Chart]:
    found = []
    for chart in charts:
        if any(value is not None for one in chart.series for value in one.values):
            found.append(chart)
    return found


def page(
    runs: Sequence[Json],
    names: Sequence[str],
    charts: Sequence[Chart],
    notes: Sequence[list[str]],
    sweeps: Sequence[Json] = (),
    journals: Sequence[list[Json]] = (),
) -> str:
    """Renders the page.

    Args:
        runs, names: results and their names. charts: of `make_charts`. notes: per run, whether
            outputs are identical, then warnings. sweeps: summaries. journals: of adapt --watch.
    """
    return render_page(
        "report.html",
        runs=list(zip(names, runs, notes, strict=True)),
        drafters={run["drafter"] for run in runs},
        sweeps=[sweep_section(sweep) for sweep in sweeps],
        journals=journals,
        charts=[(chart, svg(chart, f"c{number}")) for number, chart in enumerate(charts)],
        tiles=_TILES,
        comparison=_comparison(runs, names),
        differing=differing(runs),
        outliers=[outliers(run) for run in runs],
        settings=settings_table(runs),
        # what the template asks of figures
        baseline=BASELINE_NAMES.get,
        clock=clock,
        colors=COLORS,
        conditions=conditions,
        diagnosis=_diagnosis,
        diffs=_diffs,
        figure_of=figure_of,
        interval_text=interval_text,
        lengths=lengths_text,
        NGRAM=NGRAM,
        sentence=sentence,
        span_of=span_of,
        times=times,
        verdict_of=verdict_of,
        verdict_on=verdict_on,
    )


def _diagnosis(run: Json) -> list[Json]:
    """What a run's figures call for."""
    if "date" not in run:  # earlier versions wrote advice by other rules
        return diagnose(run)
    found: list[Json] = run.get("diagnosis", [])
    return found


def differing(runs: Sequence[Json]) -> list[str]:
    """The settings that keep runs from being compared, with their values.

    A setting that a file lacks counts as the same.
    """
    found = []
    for key in _SHARED:
        values = set()  # of the runs that have one
        shown: dict[str, None] = {}
        for run in runs:
            settings = {**run["decoding"], "questions": run["overall"]["prompts"], **run}
            value = settings.get(key)
            if value is not None:
                values.add(str(value))
            if key == "suite_digest":  # a hash, which nobody reads
                value = run["suite"]
            shown[str(value)] = None
        if len(values) > 1:
            found.append(f"{key.replace('_', ' ')} ({', '.join(shown)})")
    return found


# -- charts ----------------------------------------------------------------------------------------


def _groups(runs: Sequence[_ReportedRun]) -> list[str]:
    """All categories in order of first appearance, and `all`."""
    names = itertools.chain(*(run.results["categories"] for run in runs))
    return [*dict.fromkeys(names), "all"]


def _main_side(runs: Sequence[_ReportedRun]) -> str:
    """The baseline of the speed-up chart: plain decoding where every run measured it.

    Empty for the faster one of each run.
    """
    if all("autoregressive" in run.overall["speedup"] for run in runs):
        return "autoregressive"
    return ""


def _by_category(
    runs: Sequence[_ReportedRun],
    key: str,
    title: str,
    note: str,
    figure: str,
    unit: str,
    side: str = "",
    show: Callable[[float], str] = "{:.2f}".format,
) -> Chart:
    """A chart of one figure with its intervals, a group of bars per category."""
    groups = _groups(runs)
    series = []
    for run in runs:
        places = [(part, side) for part in run.parts(groups)]
        series.append(series_of(run.name, places, run.tone, figure))
    return Chart(
        key, title, note, "bars", groups, series, "category", unit, show=show, reference=1.0
    )


def _speedup(runs: Sequence[_ReportedRun]) -> Chart:
    side = _main_side(runs)
    over = BASELINE_NAMES.get(side, "the faster plain baseline")
    note = (
        f"Tokens per second over {over}'s, with 95\u00a0% intervals. "
        "Left of the dashed line speculation does not pay."
    )
    figure = "speedup" if side else "speedup_vs_fastest"
    return _by_category(
        runs,
        "speedup",
        "Speed-up by category",
        note,
        figure,
        TIMES,
        side,
        times,
    )


def _other_speedups(runs: Sequence[_ReportedRun]) -> Chart:
    """The other baselines, on an axis of their own.

    A slow one would flatten the speed-up over plain decoding.
    """
    sides = dict.fromkeys(itertools.chain(*(run.overall["speedup"] for run in runs)))
    sides.pop(_main_side(runs), None)

    series = []
    known = []  # every value
    for run in runs:
        places = [(run.overall, side) for side in sides]
        one = series_of(run.name, places, run.tone, "speedup")
        series.append(one)
        known += [value for value in one.values if value is not None]

    known.sort(reverse=True)
    note = "Of all prompts, with 95\u00a0% intervals."
    top = None
    if len(known) > 1 and known[0] > _FAR * known[1]:
        top = 1.3 * known[1]
        note += " A bar far longer than the others is cut."
    return Chart(
        "speedup_others",
        "Speed-up over other baselines",
        note,
        "bars",
        [BASELINE_NAMES.get(side, side) for side in sides],
        series,
        "baseline",
        TIMES,
        show=times,
        reference=1.0,
        top=top,
    )


def _accepted_length(runs: Sequence[_ReportedRun]) -> Chart:
    note = "Tokens committed per target pass, the target's own token included; 1 is plain decoding."
    title = "Accepted length by category"
    unit = "tokens per target pass"
    return _by_category(runs, "accepted_length", title, note, "accepted_length", unit)


def _acceptance(runs: Sequence[_ReportedRun]) -> Chart:
    deepest = max((len(run.overall["acceptance_by_depth"]["joint"]) for run in runs), default=0)
    series = []
    for run in runs:
        for kind in ("conditional", "joint"):
            shares = run.overall["acceptance_by_depth"][kind]
            name = kind if len(runs) == 1 else f"{run.name}: {kind}"
            values = [*shares, *[None] * (deepest - len(shares))]
            series.append(Series(name, values, run.tone, dashed=kind == "joint"))
    note = (
        "Conditional: given that the token before was accepted. "
        "Joint: share of all rounds that accepted so many tokens."
    )
    return Chart(
        "acceptance",
        "Acceptance by depth",
        note,
        "lines",
        [str(depth) for depth in range(1, deepest + 1)],
        series,
        "depth",
        "share of rounds",
        top=1.0,
    )


def _histogram(runs: Sequence[_ReportedRun]) -> Chart:
    every: list[list[int]] = []  # rounds of each run by accepted length
    for run in runs:
        counts = run.overall.get("accepted_length_histogram")
        if not counts:  # earlier versions did not write it
            counts = accepted_length_histogram(rounds_of(run.results.get("prompts", [])))
        every.append(counts)
    longest = max((len(counts) for counts in every), default=0)
    first = 1
    if any(counts and counts[0] for counts in every):
        first = 0

    series = []
    for run, counts in zip(runs, every, strict=True):
        total = sum(counts)
        shares: list[float | None] = [None] * longest
        if total:
            shares = [count / total for count in counts]
            shares += [0.0] * (longest - len(counts))
        series.append(Series(run.name, shares[first:], run.tone))
    note = (
        "Share of rounds that committed so many tokens; 1 means that no drafted token was accepted."
    )
    return Chart(
        "histogram",
        "Accepted length of rounds",
        note,
        "columns",
        [str(length) for length in range(first, longest)],
        series,
        "tokens committed",
        "share of rounds",
        show="{:.0%}".format,
    )


def _latencies(runs: Sequence[_ReportedRun]) -> list[Chart]:
    sides = [(run.name, run.tone, run.overall) for run in runs]
    if len(runs) == 1:
        plain = runs[0].overall["baselines"].get("autoregressive", {})
        sides.insert(0, ("plain decoding", 0, plain))
    titles = {
        "ttft_ms": (
            "Time to first token",
            "Milliseconds from the start of a prompt to its first token.",
        ),
        "tpot_ms": ("Time per output token", "Mean milliseconds of each later token of a prompt."),
    }
    points = ["p50", "p95", "p99"]
    charts = []
    for key, (title, note) in titles.items():
        series = []
        for name, tone, figures in sides:
            if key in figures:
                values = [figures[key][point] for point in points]
                series.append(Series(name, values, tone))
        note += " Percentiles over prompts."
        charts.append(
            Chart(
                key,
                title,
                note,
                "columns",
                points,
                series,
                "percentile of prompts",
                "milliseconds",
                show="{:,.0f}".format,
            )
        )
    return charts


def _rates(runs: Sequence[_ReportedRun]) -> Chart:
    sides = dict.fromkeys(itertools.chain(*(run.overall["baselines"] for run in runs)))
    series = []
    for run in runs:
        places = [(run.overall, "")]
        for side in sides:
            places.append((run.overall["baselines"].get(side, {}), ""))
        series.append(series_of(run.name, places, run.tone, "tokens_per_second"))
    labels = ["with the drafter", *(BASELINE_NAMES.get(side, side) for side in sides)]
    note = "New tokens over wall-clock time, prefill included, every side alike."
    return Chart(
        "rates",
        "Tokens per second",
        note,
        "bars",
        labels,
        series,
        "side",
        "tokens per second",
        show="{:,.1f}".format,
    )


# -- tables ----------------------------------------------------------------------------------------


class _Figure(NamedTuple):
    """A figure of the page, see `figure_of`. better: 1 for more, -1 for less, 0 for neither."""

    name: str
    note: str
    key: str
    form: str
    better: int = 0
    part: str = ""


# The figures that matter most.
_TILES = (
    _Figure("Speed-up", "over the faster baseline", "speedup_vs_fastest", "{:.2f}\u00d7", 1),
    _Figure(
        "Speed-up of decoding",
        "over plain decoding, after the first token",
        "decoding_speedup",
        "{:.2f}\u00d7",
        1,
        "autoregressive",
    ),
    _Figure("Over n-grams alone", "what training adds", "speedup", "{:.2f}\u00d7", 1, NGRAM),
    _Figure("Accepted length", "tokens per target pass", "accepted_length", "{:.2f}", 1),
    _Figure("Acceptance rate", "of the depth offered", "acceptance_rate", "{:.1%}", 1),
    _Figure("Tokens per second", "prefill included", "tokens_per_second", "{:,.1f}", 1),
    _Figure("First token", "median", "ttft_ms", "{:,.0f} ms", -1, "p50"),
    _Figure("Drafter's share", "of the time", "draft_fraction", "{:.1%}"),
    _Figure("MBSU", "memory-bound speed-up", "mbsu", "{:.2f}", 1),
)
_COMPARED = (
    *_TILES,
    _Figure("Per token", "median", "tpot_ms", "{:,.1f} ms", -1, "p50"),
    _Figure("Per token", "p99", "tpot_ms", "{:,.1f} ms", -1, "p99"),
    _Figure("Outputs", "identical to plain decoding", "identical_outputs", "{:.1%}"),
    _Figure("Prompts", "of all categories", "prompts", "{:,}"),
)


def _comparison(
    runs: Sequence[Json], names: Sequence[str]
) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Rows of a table with a column per run: (figure, [(value, is it the best)]).

    Figures are ranked only where the runs differ beyond noise.
    """
    if len(runs) < 2:
        return []
    table = []
    ranked = not differing(runs)
    if ranked:
        cells = [("1", False)]
        for run in runs[1:]:
            word = "no common prompts"
            found = against(runs[0], run)
            if found is not None:
                word = ratio_text(*found)
            cells.append((word, False))
            ranked = ranked and word.endswith(("faster", "slower"))
        table.append((f"Times as fast as {names[0]}", cells))

    for each in _COMPARED:
        values = [figure_of(run["overall"], each.key, each.part) for run in runs]
        known = [value * each.better for value in values if value is not None]
        best = None
        if ranked and each.better and len(set(known)) > 1:
            best = max(known)
        cells = []
        if not known:  # no run has measured it
            continue
        for value in values:
            if value is None:
                cells.append((DASH, False))
            else:
                cells.append((each.form.format(value), value * each.better == best))
        table.append((f"{each.name}, {each.note}", cells))
    return table


def ratio_text(ratio: Ratio, prompts: int) -> str:
    """A ratio between two runs with its interval, and whether it is beyond noise."""
    span = (ratio.low, ratio.high)
    state = judge(ratio.value, span, prompts).state
    word = {PAYS: "faster", LOSES: "slower"}.get(state, "within noise")
    return f"{ratio.value:.2f}{interval_text(span)}, {word}"


def _diffs(run: Json) -> tuple[list[Json], int]:
    """Outputs that differ from a baseline's, marked; and the number of those without stored text."""
    shown = []
    bare = 0
    for record in run.get("prompts", []):
        outputs = record.get("outputs", {})
        for name, same in record.get("identical", {}).items():
            if same:
                continue
            if name not in outputs or "drafter" not in outputs:
                bare += 1
                continue
            before, after = mark(outputs[name], outputs["drafter"])
            question = f"question {record['question_id']}, turn {record['turn'] + 1}"
            shown.append(
                {
                    "where": f"{record['category']}, {question}",
                    "side": BASELINE_NAMES.get(name, name),
                    "before": before,
                    "after": after,
                }
            )
    return shown, bare


def mark(before: str, after: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Two texts as (kind, text) runs of words.

    Kinds are `same`, or `del` in the first and `ins` in the second. Shortens a long common
    beginning: the first difference matters.
    """
    # Words, spaces and single marks.
    old = re.findall(_WORD, before)
    new = re.findall(_WORD, after)
    left: list[tuple[str, str]] = []
    right: list[tuple[str, str]] = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        removed = "".join(old[i:j])
        added = "".join(new[k:m])
        if tag == "equal":
            if not left and not right and len(removed) > _CONTEXT:
                removed = "\u2026" + removed[-_CONTEXT:]
            left.append(("same", removed))
            right.append(("same", removed))
            continue
        if removed:
            left.append(("del", removed))
        if added:
            right.append(("ins", added))
    return left, right
