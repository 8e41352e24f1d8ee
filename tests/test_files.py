from __future__ import annotations

import os
import re
from typing import Annotated

import pytest
from huggingface_hub import constants
from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from drafttrain import files
from drafttrain.errors import UserError
from drafttrain.files import (
    JsonlLog,
    _object,
    complete_bytes,
    first_change,
    open_tensors,
    read_json,
    read_jsonl,
    replacing,
    write_json,
    write_jsonl,
)
from drafttrain.progress import Progress, counted
from tests.files import load_json


def test_json_lines_round_trip_and_incomplete_lines(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    write_jsonl(path, [{"a": "é"}, {"a": 2}])
    assert list(read_jsonl(path)) == [(1, {"a": "é"}), (2, {"a": 2})]
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"\n" + '{"a": "é'.encode()[:-1])  # cut inside a character
    assert complete_bytes(path) == whole + 1
    assert [number for number, _ in read_jsonl(path, growing=True)] == [1, 2]
    with pytest.raises(UserError, match="not UTF-8 text"):
        list(read_jsonl(path))
    path.write_text('{"a": 1}\n[2]\n')
    with pytest.raises(
        UserError, match=r"rows.jsonl line 2: list instead of a JSON object per line"
    ):
        list(read_jsonl(path))
    path.write_text('\n{"a"\n')
    with pytest.raises(UserError, match=r"rows.jsonl line 2: not JSON .*; delete it"):
        list(read_jsonl(path, fix="delete it"))


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})

    def interrupted():
        with replacing(path) as part:
            part.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert load_json(path) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_json(tmp_path / "file" / "result.json", {})


def test_a_log_continues_after_a_kill(tmp_path):
    path = tmp_path / "log"
    log = JsonlLog(path, {"seed": 1})
    log.add({"n": 0})
    log.close()
    path.write_bytes(path.read_bytes() + b'{"n": 1')
    log = JsonlLog(path, {"seed": 1})
    log.add({"n": 2})
    log.close()
    assert log.rows == [{"n": 0}, {"n": 2}]
    assert [row for _, row in read_jsonl(path)] == [{"seed": 1}, {"n": 0}, {"n": 2}]
    with pytest.raises(
        UserError, match="log was begun with seed=1; use those, or give --overwrite"
    ):
        JsonlLog(path, {"seed": 2})


def test_first_change_names_both_values():
    assert first_change({"a": 1, "b": 2}, {"a": 1, "b": 2}) == ""
    assert first_change({"a": 1, "b": 2}, {"a": 1, "c": 3}) == "c=None, this run has c=3"


def test_time_left_follows_the_budget_that_ends_first(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("drafttrain.progress.time.monotonic", lambda: now[0])
    with Progress("work", 100, "rows") as progress:
        now[0] += 20
        progress.advance(10)
        progress.advance(0, "tokens", share=0.5)
        progress.printed -= 99
        progress.advance(0, "tokens", share=0.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "work: 10 of 100 rows, 0.5/s, 3:00 left"
    assert lines[1] == "work: 10 of 100 rows, 0.5/s, 0:20 left, tokens"
    assert len(lines) == 2  # the end repeats no line
    assert (counted(1, "conversations"), counted(2, "rows")) == ("1 conversation", "2 rows")


class Recipe(TypedDict):
    steps: Annotated[int, Field(ge=1)]
    nested: NotRequired[dict[str, float]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"steps": 0}', "steps=0: input should be greater than or equal to 1; write it again"),
        (b'{"steps": 1, "nested": {"a": "x"}}', "nested.a='x': input should be a valid number"),
        (b"{}", "steps: field required"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        ('{"steps": 1}'.encode("utf-16"), "is not UTF-8 text"),
    ],
)
def test_a_json_file_is_checked_against_its_schema(tmp_path, content, said):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(said)):
        read_json(path, "recipe", "write it again", Recipe)


class CountedKey(str):
    """A key that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedKey.compared += 1
        return str.__eq__(self, other)


def test_a_repeated_key_is_found_in_one_pass():
    pairs = [(CountedKey(f"key {number}"), 1) for number in range(1000)]
    with pytest.raises(ValueError, match="the key 'key 999' occurs twice"):
        _object([*pairs, (CountedKey("key 999"), 2)])
    assert CountedKey.compared < 5000


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, capsys):
    """Its clients try again for up to a minute; what they are asked then comes from their cache."""
    asked = []

    def unreachable(url: str, seconds: float) -> str:
        asked.append(url)
        return "no answer"

    monkeypatch.setattr(files, "unreachable", unreachable)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    files._ask_hub.cache_clear()
    expected = (
        r"drafter='nobody/nothing': no such folder, and the Hub does not provide it .*: no answer"
    )
    with pytest.raises(UserError, match=expected):
        files.hub_snapshot("nobody/nothing", ["*.json"], "drafter")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        files.hub_snapshot("nobody/else", ["*.json"], "drafter")
    assert asked == [constants.ENDPOINT] and os.environ["HF_HUB_OFFLINE"] == "1"
    assert capsys.readouterr().err.startswith(f"note: {constants.ENDPOINT} does not answer")
    files._ask_hub.cache_clear()


@pytest.mark.parametrize("read", [read_json, open_tensors])
@pytest.mark.parametrize("special", ["pipe", "/dev/zero"])
def test_pipes_and_devices_are_refused(tmp_path, special, read):
    path = tmp_path / "special"
    if special == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(special)
    with pytest.raises(UserError, match=r"drafter='.*' cannot be read \(not a plain file\); fix"):
        read(path, "drafter", "fix it")


def test_a_json_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "r.json").write_bytes(b'\xef\xbb\xbf{"steps": 2, "more": 1}')
    assert read_json(tmp_path / "r.json", "recipe", "write it again", Recipe) == {
        "steps": 2,
        "more": 1,
    }
