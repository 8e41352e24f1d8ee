"""The page of a watcher's journal: what was served over time, versions, decisions, and what it refuses."""

from __future__ import annotations

import json

import pytest

from drafttrain.cli import main
from drafttrain.errors import UserError
from drafttrain.reports.journal_page import journal_chart, read_journal

ROUND = {
    "event": "round",
    "verdict": "better",
    "version": "version-0001",
    "interval": [1.02, 1.2],
}


def write(path, *rows):
    lines = [json.dumps({"time": 1.8e9 + 60 * number, **row}) for number, row in enumerate(rows)]
    path.write_text("\n".join([*lines, '{"torn']))
    return path


def served(version, length):
    return {"event": "served", "version": version, "served_accepted_length": length, "samples": 16}


def test_lengths_are_drawn_over_time_with_their_versions(tmp_path):
    before = [served("drafter", 1.5)] * 30
    after = [served("version-0001", 1.9)] * 18
    path = write(tmp_path / "journal.jsonl", {"event": "start"}, *before, ROUND, *after)
    chart = journal_chart(read_journal(str(path)), 1)
    (series,) = chart.series
    assert series.values == pytest.approx([1.5] * 10 + [1.9] * 6)  # three lines a point
    assert chart.marks == [(0, "drafter"), (10, "version-0001")]
    assert chart.labels[:2] == ["15. 08:01", "15. 08:04"]


@pytest.mark.thorough
def test_the_page_has_the_chart_and_the_decisions(tmp_path, capsys):
    rows = [{"event": "start"}, served("drafter", 1.5), ROUND, served("version-0001", 1.9)]
    rows.append({"event": "refused", "version": "version-0002", "reason": "<b>other</b> shape"})
    path = write(tmp_path / "journal.jsonl", *rows)
    page = tmp_path / "page.html"
    assert main(["report", str(path), "--output", str(page)]) == 0
    text = page.read_text()
    assert "Served accepted length over time" in text and ">version-0001<" in text
    assert "verdict better, interval [1.02, 1.2]" in text
    assert "reason &lt;b&gt;other&lt;/b&gt; shape" in text
    assert (tmp_path / "page_charts" / "served_1.png").is_file()
    # Without samples there is no chart.
    write(path, {"event": "start"}, *[ROUND] * 70)
    assert main(["report", str(path), "--output", str(page)]) == 0
    text = page.read_text()
    assert "over time" not in text and "11 earlier ones" in text and text.count("better") == 60
    assert main(["report", str(path), "--output", str(tmp_path / "page.png")]) == 2
    assert "a journal is shown on a page" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"time": -1, "event": "start"}', "line 1: time=-1"),
        ('{"time": 1}', "line 1: event: field required"),
        ("nothing", "line 1: not JSON"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, line, message):
    (tmp_path / "journal.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=message):
        read_journal(str(tmp_path / "journal.jsonl"))
