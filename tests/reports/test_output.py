"""Tables on narrow, wide and missing terminals."""

from __future__ import annotations

import pytest

from drafttrain.reports.output import table_of, wide_console
from drafttrain.reports.report import MOST_DEPTHS, print_results
from tests.files import FIXTURES, load_json

RESULTS = next((FIXTURES / "results").glob("*.json"))
HEADINGS = [
    "category",
    "prompts",
    "tokens/s",
    "autoregressive\ntokens/s",
    "hf_generate\ntokens/s",
    "vs\nautoregressive",
]


@pytest.mark.parametrize("columns", ["40", "80", "200", None])
@pytest.mark.parametrize("right", [True, False])
def test_no_column_is_lost(columns, right, monkeypatch, capsys):
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    else:
        monkeypatch.delenv("COLUMNS", raising=False)
    cells = ["translation", "13", "104.2", "55.1", "12 / 13 / 14", "1.89x"]
    table = table_of(HEADINGS, [cells, ["code", *cells[1:]]], "a title", right=right)
    table.add_section()
    table.add_row("all", *cells[1:], style="bold")
    wide_console().print(table)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= int(columns or 140)
    for word in " ".join((*HEADINGS, *cells)).split():
        assert word in shown
    assert not right or "12 / 13 / 14" in shown  # in one line
    parts = shown.count("\u2513")  # the right end of a head
    assert parts == shown.count("code") == shown.count(" all ") == shown.count("category")
    assert (parts == 1) == (columns in ("200", None)) and shown.count("a title") == 1


def test_the_table_of_eval_shows_six_depths(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    results = load_json(RESULTS)
    for figures in (results["overall"], *results["categories"].values()):
        figures["acceptance_by_depth"]["conditional"] = [0.5 + number / 100 for number in range(11)]
    print_results(results)
    shown = capsys.readouterr().out
    assert all(category in shown for category in results["categories"])
    assert (
        " ".join(f".{50 + number}" for number in range(MOST_DEPTHS)) + " ..." in shown
        and ".56" not in shown
    )
