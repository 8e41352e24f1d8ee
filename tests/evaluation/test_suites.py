from __future__ import annotations

import pytest

from drafttrain.data.chat import ChatInputs
from drafttrain.errors import UserError
from drafttrain.evaluation import suites
from drafttrain.evaluation.suites import Question, load_suite, take_evenly
from drafttrain.files import write_jsonl
from tests.data.templates.families import FAMILIES


def write(path, rows):
    write_jsonl(path, rows)
    return str(path)


def test_fastchat_rows_by_path(tmp_path):
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["x"]},
        {"turns": ["c"]},
    ]
    suite = load_suite(write(tmp_path / "mine.jsonl", rows))
    assert suite.questions == (Question("81", "writing", ("a", "b")), Question("1", "all", ("c",)))


def test_suites_by_name(tmp_path, monkeypatch):
    write(tmp_path / "chat.jsonl", [{"turns": ["hello"]}])
    monkeypatch.setattr(suites, "suites_folder", lambda: tmp_path)
    assert load_suite("chat").questions[0].turns == ("hello",)
    with pytest.raises(
        UserError, match=r"suite='nope' is neither a file nor a known suite \(chat, spec_bench, "
    ):
        load_suite("nope")


def test_the_digest_follows_the_content(tmp_path):
    digests = {
        load_suite(write(tmp_path / "a.jsonl", [{"turns": [text]}])).digest for text in ("x", "y")
    }
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no questions"),
        ("{broken", "line 1: not JSON"),
        (
            '{"turns": ["a"]}\n{"turns": []}',
            "line 2: turns=\\[\\]: list should have at least 1 item",
        ),
        ('{"text": "a"}', "line 1: turns: field required; correct or delete"),
        ('{"turns": ["a", ""]}', "line 1: turns.1='': string should match"),
        ('{"turns": ["a"], "tools": {}}', "line 1: tools=\\{\\}: input should be a valid array"),
        ('{"turns": ["a"], "tools": [{"name": "f"}]}', "line 1: tools.0.type: field required"),
        (
            '{"turns": ["a"], "opening": [{"role": "tool", "content": "x"}]}',
            "line 1: opening.0.role='tool': input should be",
        ),
        (
            '{"turns": ["a"], "chat_template_kwargs": 1}',
            "line 1: chat_template_kwargs=1: input should be an object",
        ),
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


def test_turns_follow_answers_through_the_chat_template(tokenizer):
    ids = Question("q", "all", ("one", "two", "three")).prompt(tokenizer, ["1"])
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )


def test_base_models_get_plain_text(tokenizer):
    tokenizer.chat_template = None
    assert (
        tokenizer.decode(Question("q", "all", ("one", "two")).prompt(tokenizer, ["1"]))
        == "one\n\n1\n\ntwo"
    )


ROW = {
    "turns": ["one", "two"],
    "opening": [{"role": "system", "content": "Be kind."}],
    "tools": [
        {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {}}}
    ],
    "chat_template_kwargs": {"enable_thinking": False},
}


def test_tools_and_template_variables_reach_the_prompt(tmp_path):
    tokenizer = next(family for family in FAMILIES if family.name == "Qwen3").tokenizer
    path = write(tmp_path / "a.jsonl", [ROW, {"turns": ["one"]}])
    with_tools, plain = load_suite(path).questions
    messages = [
        *ROW["opening"],
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
    ]
    messages.append({"role": "user", "content": "two"})
    expected = tokenizer.apply_chat_template(
        messages,
        tools=ROW["tools"],
        enable_thinking=False,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert with_tools.prompt(tokenizer, ["1"]) == expected
    assert "look_up" in tokenizer.decode(expected) and tokenizer.decode(expected).endswith(
        "</think>\n\n"
    )
    request = {key: ROW[key] for key in ("tools", "chat_template_kwargs")}
    assert with_tools.request() == {"messages": messages[:2], **request}
    assert plain.request() == {"messages": messages[1:2]}
    assert not tokenizer.decode(plain.prompt(tokenizer)).endswith("</think>\n\n")


def test_defaults_apply_where_a_row_says_nothing(tmp_path):
    path = write(tmp_path / "a.jsonl", [ROW, {"turns": ["one"]}])
    own, plain = (load_suite(path, given) for given in ({"enable_thinking": True}, None))
    assert [question.inputs.kwargs["enable_thinking"] for question in own.questions] == [
        False,
        True,
    ]
    assert plain.questions[1].inputs == ChatInputs() and own.digest != plain.digest


def test_a_template_that_ignores_tools_is_refused(tmp_path, tokenizer):
    question = load_suite(
        write(tmp_path / "a.jsonl", [{**ROW, "chat_template_kwargs": {}}])
    ).questions[0]
    with pytest.raises(UserError, match="chat template does not read `tools`"):
        question.prompt(tokenizer)


def test_the_suite_of_tools_that_comes_with_drafttrain():
    suite = load_suite("tools")
    assert {question.category for question in suite.questions} == {
        "single", "choice", "parallel", "multi_turn", "irrelevance"
    }  # fmt: skip
    readers = [family for family in FAMILIES if family.calls != 0 and family.tools_key == "tools"]
    for question in {question.category: question for question in suite.questions}.values():
        names = [tool["function"]["name"] for tool in question.inputs.tools]
        assert names
        for family in readers:
            text = family.tokenizer.decode(question.prompt(family.tokenizer))
            assert all(name in text for name in names) and question.turns[0] in text, family.name
