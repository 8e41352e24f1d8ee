"""The page of `drafttrain report`: results.json files and sweeps, for readers who decide whether to
deploy.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from drafttrain.evaluation.baselines import BASELINE_NAMES
from drafttrain.evaluation.diagnose import diagnose
from drafttrain.evaluation.metrics import accepted_length_histogram, rounds_of
from drafttrain.evaluation.resampling import Ratio
from drafttrain.evaluation.verdicts import LOSES, PAYS, against, judge, outliers, verdict_of
from drafttrain.files import Json
from drafttrain.reports.charts import Chart, Series, svg
from drafttrain.reports.figures import (
    COLORS,
    DASH,
    conditions,
    figure_of,
    sentence,
    series_of,
    settings_table,
    span_of,
    times,
)
from drafttrain.reports.output import render_page
from drafttrain.reports.sweep_page import sweep_charts, sweep_section, sweep_title

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
# What two runs must share for a ratio between them: keys of the results or of their decoding
# settings.
_SHARED = ("target", "suite_digest", "questions", "device", "machine", "threads", "dtype", "compute_dtype", "max_new_tokens",
           "batch_size", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # fmt: skip
_CONTEXT = 160  # characters of agreement shown before two outputs differ
_FAR = 3.0  # times the next bar, from where on a bar is cut


def run_names(runs: Sequence[Json], files: Sequence[str]) -> list[str]:
    """Names each result by the settings in which it differs from the others, and by its file if
    that is not enough.
    """
    if len(runs) == 1:
        return [str(runs[0]["drafter"])]
    differing = [show for show in _FIELDS.values() if len({show(run) for run in runs}) > 1]
    names = [", ".join(filter(None, (show(run) for show in differing))) for run in runs]
    return [
        name
        if name and names.count(name) == 1
        else ", ".join(filter(None, (name, Path(file).stem)))
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
        return [
            {**self.results["categories"], "all": self.overall}.get(group, {}) for group in groups
        ]


def main_charts(run: Json) -> list[Chart]:
    """The charts of a picture: speed-up by category, acceptance by depth, tokens per second;
    without empty ones.
    """
    runs = [_ReportedRun(str(run["drafter"]), 1, run)]
    return _with_values([_speedup(runs), _acceptance(runs), _rates(runs)])


def make_charts(runs: Sequence[Json], names: Sequence[str], sweeps: Sequence[Json]) -> list[Chart]:
    """Every chart that the files have figures for."""
    named = [
        _ReportedRun(name, tone, run)
        for tone, (name, run) in enumerate(zip(names, runs, strict=True), 1)
    ]
    charts = [
        make(named)
        for make in (_speedup, _other_speedups, _accepted_length, _acceptance, _histogram)
        if named
    ]
    if named:
        charts += [*_latencies(named), _rates(named)]
    else:
        charts += []
    charts += [
        chart for number, sweep in enumerate(sweeps, 1) for chart in sweep_charts(sweep, number)
    ]
    return _with_values(charts)


def _with_values(charts: Sequence[Chart]) -> list[Chart]:
    return [
        chart
        for chart in charts
        if any(value is not None for one in chart.series for value in one.values)
    ]


def page(
    runs: Sequence[Json],
    names: Sequence[str],
    charts: Sequence[Chart],
    notes: Sequence[list[str]],
    sweeps: Sequence[Json] = (),
) -> str:
    """Renders the page.

    Args:
        runs, names: results and their names. charts: of `make_charts`. notes: per run, whether
            outputs are identical, then warnings. sweeps: summaries.
    """
    named = list(zip(names, runs, strict=True))
    found = [verdict_of(run["overall"]) for run in runs]
    if len(runs) == 1:
        title = names[0]
    elif runs:
        title = f"{len(runs)} drafters compared"
    else:
        title = sweep_title(sweeps[0])
    return render_page(
        "report.html",
        title=title,
        runs=list(zip(names, runs, notes, strict=True)),
        verdicts=[
            (each.text.replace("95 %", "95\u00a0%"), COLORS.get(each.state, "")) for each in found
        ],
        conditions=[conditions(run) for run in runs],
        # Earlier versions wrote advice by other rules, without a date.
        diagnoses=[run.get("diagnosis", []) if "date" in run else diagnose(run) for run in runs],
        outliers=[outliers(run) for run in runs],
        tiles=_tiles(runs[0]) if len(runs) == 1 else [],
        comparison=_comparison(runs, names),
        differing=differing(runs),
        sweeps=[sweep_section(sweep) for sweep in sweeps],
        charts=[(chart, svg(chart, f"c{number}")) for number, chart in enumerate(charts)],
        categories=[
            (name, [*run["categories"].items(), ("all", run["overall"])]) for name, run in named
        ],
        diffs=[(name, *_diffs(run)) for name, run in named],
        settings=settings_table(runs),
        baseline=BASELINE_NAMES.get,
        sentence=sentence,
    )


def differing(runs: Sequence[Json]) -> list[str]:
    """The settings that keep runs from being compared, with their values. A setting that a file
    lacks counts as the same.
    """
    found = []
    for key in _SHARED:
        values = [
            {**run["decoding"], "questions": run["overall"]["prompts"], **run}.get(key)
            for run in runs
        ]
        if len({str(value) for value in values if value is not None}) > 1:
            shown = [
                run["suite"] if key == "suite_digest" else value
                for run, value in zip(runs, values, strict=True)
            ]
            found.append(f"{key.replace('_', ' ')} ({', '.join(dict.fromkeys(map(str, shown)))})")
    return found


# -- charts ----------------------------------------------------------------------------------------


def _groups(runs: Sequence[_ReportedRun]) -> list[str]:
    """All categories in order of first appearance, and `all`."""
    return [*dict.fromkeys(name for run in runs for name in run.results["categories"]), "all"]


def _main_side(runs: Sequence[_ReportedRun]) -> str:
    """The baseline of the speed-up chart: plain decoding where every run measured it; empty for the
    faster one of each.
    """
    if all("autoregressive" in run.overall["speedup"] for run in runs):
        return "autoregressive"
    return ""


def _speedup(runs: Sequence[_ReportedRun]) -> Chart:
    groups = _groups(runs)
    side = _main_side(runs)
    if side:
        key = "speedup"
    else:
        key = "speedup_vs_fastest"
    series = [series_of(run.name, run.parts(groups), run.tone, key, side) for run in runs]
    over = BASELINE_NAMES.get(side, "the faster plain baseline")
    note = f"Tokens per second over {over}'s, with 95\u00a0% intervals. "
    note += "Left of the dashed line speculation does not pay."
    return Chart(
        "speedup",
        "Speed-up by category",
        note,
        "bars",
        groups,
        series,
        show=times,
        reference=1.0,
    )


def _other_speedups(runs: Sequence[_ReportedRun]) -> Chart:
    """The other baselines, on an axis of their own: a slow one would flatten the speed-up over
    plain decoding.
    """
    sides = dict.fromkeys(
        side for run in runs for side in run.overall["speedup"] if side != _main_side(runs)
    )
    series = []
    for run in runs:
        points = [
            (figure_of(run.overall, "speedup", side), span_of(run.overall, "speedup", side))
            for side in sides
        ]
        series.append(
            Series(
                run.name,
                [value for value, _ in points],
                run.tone,
                spans=[span for _, span in points],
            )
        )
    largest = sorted(
        (value for one in series for value in one.values if value is not None), reverse=True
    )
    if len(largest) > 1 and largest[0] > _FAR * largest[1]:
        top = 1.3 * largest[1]
    else:
        top = None
    note = "Of all prompts, with 95\u00a0% intervals." + (
        " A bar far longer than the others is cut." if top else ""
    )
    labels = [BASELINE_NAMES.get(side, side) for side in sides]
    title = "Speed-up over other baselines"
    return Chart(
        "speedup_others",
        title,
        note,
        "bars",
        labels,
        series,
        show=times,
        reference=1.0,
        top=top,
    )


def _accepted_length(runs: Sequence[_ReportedRun]) -> Chart:
    groups = _groups(runs)
    series = [series_of(run.name, run.parts(groups), run.tone, "accepted_length") for run in runs]
    note = "Tokens committed per target pass, the target's own token included; 1 is plain decoding."
    return Chart(
        "accepted_length",
        "Accepted length by category",
        note,
        "bars",
        groups,
        series,
        reference=1.0,
    )


def _acceptance(runs: Sequence[_ReportedRun]) -> Chart:
    deepest = max((len(run.overall["acceptance_by_depth"]["joint"]) for run in runs), default=0)
    series = []
    for run in runs:
        for kind in ("conditional", "joint"):
            shares = run.overall["acceptance_by_depth"][kind]
            if len(runs) > 1:
                name = f"{run.name}: {kind}"
            else:
                name = kind
            series.append(
                Series(
                    name,
                    [*shares, *[None] * (deepest - len(shares))],
                    run.tone,
                    dashed=kind == "joint",
                )
            )
    note = "Conditional: given that the token before was accepted. Joint: share of all rounds that accepted so many tokens."
    labels = [str(depth) for depth in range(1, deepest + 1)]
    return Chart(
        "acceptance",
        "Acceptance by depth",
        note,
        "lines",
        labels,
        series,
        "depth",
        top=1.0,
    )


def _histogram(runs: Sequence[_ReportedRun]) -> Chart:
    # Older versions of drafttrain did not write the histogram.
    key = "accepted_length_histogram"
    every = []
    for run in runs:
        every.append(
            run.overall.get(key)
            or accepted_length_histogram(rounds_of(run.results.get("prompts", [])))
        )
    longest = max(map(len, every), default=0)
    if any(counts and counts[0] for counts in every):
        first = 0
    else:
        first = 1
    series = []
    for run, counts in zip(runs, every, strict=True):
        total = sum(counts)
        if total:
            shares = [count / total for count in counts] + [0.0] * (longest - len(counts))
        else:
            shares = [None] * longest
        series.append(Series(run.name, shares[first:], run.tone))
    title = "Accepted length of rounds"
    labels = [str(length) for length in range(first, longest)]
    note = (
        "Share of rounds that committed so many tokens; 1 means that no drafted token was accepted."
    )
    return Chart(
        "histogram",
        title,
        note,
        "columns",
        labels,
        series,
        "tokens committed",
        show="{:.0%}".format,
    )


def _latencies(runs: Sequence[_ReportedRun]) -> Iterable[Chart]:
    points = ["p50", "p95", "p99"]
    sides = [(run.name, run.tone, run.overall) for run in runs]
    if len(runs) == 1:
        sides.insert(
            0, ("plain decoding", 0, runs[0].overall["baselines"].get("autoregressive", {}))
        )
    titles = {
        "ttft_ms": (
            "Time to first token",
            "Milliseconds from the start of a prompt to its first token.",
        ),
        "tpot_ms": ("Time per output token", "Mean milliseconds of each later token of a prompt."),
    }
    for key, (title, note) in titles.items():
        known = [(name, tone, figures[key]) for name, tone, figures in sides if key in figures]
        series = [
            Series(name, [values[point] for point in points], tone) for name, tone, values in known
        ]
        yield Chart(
            key,
            title,
            f"{note} Percentiles over prompts.",
            "columns",
            points,
            series,
            show="{:,.0f}".format,
        )


def _rates(runs: Sequence[_ReportedRun]) -> Chart:
    sides = list(dict.fromkeys(side for run in runs for side in run.overall["baselines"]))
    series = []
    for run in runs:
        theirs = [run.overall["baselines"].get(side, {}) for side in sides]
        series.append(series_of(run.name, [run.overall, *theirs], run.tone, "tokens_per_second"))
    labels = ["with the drafter", *(BASELINE_NAMES.get(side, side) for side in sides)]
    note = "New tokens over wall-clock time, prefill included, every side alike."
    return Chart("rates", "Tokens per second", note, "bars", labels, series, show="{:,.1f}".format)


# -- tables ----------------------------------------------------------------------------------------


def _tiles(run: Json) -> list[tuple[str, str, str]]:
    """(name, figure, explanation) of the figures that matter most."""
    overall = run["overall"]

    def between(key: str) -> str:
        span = span_of(overall, key)
        if span:
            return f"; 95 % interval {span[0]:.2f} to {span[1]:.2f}"
        return ""

    note = "tokens per target pass" + between("accepted_length")
    tiles = [("Accepted length", f"{overall['accepted_length']:.2f}", note)]
    factor = overall["speedup_vs_fastest"]
    if factor is not None:
        tiles.insert(
            0,
            ("Speed-up", times(factor), "over the faster baseline" + between("speedup_vs_fastest")),
        )
    return [
        *tiles,
        ("Acceptance rate", f"{overall['acceptance_rate']:.0%}", "of the depth offered"),
        ("Tokens per second", f"{overall['tokens_per_second']:.1f}", "prefill included"),
        ("First token", f"{overall['ttft_ms']['p50']:,.0f} ms", "median"),
        ("Drafter's share", f"{overall['draft_fraction']:.0%}", "of the time"),
        ("MBSU", f"{overall['mbsu']:.2f}", "memory-bound speed-up"),
    ]


def _comparison(
    runs: Sequence[Json], names: Sequence[str]
) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Rows of a table with a column per run: (figure, [(value, is it the best)]); ranks only beyond
    noise.
    """
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
    ranked = len(runs) > 1 and not differing(runs)
    if ranked:
        ratios = [against(runs[0], run) for run in runs[1:]]
        words = [ratio_text(*found) if found else "no common prompts" for found in ratios]
        table.append((f"Times as fast as {names[0]}", [(word, False) for word in ("1", *words)]))
        ranked = all(word.endswith(("faster", "slower")) for word in words)
    for name, figure, form, better in rows if len(runs) > 1 else []:
        values = [figure(run["overall"]) for run in runs]
        known = [value * better for value in values if value is not None]
        if ranked and better and len(set(known)) > 1:
            best = max(known)
        else:
            best = None
        cells = [
            (DASH if v is None else form.format(v), v is not None and v * better == best)
            for v in values
        ]
        table.append((name, cells))
    return table


