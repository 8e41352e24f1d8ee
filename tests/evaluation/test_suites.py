from __future__ import annotations

import json

import pytest

from drafttrain.errors import UserError
from drafttrain.evaluation import suites
from drafttrain.evaluation.suites import Question, load_suite, render, take_evenly


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_fastchat_rows_by_path(tmp_path):
    rows = [{"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["x"]}, {"turns": ["c"]}]
    suite = load_suite(write(tmp_path / "mine.jsonl", rows))
    assert suite.questions == (Question("81", "writing", ("a", "b")), Question("1", "all", ("c",)))


def test_suites_by_name(tmp_path, monkeypatch):
    write(tmp_path / "chat.jsonl", [{"turns": ["hello"]}])
    monkeypatch.setattr(suites, "suites_folder", lambda: tmp_path)
    assert load_suite("chat").questions[0].turns == ("hello",)
    with pytest.raises(UserError, match=r"suite='nope' is neither a file nor a known suite \(chat, spec_bench, "):
        load_suite("nope")


def test_the_digest_follows_the_content(tmp_path):
    digests = {load_suite(write(tmp_path / "a.jsonl", [{"turns": [text]}])).digest for text in ("x", "y")}
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no questions"),
        ("{broken", "line 1: not JSON"),
        ('{"turns": ["a"]}\n{"turns": []}', "line 2: turns=\\[\\]: list should have at least 1 item"),
        ('{"text": "a"}', "line 1: turns: field required; correct or delete"),
        ('{"turns": ["a", ""]}', "line 1: turns.1='': string should match"),
        ("[1]", "line 1: the content=.*should be an object"),
    ],
)
def test_bad_files_are_named(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_suite(str(path))


def test_a_limit_takes_categories_in_turn():
    questions = [Question(str(i), category, ("t",)) for i, category in enumerate("aaaabbc")]
    assert [q.question_id for q in take_evenly(questions, 4)] == ["0", "1", "4", "6"]
    assert [q.category for q in take_evenly(questions, 3)] == ["a", "b", "c"]
    assert take_evenly(questions, None) == questions == take_evenly(questions, 99)
    with pytest.raises(UserError, match="limit=0 must be at least 1"):
        take_evenly(questions, 0)


def test_turns_follow_answers_through_the_chat_template(tokenizer):
    ids = render(tokenizer, ["one", "two"], ["1"])
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )


def test_base_models_get_plain_text(tokenizer):
    tokenizer.chat_template = None
    assert tokenizer.decode(render(tokenizer, ["one", "two"], ["1"])) == "one\n\n1\n\ntwo"
