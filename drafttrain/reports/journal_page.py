"""The part of a report's page about a journal of `drafttrain adapt --watch`."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean

from typing_extensions import NotRequired, TypedDict

from drafttrain.evaluation.results_schema import Amount
from drafttrain.files import Json, check_json, read_jsonl
from drafttrain.reports.charts import Chart, Series

_FIX = "give a journal.jsonl that drafttrain adapt --watch wrote"
_POINTS = 24  # of the chart


class Decision(TypedDict):
    """What the page needs of a line; all other figures of a line are shown as they are."""

    time: Amount  # seconds since 1970
    event: str
    version: NotRequired[str]
    served_accepted_length: NotRequired[Amount]


def read_journal(name: str) -> list[Json]:
    """The lines of a journal, which may be growing. Raises UserError: no such file, or damaged."""
    path = Path(name).expanduser()
    rows = []
    for number, row in read_jsonl(path, True, _FIX):
        check_json(row, f"{path} line {number}", _FIX, Decision)
        rows.append(row)
    return rows


def journal_chart(journal: list[Json], number: int) -> Chart:
    """Served accepted length over time, with a mark where another version serves.

    Args:
        number: of the journal on the page, from 1.
    """
    served = [row for row in journal if row["event"] == "served"]
    # Each point is the mean of as many lines; the last one may have fewer.
    together = len(served) // _POINTS + 1
    labels = []
    values = []
    marks = []
    version = ""
    for place, first in enumerate(range(0, len(served), together)):
        part = served[first : first + together]
        labels.append(clock(part[0]["time"], "%d. %H:%M"))
        values.append(fmean(row["served_accepted_length"] for row in part))
        if part[-1]["version"] != version:
            version = part[-1]["version"]
            marks.append((place, version))
    return Chart(
        f"served_{number}",
        "Served accepted length over time",
        "Tokens per target pass of all requests. A dashed line is the first point of a version.",
        "lines",
        labels,
        [Series("served", values)],
        "day and time (UTC)",
        "tokens per target pass",
        marks=marks,
    )


def clock(seconds: float, form: str) -> str:
    """A time in UTC."""
    return time.strftime(form, time.gmtime(seconds))
