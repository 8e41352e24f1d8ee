from __future__ import annotations

import json
import random

import pytest

from drafttrain.data.row_file import RowFile, line_starts
from drafttrain.errors import UserError
from drafttrain.files import read_jsonl


def test_rows_are_those_of_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"n": i, "text": "é\u2028" * i}, ensure_ascii=False) for i in range(20)]
    path.write_text("\ufeff" + "\n\n  \n".join(lines), encoding="utf-8")
    rows = RowFile(path, lambda row, where: (row["n"], where), line_starts(path))
    assert list(rows) == [(row["n"], f"{path} line {number}") for number, row in read_jsonl(path)]
    assert [n for n, _ in rows[::-7]] == [19, 12, 5] and rows[-1] == rows[19] and len(rows) == 20
    assert [n for n, _ in rows.chosen([3, 1])] == [3, 1]
    order = list(range(20))
    random.Random(4).shuffle(order)
    assert [n for n, _ in rows.shuffled(4)] == order, "the order that a list of the rows would get"
    with pytest.raises(IndexError):
        rows[20]


def test_a_row_that_changed_is_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    rows = RowFile(path, lambda row, where: row, line_starts(path))
    with path.open("r+") as file:
        file.write("[[[[")
    with pytest.raises(UserError, match=r"rows.jsonl line 1: not JSON"):
        list(rows)
    with pytest.raises(UserError, match="cannot be read"):
        list(line_starts(tmp_path / "none.jsonl"))
