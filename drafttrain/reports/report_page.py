"""The page of `drafttrain report`: what results.json files and sweeps say, for people who decide whether to deploy."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from drafttrain.evaluation.metrics import BASELINES, accepted_length_histogram
from drafttrain.reports.charts import Chart, Series, svg
from drafttrain.reports.page import render_page

Results = dict[str, Any]
# What a result is called by, where the files differ in it.
_FIELDS: dict[str, Callable[[Results], str]] = {
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
_AXES = {
    "batch_size": "batch size",
    "tree": "tree",
    "temperature": "temperature",
    "dtype": "dtype",
    "context": "context length",
}  # of a sweep
_CONTEXT = 160  # characters of agreement shown before two outputs part


def run_names(runs: Sequence[Results], files: Sequence[str]) -> list[str]:
    """A name per result: what it differs in from the others; the file's name where that is not enough."""
    if len(runs) == 1:
        return [str(runs[0]["drafter"])]
    differing = [show for show in _FIELDS.values() if len({show(run) for run in runs}) > 1]
    names = [", ".join(filter(None, (show(run) for show in differing))) for run in runs]
    return [
        name if name and names.count(name) == 1 else ", ".join(filter(None, (name, Path(file).stem)))
        for name, file in zip(names, files, strict=True)
    ]


def make_charts(runs: Sequence[Results], names: Sequence[str], sweeps: Sequence[Results]) -> list[Chart]:
    """Every chart that the files have figures for."""
    charts: list[Chart] = []
    if runs:
        charts += [_speedup(runs, names), _accepted_length(runs, names), _acceptance(runs, names)]
        charts += [_histogram(runs, names), *_latencies(runs, names), _rates(runs, names)]
    charts += [chart for number, sweep in enumerate(sweeps, 1) for chart in _sweep_charts(sweep, number)]
    return [chart for chart in charts if any(value is not None for one in chart.series for value in one.values)]


def page(
    runs: Sequence[Results],
    names: Sequence[str],
    sweeps: Sequence[Results],
    charts: Sequence[Chart],
    identity: list[str],
) -> str:
    """The page as text.

    Args:
        runs, names: results and what to call them. sweeps: summaries of sweeps. charts: of these.
        identity: per run, the sentence about identical outputs.
    """
    return render_page(
        "report.html",
        title=names[0] if len(runs) == 1 else f"{len(runs)} drafters compared" if runs else "Sweep",
        runs=list(zip(names, runs, identity, strict=True)),
        verdicts=[verdict(run["overall"]) for run in runs],
        tiles=_tiles(runs[0]) if len(runs) == 1 else [],
        comparison=_comparison(runs),
        charts=[(chart, svg(chart, f"c{number}")) for number, chart in enumerate(charts)],
        categories=[(name, _category_rows(run)) for name, run in zip(names, runs, strict=True)],
        diffs=[(name, *_diffs(run)) for name, run in zip(names, runs, strict=True)],
        settings=_settings(runs),
        baseline=_NAMES.get,
    )


def verdict(overall: Results) -> tuple[str, str]:
    """One sentence on whether it pays, and `good`, `bad` or nothing for its colour."""
    factor = overall["speedup_vs_fastest"]
    length = f"{overall['accepted_length']:.2f} tokens per target pass"
    if factor is None:
        return f"{length}, {overall['tokens_per_second']:.1f} tokens per second; no baseline was run.", ""
    span = _span(overall, "speedup_vs_fastest")
    sure = f" (95 % interval {span[0]:.2f} to {span[1]:.2f})" if span else ""
    if factor < 1:
        return f"{factor:.2f} times the faster baseline{sure}: slower than not speculating, at {length}.", "bad"
    return f"{factor:.2f} times as fast as the faster baseline{sure}, at {length}.", "good" if factor > 1.02 else ""


def _span(figures: Results, key: str, side: str = "") -> tuple[float, float] | None:
    """The confidence interval of a figure, if the file has one.

    Args:
        key: of the figure; `speedup_vs_fastest` means the speed-up over the baseline that it is the figure of.
        side: which baseline, for the key `speedup`.
    """
    known = figures.get("confidence", {})
    if key == "speedup_vs_fastest":
        speedup = {name: figures["speedup"][name] for name in BASELINES if name in figures.get("speedup", {})}
        key, side = "speedup", min(speedup, key=lambda name: speedup[name], default="")
    low_high = known.get(key, {}).get(side) if key == "speedup" else known.get(key)
    return (low_high[0], low_high[1]) if low_high else None