def ratio_text(ratio: Ratio, prompts: int) -> str:
    """A ratio between two runs with its interval, and whether it is beyond noise."""
    state = judge(ratio.value, ratio[1:], prompts).state
    word = {PAYS: "faster", LOSES: "slower"}.get(state, "within noise")
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}), {word}"


def _diffs(run: Json) -> tuple[list[Json], int]:
    """Outputs that differ from a baseline's, with the differing words marked; and the number
    without stored text.
    """
    shown = []
    bare = 0
    for record in run.get("prompts", []):
        for name in (name for name, same in record.get("identical", {}).items() if not same):
            outputs = record.get("outputs", {})
            if name not in outputs or "drafter" not in outputs:
                bare += 1
                continue
            before, after = mark(outputs[name], outputs["drafter"])
            where = (
                f"{record['category']}, question {record['question_id']}, turn {record['turn'] + 1}"
            )
            shown.append(
                {
                    "where": where,
                    "side": BASELINE_NAMES.get(name, name),
                    "before": before,
                    "after": after,
                }
            )
    return shown, bare


def mark(before: str, after: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Two texts as (kind, text) runs of words: `same`, or `del` in the first and `ins` in the
    second.

    Shortens a long common beginning: the first difference matters.
    """
    words: list[list[str]] = [re.findall(r"\s+|\w+|[^\w\s]", text) for text in (before, after)]
    matcher = difflib.SequenceMatcher(None, words[0], words[1], autojunk=False)
    left = list[tuple[str, str]]()
    right = list[tuple[str, str]]()
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            text = "".join(words[0][i:j])
            if not left and not right and len(text) > _CONTEXT:
                text = "\u2026" + text[-_CONTEXT:]
            left.append(("same", text))
            right.append(("same", text))
        else:
            if j > i:
                left += [("del", "".join(words[0][i:j]))]
            else:
                left += []
            if m > k:
                right += [("ins", "".join(words[1][k:m]))]
            else:
                right += []
    return left, right
