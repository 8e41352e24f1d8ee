"""What the pages of results and sweeps share: figures with their intervals, conditions of a
measurement, settings.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.credentials import redact
from drafttrain.evaluation.verdicts import FEWEST, LOSES, PAYS, fastest, interval_of
from drafttrain.files import Json
from drafttrain.reports.charts import Series, Span

COLORS = {PAYS: "good", LOSES: "bad"}  # of a verdict
DASH = "\u2013"
times = "{:.2f}\u00d7".format


def conditions(run: Json) -> str:
    """When, where and how a result was measured, as far as the file says it."""
    day = str(run.get("date", ""))[:10]
    dtype = run.get("dtype")
    computed = run.get("compute_dtype")
    parts = [
        day and f"measured {day}",
        run.get("device"),
        run.get("threads") and f"{run['threads']} threads",
    ]
    parts.append(
        f"{dtype} computed in {computed}" if dtype and computed and computed != dtype else dtype
    )
    if "drafttrain" in run:
        parts.append(
            f"drafttrain {run['drafttrain']}"
            + (f" at {run['commit']}" if run.get("commit") else "")
        )
    return ", ".join(str(part) for part in parts if part)


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def figure_of(figures: Json, key: str, side: str = "") -> float | None:
    """A figure by its key; `speedup` takes the baseline, `side`."""
    if key == "speedup":
        return figures.get("speedup", {}).get(side)
    return figures.get(key)


def span_of(figures: Json, key: str, side: str = "") -> Span | None:
    """The confidence interval of a figure, if the file has one and enough prompts for it. See
    `figure_of`.
    """
    if figures.get("prompts", FEWEST) < FEWEST:
        return None
    if key == "speedup_vs_fastest":  # the interval of the baseline that gave this figure
        key = "speedup"
        side = fastest(figures)
    if key == "speedup":
        span = interval_of(figures, side)
    else:
        span = (figures.get("confidence") or {}).get(key)
    if span:
        return (span[0], span[1])
    return None


def series_of(name: str, parts: Sequence[Json], tone: int, key: str, side: str = "") -> Series:
    """One figure of several parts (categories, batch sizes, ...) with its intervals."""
    spans = [span_of(part, key, side) for part in parts]
    return Series(name, [figure_of(part, key, side) for part in parts], tone, spans=spans)


def settings_table(runs: Sequence[Json]) -> list[tuple[str, list[str], bool]]:
    """(setting, value per run, whether they differ)."""
    shown = (
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
    )
    tables: list[dict[str, str]] = []
    for run in runs:
        decoding = {**run["decoding"], "tree": run["decoding"].get("tree", {}).get("spec", "")}
        decoding = {"tree": decoding.pop("tree"), **decoding}
        table = {**{key: run[key] for key in (*shown, "compute_dtype") if key in run}, **decoding}
        table |= {key: run[key] for key in ("drafttrain", "commit") if run.get(key)}
        table |= {**run.get("versions", {}), "command": " ".join(redact(run.get("command", [])))}
        tables.append({key: str(value) for key, value in table.items() if str(value)})
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [(key, [table.get(key, DASH) for table in tables]) for key in keys]
    return [(key.replace("_", " "), values, len(set(values)) > 1) for key, values in rows]