def _groups(runs: Sequence[Results]) -> list[str]:
    """All categories in order of first appearance, and all together."""
    return [*dict.fromkeys(name for run in runs for name in run["categories"]), "all"]


def _of(run: Results, group: str) -> Results:
    return run["overall"] if group == "all" else run["categories"].get(group, {})


def _speedup(runs: Sequence[Results], names: Sequence[str]) -> Chart:
    groups = _groups(runs)
    if len(runs) == 1:
        sides = list(runs[0]["overall"]["speedup"])
        series = [
            Series(
                f"over {_NAMES.get(side, side)}",
                [_of(runs[0], group).get("speedup", {}).get(side) for group in groups],
                tone,
                spans=[_span(_of(runs[0], group), "speedup", side) for group in groups],
            )
            for tone, side in enumerate(sides, 1)
        ]
    else:
        series = [
            Series(
                name,
                [_of(run, group).get("speedup_vs_fastest") for group in groups],
                tone,
                spans=[_span(_of(run, group), "speedup_vs_fastest") for group in groups],
            )
            for tone, (run, name) in enumerate(zip(runs, names, strict=True), 1)
        ]
    note = (
        "Tokens per second over each baseline's." if len(runs) == 1 else "Tokens per second over the faster baseline's."
    )
    return Chart(
        "speedup",
        "Speed-up by category",
        note + " Left of the dashed line speculation does not pay.",
        "bars",
        groups,
        series,
        show=lambda value: f"{value:.2f}\u00d7",
        reference=1.0,
    )


def _accepted_length(runs: Sequence[Results], names: Sequence[str]) -> Chart:
    groups = _groups(runs)
    series = [
        Series(
            name,
            [_of(run, group).get("accepted_length") for group in groups],
            tone,
            spans=[_span(_of(run, group), "accepted_length") for group in groups],
        )
        for tone, (run, name) in enumerate(zip(runs, names, strict=True), 1)
    ]
    note = "Tokens committed per target pass, the target's own token included; 1 is plain decoding."
    return Chart("accepted_length", "Accepted length by category", note, "bars", groups, series, reference=1.0)


def _acceptance(runs: Sequence[Results], names: Sequence[str]) -> Chart:
    every = [run["overall"]["acceptance_by_depth"] for run in runs]
    deepest = max((len(shares["joint"]) for shares in every), default=0)
    series = []
    for tone, (shares, name) in enumerate(zip(every, names, strict=True), 1):
        prefix = f"{name}: " if len(runs) > 1 else ""
        for kind in ("conditional", "joint"):
            values = [*shares[kind], *[None] * (deepest - len(shares[kind]))]
            series.append(Series(prefix + kind, values, tone, dashed=kind == "joint"))
    return Chart(
        "acceptance",
        "Acceptance by depth",
        "Conditional: given that the token before was accepted. Joint: share of all rounds that got at least this far.",
        "lines",
        [str(depth) for depth in range(1, deepest + 1)],
        series,
        "depth",
        reference=None,
        top=1.0,
    )


def _rounds_by_length(run: Results) -> list[int]:
    """The histogram in the file, or of its prompts' rounds where an older version wrote it."""
    if "accepted_length_histogram" in run["overall"]:
        return run["overall"]["accepted_length_histogram"]
    rounds: Counter[tuple[int, int]] = Counter()
    for record in run.get("prompts", []):
        rounds.update({(accepted, offered): count for accepted, offered, count in record["sides"]["drafter"]["rounds"]})
    return accepted_length_histogram(rounds)


def _histogram(runs: Sequence[Results], names: Sequence[str]) -> Chart:
    every = [_rounds_by_length(run) for run in runs]
    longest = max(map(len, every), default=0)
    first = 1 if all(not counts or counts[0] == 0 for counts in every) else 0
    series = []
    for tone, (counts, name) in enumerate(zip(every, names, strict=True), 1):
        total = sum(counts)
        values = [count / total for count in counts] + [None if not counts else 0.0] * (longest - len(counts))
        series.append(Series(name, values[first:] if total else [None] * (longest - first), tone))
    return Chart(
        "histogram",
        "Accepted length of rounds",
        "Share of rounds that committed so many tokens; 1 means that nothing drafted was accepted.",
        "columns",
        [str(length) for length in range(first, longest)],
        series,
        "tokens committed",
        show=lambda value: f"{value:.0%}",
    )


