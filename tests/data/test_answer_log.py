"""Logs of answers: their forms, exact tokens, rotation, and lines that cannot be used."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from drafttrain.data.answer_log import AnswerLog, LogReader, read_answer
from drafttrain.data.chat import prompt_ids
from drafttrain.errors import UserError
from drafttrain.inference.sequence import Generation, Stats
from drafttrain.target import load_shell
from tests.data.seeing import PLACEHOLDER, answer, shown, user
from tests.files import FIXTURES, load_jsonl

TARGET = str(FIXTURES / "target")
ASKED = [{"role": "user", "content": "hi there"}]
SAID = {"role": "assistant", "content": "hello to you"}


@pytest.fixture(scope="module")
def shell():
    return load_shell(TARGET)


def read(
    row: object,
    shell,
    kwargs=None,
    most=200,
):
    return read_answer(json.dumps(row).encode(), Path("log"), shell, kwargs or {}, most)


def test_every_form_gives_the_tokens_that_the_target_saw(shell):
    tokenizer = shell.tokenizer
    prompt = prompt_ids(tokenizer, ASKED)
    chat = read({"messages": [*ASKED, SAID], "accepted_length": 2.5}, shell)
    assert chat.tokens[: chat.start] == prompt and chat.accepted == 2.5
    assert tokenizer.decode(chat.tokens[chat.start :]).startswith("hello to you")
    reply = {"choices": [{"message": SAID, "finish_reason": "stop"}], "usage": {}}
    assert read({"request": {"messages": ASKED}, "response": reply}, shell).tokens == chat.tokens
    assert (
        read(
            {
                "request": {"messages": ASKED},
                "response": {"choices": [{"message": SAID, "finish_reason": "length"}]},
            },
            shell,
        ).tokens
        == chat.tokens[:-1]
    )
    said = tokenizer.encode("hello to you", add_special_tokens=False)
    exact = {"prompt_token_ids": prompt, "choices": [{"message": SAID, "token_ids": said}]}
    found = read({"request": {"messages": ASKED}, "response": exact}, shell)
    assert found.tokens == [*prompt, *said]
    # Ids of another tokenizer mean another text.
    exact["choices"][0]["token_ids"] = [token + 1 for token in said]
    with pytest.raises(
        UserError, match="to the target's tokenizer, and the text is 'hello to you'"
    ):
        read({"request": {"messages": ASKED}, "response": exact}, shell)
    assert read({"prompt_token_ids": prompt, "token_ids": [7, 8, 9]}, shell).start == len(prompt)
    assert read({"prompt": "hi there", "response": "hello to you"}, shell).tokens == chat.tokens


def test_answers_to_images_are_not_read(seeing):
    """As exact tokens they look like text."""
    sees = load_shell(seeing.folder)
    exact = {"prompt_token_ids": [70, *[PLACEHOLDER] * 4, 71], "token_ids": [80, 81, 82]}
    with pytest.raises(UserError, match="its prompt has images, which adapt does not read"):
        read(exact, sees)
    exact["prompt_token_ids"] = [70, 71]
    exact["token_ids"][1] = PLACEHOLDER  # sampled by chance
    assert read(exact, sees).start == 2
    chat = {"messages": [user(shown("a.png"), "what?"), answer("red")]}
    with pytest.raises(UserError, match="images in these conversations are not read"):
        read(chat, sees)


def test_only_the_last_answer_counts(shell):
    later = [
        *ASKED,
        SAID,
        {"role": "user", "content": "and now"},
        {"role": "assistant", "content": "good bye"},
    ]
    found = read({"messages": later}, shell)
    assert found.tokens[: found.start] == prompt_ids(shell.tokenizer, later[:3])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "list instead of a JSON object"),
        ({"messages": ASKED}, "no message of role assistant"),
        ({"messages": "hi"}, "messages='hi'"),
        ({"request": {"messages": ASKED}, "response": {"choices": []}}, "choices"),
        (
            {"request": {"messages": ASKED}, "response": {"choices": [{"message": "x"}]}},
            "message='x'",
        ),
        (
            {"request": {"messages": ASKED}, "response": {"error": "busy"}},
            "no conversation with an answer|no message of role",
        ),
        ({"prompt_token_ids": [1], "token_ids": [2, 10**6]}, "token 1000000 is outside"),
        ({"prompt_token_ids": [1], "token_ids": [-2, 3]}, "token_ids"),
        ({"prompt_token_ids": [1], "token_ids": [2]}, "no two tokens|less than two tokens"),
        ({"prompt_token_ids": [1] * 300, "token_ids": [2, 3]}, "raise --max-length"),
        ({"messages": [*ASKED, SAID], "accepted_length": "much"}, "accepted_length='much'"),
        ({"level": "info"}, "no conversation"),
    ],
)
def test_other_lines_are_one_line_errors(
    row,
    message,
    shell,
):
    with pytest.raises(UserError, match=message) as error:
        read(row, shell)
    assert "\n" not in str(error.value)


def lines(reader: LogReader, most: int = 100) -> list[str]:
    return [line.decode().strip() for _, _, line in reader.read(most)[0]]


def test_a_growing_log_is_read_once_and_whole_lines_only(tmp_path):
    log = tmp_path / "a[1].jsonl"
    log.write_text("one\ntw")
    reader = LogReader(log)
    assert lines(reader) == ["one"] and lines(reader) == []
    with log.open("a") as file:
        file.write("o\n\nthree\n")
    again = LogReader(log, json.loads(json.dumps(reader.places)))  # as a later process
    assert lines(again) == ["two", "three"] and lines(again) == []


@pytest.mark.parametrize("how", ["renamed", "copied and truncated"])
@pytest.mark.parametrize("system", ["", 5000 * "s"])
def test_rotation_loses_and_repeats_nothing(tmp_path, how, system):
    """Also where every line begins with the same long prompt."""
    log = tmp_path / "a.jsonl"
    old = tmp_path / "a.jsonl.1"
    log.write_text(f"{system}one\n{system}two\n")
    reader = LogReader(log)
    assert len(lines(reader)) == 2
    with log.open("a") as file:
        file.write(f"{system}three\n")
    if how == "renamed":
        os.rename(log, old)
    else:
        old.write_bytes(log.read_bytes())
    log.write_text(f"{system}four\n")
    (tmp_path / "a.jsonl.2.gz").write_bytes(b"packed\n")
    assert sorted(lines(reader)) == [f"{system}four", f"{system}three"] and lines(reader) == []


def test_a_folder_of_many_logs_is_read_once(tmp_path):
    for number in range(120):
        (tmp_path / f"{number}.jsonl").write_text(f"{number}\n" * (1 + number % 3))
    reader = LogReader(tmp_path)
    assert len(lines(reader, 1000)) == 240
    with (tmp_path / "7.jsonl").open("a") as file:
        file.write("more\n")
    again = LogReader(tmp_path, reader.places)
    assert lines(again) == ["more"] and lines(again) == []


def test_a_log_that_is_renamed_meanwhile_is_read_by_the_next_call(tmp_path, monkeypatch):
    log = tmp_path / "a.jsonl"
    log.write_text("one\n")
    reader = LogReader(tmp_path)
    monkeypatch.setattr(reader, "_files", lambda: [log, tmp_path / "b.jsonl"])
    assert lines(reader) == ["one"] and lines(reader) == []


def test_a_folder_of_logs_and_the_newest_lines_of_a_long_one(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f"{i}\n" for i in range(10)))
    (tmp_path / "note.txt").write_text("x\n")
    reader = LogReader(tmp_path)
    found, passed_over = reader.read(3)
    assert [line for _, _, line in found] == [b"7\n", b"8\n", b"9\n"] and passed_over == 7
    assert found[0][0] == "a.jsonl byte 14"
    with pytest.raises(UserError, match="cannot be read"):
        LogReader(Path("/proc/self/mem")).read(1)


def test_a_servers_log_is_private_exact_and_rotates(tmp_path, shell):
    path = tmp_path / "log.jsonl"
    log = AnswerLog(path, most_bytes=150)
    for first in range(3):
        log.add(
            [first, 2, 3], Generation([4, 5, 6], Stats(new_tokens=3, target_passes=1, finish="eos"))
        )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = sorted(tmp_path.glob("log.jsonl*"))
    assert [file.name for file in found] == ["log.jsonl", "log.jsonl.1"]
    row = json.loads(path.read_text().splitlines()[-1])
    assert (
        row["prompt_token_ids"] == [2, 2, 3]
        and row["finish_reason"] == "stop"
        and row["accepted_length"] == 2.0
    )
    assert read(row, shell).tokens == [2, 2, 3, 4, 5, 6]
    os.rename(path, tmp_path / "elsewhere")  # by logrotate
    log.add([9], Generation([4, 5], Stats()))
    assert json.loads(path.read_text())["prompt_token_ids"] == [9]
    log.close()


def test_a_line_without_an_end_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("drafttrain.data.answer_log.LONGEST", 50)
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n' + "x" * 120)
    reader = LogReader(path)
    assert [line for _, _, line in reader.read(10)[0]] == [b'{"a": 1}\n']
    with path.open("a") as file:
        file.write('y\n{"b": 2}\n')
    found = [line for _, _, line in LogReader(path, reader.places).read(10)[0]]
    assert found == [b"x" * 20 + b"y\n", b'{"b": 2}\n']


@pytest.mark.parametrize("shared", ["by threads", "by processes"])
def test_who_shares_a_log_loses_nothing_at_its_rotation(tmp_path, monkeypatch, shared):
    path = tmp_path / "log.jsonl"
    log = AnswerLog(path, most_bytes=150)
    other = log
    if shared == "by processes":
        other = AnswerLog(path, most_bytes=150)
    for _ in range(2):
        log.add([1], Generation([4, 5, 6], Stats()))
    second = threading.Thread(target=other.add, args=([2], Generation([4, 5, 6], Stats())))
    replace = os.replace

    def rotates(*names):
        monkeypatch.undo()
        second.start()
        second.join(0.2)
        replace(*names)

    monkeypatch.setattr(os, "replace", rotates)
    log.add([3], Generation([4, 5, 6], Stats()))
    second.join()
    kept = [row for file in tmp_path.iterdir() for row in load_jsonl(file)]
    assert sorted(row["prompt_token_ids"] for row in kept) == [[1], [1], [2], [3]]