def _latencies(runs: Sequence[Results], names: Sequence[str]) -> Iterable[Chart]:
    points = ("p50", "p95", "p99")
    plain = runs[0]["overall"]["baselines"].get("autoregressive", {}) if len(runs) == 1 else {}
    titles = {
        "ttft_ms": ("Time to first token", "Milliseconds from the start of a prompt to its first token."),
        "tpot_ms": ("Time per output token", "Mean milliseconds of each later token of a prompt."),
    }
    for key, (title, note) in titles.items():
        series = [Series("plain decoding", [plain[key][point] for point in points], 0)] if key in plain else []
        series += [
            Series(name, [run["overall"][key][point] for point in points], tone)
            for tone, (run, name) in enumerate(zip(runs, names, strict=True), 1)
        ]
        note += " Percentiles over prompts."
        yield Chart(key, title, note, "columns", list(points), series, show=lambda value: f"{value:,.0f}")


def _rates(runs: Sequence[Results], names: Sequence[str]) -> Chart:
    """A bar per side and run."""
    sides = list(dict.fromkeys(side for run in runs for side in run["overall"]["baselines"]))
    series = []
    for tone, (run, name) in enumerate(zip(runs, names, strict=True), 1):
        theirs = [run["overall"]["baselines"].get(side, {}).get("tokens_per_second") for side in sides]
        series.append(Series(name, [run["overall"]["tokens_per_second"], *theirs], tone))
    labels = ["with the drafter", *(_NAMES.get(side, side) for side in sides)]
    note = "New tokens over wall-clock time, prefill included, every side alike."
    return Chart("rates", "Tokens per second", note, "bars", labels, series, show=lambda value: f"{value:,.1f}")


def _cells(sweep: Results) -> list[tuple[Results, Results]]:
    """(settings, figures) of each cell that was compared with a baseline.

    A cell holds its settings under `cell` or beside its figures, and its figures under `overall` or beside its settings.
    """
    found = []
    for cell in sweep["cells"]:
        figures = cell.get("overall", cell)
        if figures.get("speedup_vs_fastest") is not None:
            settings = dict(cell.get("cell") or {key: cell[key] for key in _AXES if key in cell})
            settings["tree"] = cell.get("spec") or settings.get("tree")
            found.append((settings, figures))
    return found


def _sweep_charts(sweep: Results, number: int) -> Iterable[Chart]:
    """Speed-up by batch size, a line per setting otherwise; and by each other axis, the rest as in the first cell."""
    cells = _cells(sweep)
    suffix = "" if number == 1 else f"_{number}"
    differing = [key for key in _AXES if len({str(settings.get(key)) for settings, _ in cells}) > 1]
    lines: dict[str, dict[int, Results]] = {}
    for settings, figures in cells:
        others = [key for key in differing if key != "batch_size"]
        name = ", ".join(str(settings[key]) if key == "tree" else f"{_AXES[key]} {settings.get(key)}" for key in others)
        lines.setdefault(name or "speed-up", {})[settings.get("batch_size", 1)] = figures
    lines = {name: by_size for name, by_size in lines.items() if len(by_size) > 1}
    if lines:
        yield _crossover(lines, f"crossover{suffix}")
    for key in (key for key in differing if key != "batch_size"):
        rest = [other for other in _AXES if other != key]
        own = {str(s[key]): f for s, f in cells if all(s.get(other) == cells[0][0].get(other) for other in rest)}
        values = [figures["speedup_vs_fastest"] for figures in own.values()]
        spans = [_span(figures, "speedup_vs_fastest") for figures in own.values()]
        yield Chart(
            f"sweep_{key}{suffix}",
            f"Speed-up by {_AXES[key]}",
            "Over the faster baseline, all else as in the sweep's first cell.",
            "bars",
            list(own),
            [Series("speed-up", values, spans=spans)],
            show=lambda value: f"{value:.2f}\u00d7",
            reference=1.0,
        )


def _crossover(lines: dict[str, dict[int, Results]], key: str) -> Chart:
    """Args: lines: by the name of a setting, figures by batch size."""
    sizes = sorted({size for by_size in lines.values() for size in by_size})
    series = [
        Series(
            name,
            [by_size.get(size, {}).get("speedup_vs_fastest") for size in sizes],
            tone,
            spans=[_span(by_size.get(size, {}), "speedup_vs_fastest") for size in sizes],
        )
        for tone, (name, by_size) in enumerate(lines.items(), 1)
    ]
    ends = [crossover(sizes, one.values) for one in series]
    told = "; ".join(f"{one.name}: {end}" for one, end in zip(series, ends, strict=True))
    return Chart(
        key,
        "Speed-up by batch size",
        f"Below the dashed line speculation does not pay. {told[:1].upper()}{told[1:]}.",
        "lines",
        [str(size) for size in sizes],
        series,
        "prompts at a time",
        show=lambda value: f"{value:.2f}\u00d7",
        reference=1.0,
    )


def crossover(sizes: Sequence[int], factors: Sequence[float | None]) -> str:
    """Where a line of speed-ups falls below 1, in words."""
    known = [(size, factor) for size, factor in zip(sizes, factors, strict=True) if factor is not None]
    if not known:
        return "not measured"
    losing = next((i for i, (_, factor) in enumerate(known) if factor < 1), None)
    if losing is None:
        return f"pays up to {known[-1][0]} at least"
    if losing == 0:
        return f"does not pay, from {known[0][0]} on"
    return f"stops paying between {known[losing - 1][0]} and {known[losing][0]}"


def _tiles(run: Results) -> list[tuple[str, str, str]]:
    """(what, figure, explanation) of the figures that matter most."""
    overall = run["overall"]

    def between(key: str, digits: int = 2) -> str:
        span = _span(overall, key)
        return f"; 95 % interval {span[0]:.{digits}f} to {span[1]:.{digits}f}" if span else ""

    note = "tokens per target pass" + between("accepted_length")
    tiles = [("Accepted length", f"{overall['accepted_length']:.2f}", note)]
    if overall["speedup_vs_fastest"] is not None:
        factor = f"{overall['speedup_vs_fastest']:.2f}\u00d7"
        tiles.insert(0, ("Speed-up", factor, "over the faster baseline" + between("speedup_vs_fastest")))
    rate = "prefill included" + between("tokens_per_second", 1)
    tiles += [
        ("Acceptance rate", f"{overall['acceptance_rate']:.0%}", "of the depth offered" + between("acceptance_rate")),
        ("Tokens per second", f"{overall['tokens_per_second']:.1f}", rate),
        ("First token", f"{overall['ttft_ms']['p50']:,.0f} ms", "median"),
        ("Drafter's share", f"{overall['draft_fraction']:.0%}", "of the time"),
        ("MBSU", f"{overall['mbsu']:.2f}", "memory-bound speed-up"),
    ]
    return tiles


def _comparison(runs: Sequence[Results]) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Rows of a table with a column per run: (figure, [(value, is it the best)])."""
    rows: list[tuple[str, Callable[[Results], float | None], str, int]] = [
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
        cells = [("\u2013" if v is None else form.format(v), v is not None and v * better == best) for v in values]
        table.append((name, cells))
    return table


def _category_rows(run: Results) -> list[tuple[str, Results]]:
    return [*run["categories"].items(), ("all", run["overall"])]


def _settings(runs: Sequence[Results]) -> list[tuple[str, list[str], bool]]:
    """(setting, value per run, do they differ), nested ones by dotted names."""
    shown = ("target", "drafter", "kind", "suite", "suite_digest", "device", "threads", "dtype", "compute_dtype")
    tables: list[dict[str, str]] = []
    for run in runs:
        table = {key: str(run[key]) for key in shown if key in run}
        decoding = dict(run["decoding"])
        tree = decoding.pop("tree", {})
        table |= {"tree": str(tree.get("spec", "")), **{key: str(value) for key, value in decoding.items()}}
        table |= {"drafttrain": str(run.get("drafttrain", "")), **run.get("versions", {})}
        table["command"] = " ".join(run.get("command", []))
        tables.append(table)
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [(key, [table.get(key, "\u2013") for table in tables]) for key in keys]
    return [(key.replace("_", " "), values, len(set(values)) > 1) for key, values in rows]


def _diffs(run: Results) -> tuple[list[Results], int]:
    """Outputs that differ from plain decoding or transformers', with the words marked; and how many have no text stored."""
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

    A long beginning that both share is cut, since the place where they part is what matters.
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


def is_sweep(content: Any) -> bool:
    """A sweep's summary, by its form."""
    return isinstance(content, dict) and isinstance(content.get("cells"), list) and bool(content["cells"])
