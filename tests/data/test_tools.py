"""Conversations with tools, reasoning and template variables: rows, formats, splits, provenance."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import Dataset

from drafttrain import cli, generate
from drafttrain.data.answers import answer_format, rendered_answer
from drafttrain.data.chat import ChatInputs, TemplateRefuses, render_text, text_ids
from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.data.generate import read_prompts
from drafttrain.data.loader import without_reasoning
from drafttrain.data.row_formats import parse_row
from drafttrain.data.store import FeatureStore, Store, load_records, read_meta
from drafttrain.errors import UserError
from drafttrain.evaluation.diagnose import other_template_kwargs
from drafttrain.files import write_jsonl
from drafttrain.target import Target
from tests.conftest import make_tokenizer
from tests.data.records import conversation_record
from tests.data.tool_templates import TEMPLATE, tokenizer_with
from tests.files import dump_json

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "Get Weather", "parameters": SCHEMA}}
CALL = {"type": "function", "function": {"name": "Get Weather", "arguments": {"city": "Rome"}}}
ASKED = {"role": "user", "content": "Rome?"}
SUNNY = {"role": "tool", "content": '{"sky": "sun"}'}


@pytest.mark.parametrize(
    "row",
    [
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "a",
                            "type": "function",
                            "function": {"name": "Get Weather", "arguments": '{"city": "Rome"}'},
                        }
                    ],
                },
                {**SUNNY, "tool_call_id": "a"},
            ],
            "tools": json.dumps([TOOL]),
        },
        {
            "conversations": [
                {"from": "human", "value": "Rome?"},
                {
                    "from": "function_call",
                    "value": '{"name": "Get Weather", "arguments": {"city": "Rome"}}',
                },
                {"from": "observation", "value": '{"sky": "sun"}'},
            ],
            "tools": json.dumps([TOOL["function"]]),
        },
        {  # xLAM: no results
            "query": "Rome?",
            "answers": '[{"name": "Get Weather", "arguments": {"city": "Rome"}}]',
            "tools": '[{"name": "Get Weather", "parameters": {"city": {"type": "str"}}}]',
        },
        {  # ToolACE
            "system": "You may call a function of this list:\n"
            + json.dumps([TOOL["function"]])
            + "\nAnswer [f(x=1)].",
            "conversations": [
                {"from": "user", "value": "Rome?"},
                {"from": "assistant", "value": '[Get Weather(city="Rome")]'},
                {"from": "tool", "value": '{"sky": "sun"}'},
            ],
        },
        {  # Hermes
            "conversations": [
                {
                    "from": "system",
                    "value": f"Functions: <tools>{json.dumps([TOOL])}</tools> Call them.",
                },
                {"from": "human", "value": "Rome?"},
                {
                    "from": "gpt",
                    "value": "<tool_call>\n{'arguments': {'city': 'Rome'}, 'name': 'Get Weather'}\n"
                    "</tool_call>",
                },
                {"from": "tool", "value": '<tool_response>\n{"sky": "sun"}\n</tool_response>'},
            ],
        },
    ],
)
def test_published_shapes_become_one_form(row):
    prompt = parse_row(row)
    assert prompt["tools"] == [TOOL]
    first, called, *results = prompt["messages"]
    assert first == ASKED and called["content"] == ""
    assert [{key: call[key] for key in CALL} for call in called["tool_calls"]] == [CALL]
    assert [{key: it[key] for key in SUNNY} for it in results] == [SUNNY] * len(results)
    assert results or "query" in row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tools": "many"}, "line 1: tools='many': input should be a valid list"),
        (
            {"tools": [{"function": {"name": ""}}]},
            "line 1: tools.0.function.name='': string should have at least 1",
        ),
        (
            {"chat_template_kwargs": [1]},
            "line 1: chat_template_kwargs=[1]: input should be a valid dictionary",
        ),
        (
            {
                "messages": [
                    ASKED,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
                ]
            },
            "arguments: field",
        ),
        (
            {
                "messages": [
                    ASKED,
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}],
                    },
                ]
            },
            "line 1: the arguments of a tool call are no JSON object",
        ),
    ],
)
def test_bad_rows_are_one_line(tmp_path, change, message):
    path = tmp_path / "p.jsonl"
    dump_json(path, {"id": "a", "messages": [ASKED], **change})
    with pytest.raises(UserError) as error:
        read_prompts(path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_a_template_would_ignore_is_refused():
    tokenizer = tokenizer_with(TEMPLATE)
    with pytest.raises(
        TemplateRefuses,
        match="'enable_thinking' is not a variable of the chat template; it has thinking",
    ):
        render_text(tokenizer, [ASKED], inputs=ChatInputs(kwargs={"enable_thinking": False}))
    assert render_text(tokenizer, [ASKED], True, ChatInputs(kwargs={"thinking": False})).endswith(
        "<t></t>"
    )
    plain = make_tokenizer()
    with pytest.raises(TemplateRefuses, match="does not read `tools`"):
        render_text(plain, [ASKED], inputs=ChatInputs([TOOL]))
    with pytest.raises(TemplateRefuses, match="writes no tool calls"):
        render_text(plain, [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}])


@pytest.mark.parametrize("written", ["call.function.arguments | tojson", "call.function.arguments"])
def test_arguments_come_as_the_template_reads_them(written):
    tokenizer = tokenizer_with(
        TEMPLATE.replace("call.function | tojson", f"call.function.name + ' ' + {written}")
    )
    said = render_text(
        tokenizer, [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    )
    assert '<call>Get Weather {"city": "Rome"}<|im_end|>' in said


def test_the_python_api_passes_tools_and_variables(target):
    target.tokenizer.chat_template = TEMPLATE
    options = {"tools": [TOOL], "chat_template_kwargs": {"thinking": False}, "max_new_tokens": 1}
    plain = generate(target, [ASKED], max_new_tokens=1)
    more = generate(target, [ASKED], **options)
    whole = render_text(target.tokenizer, [ASKED], True, ChatInputs([TOOL], {"thinking": False}))
    assert (
        more.stats.prompt_tokens
        == len(text_ids(target.tokenizer, whole))
        > plain.stats.prompt_tokens
    )
    with pytest.raises(UserError, match="tools and chat_template_kwargs need a chat as prompt"):
        generate(target, "text", **options)
    with pytest.raises(UserError, match=r"prompt: tools\.0\.function: field required"):
        generate(target, [ASKED], tools=[{}])


def test_the_format_of_answers_is_derived():
    tokenizer = tokenizer_with(TEMPLATE)
    form = answer_format(tokenizer, ChatInputs())
    assert (form.opening, form.between, form.lead, form.follow) == (
        "<t>",
        "</t>",
        '<call>{"name":"',
        '"',
    )
    ids = text_ids(tokenizer, "<t>so</t>yes")
    assert form.reasoning_tokens(tokenizer, ids) == ids.index(form.closing) + 1
    assert form.reasoning_tokens(tokenizer, ids[:2]) == 2, "cut within the reasoning"
    assert form.reasoning_tokens(tokenizer, text_ids(tokenizer, "yes </t>")) == 0
    assert answer_format(tokenizer, ChatInputs(kwargs={"thinking": False})).opening is None
    opened = tokenizer_with(
        TEMPLATE.replace("'<t></t>' if thinking is false else ''", "'<t>'").replace(
            "m.reasoning_content", "0"
        )
    )
    form = answer_format(opened, ChatInputs())  # the prompt opens what no history keeps
    assert form.opening == "" and form.reasoning_tokens(opened, text_ids(opened, "so</t>yes")) == 3
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "so"}
    assert rendered_answer(opened, [ASKED], answer, ChatInputs()) == (
        "so\n</t>\n\nyes<|im_end|>",
        "<|im_end|>",
    )


def conversation(target: Target, *recorded: dict) -> tuple[Conversation, ChatRenderer]:
    row = {"id": "a", "messages": [ASKED, *recorded], "tools": [TOOL]}
    it = Conversation.from_row(row, "row")
    renderer = ChatRenderer(target)
    it.open(renderer)
    return it, renderer


@pytest.mark.parametrize("called", ["Get Weather", "get time", ""])
def test_a_recorded_result_follows_the_recorded_calls_only(target, called):
    target.tokenizer = tokenizer_with(TEMPLATE)
    it, renderer = conversation(
        target, {"role": "assistant", "content": "", "tool_calls": [CALL]}, SUNNY
    )
    said = (
        f'<t>hm</t><call>{{"name": "{called}", "arguments": {{"city": "Oslo"}}}}'
        if called
        else "Sunny."
    )
    it.accept([*text_ids(target.tokenizer, said), renderer.closing_id], "stop")
    glue = it.next_turn(renderer, 2000)
    if called == "Get Weather":  # with other arguments: they may differ
        assert (
            target.tokenizer.decode(glue)
            == f"\n<|im_start|>tool\n{SUNNY['content']}<|im_end|>\n<|im_start|>assistant\n"
        )
    else:
        assert glue is None and it.ended == "other_tool_calls" and it.rest(renderer, 2000) is None


def test_a_row_ends_where_the_template_rewrites_it(target):
    target.tokenizer = tokenizer = tokenizer_with(TEMPLATE)
    row = {
        "id": "a",
        "messages": [
            ASKED,
            {"role": "assistant", "content": "-"},
            {"role": "user", "content": "Why?"},
        ],
    }
    it = Conversation.from_row(row, "row")
    renderer = ChatRenderer(target)
    it.open(renderer)
    it.accept([*text_ids(tokenizer, "<t>hm</t>Sun."), renderer.closing_id], "stop")
    assert it.next_turn(renderer, 2000) is None
    assert it.rest(renderer, 30) is None and not it.follows, "no room for another row"
    it.next_turn(renderer, 2000)
    rest = it.rest(renderer, 2000)
    rest.accept([*text_ids(tokenizer, "No reason."), renderer.closing_id], "stop")
    assert rest.next_turn(renderer, 2000) is None and rest.rest(renderer, 2000) is None
    first = it.record(renderer)
    last = rest.record(renderer)
    assert (first["id"], first["part"], first["reasoning"]) == (
        "a/0",
        0,
        [len(text_ids(tokenizer, "<t>hm</t>"))],
    )
    assert last["id"] == "a" and "part" not in last and last["reasoning"] == [0]
    assert "assistant\nSun.<|im_end|>" in tokenizer.decode(last["tokens"][: last["spans"][0][0]])


@pytest.mark.thorough
@pytest.mark.parametrize("budget", [[], ["--max-tokens", "1"]])
def test_rows_of_the_local_engine_are_as_served(target_dir, tmp_path, capsys, budget):
    """A template that shortens earlier answers: each turn is a row with the states of its own prompt."""
    target = Target.load(str(target_dir))
    with torch.no_grad():  # turns end soon
        target.model.lm_head.weight[257] = target.model.lm_head.weight.mean(0)
        target.model.lm_head.weight.mul_(0.3)
    target.model.save_pretrained(target_dir)
    template = target.tokenizer.chat_template.replace(
        "message['content']", "(message['content'] if loop.last else '-')"
    )
    (target_dir / "chat_template.jinja").write_text(template)
    rows = [[f"say {i}", "more", "again"] for i in range(3)]
    path = tmp_path / "p.jsonl"
    write_jsonl(
        path,
        [
            {
                "id": f"c{i}",
                "messages": [
                    message
                    for user in row
                    for message in (
                        {"role": "user", "content": user},
                        {"role": "assistant", "content": "x"},
                    )
                ],
            }
            for i, row in enumerate(rows)
        ],
    )
    args = [
        "generate",
        "--target",
        str(target_dir),
        "--prompts",
        str(path),
        "--output",
        str(tmp_path / "out"),
        "--dtype",
        "float32",
        "--max-new-tokens",
        "40",
        "--slots",
        "2",
        "--temperature",
        "1.5",
        "--features",
        "1",
    ]
    assert cli.main([*args, *budget]) == 0
    stored = {row["id"]: row for row in load_records(tmp_path / "out")}
    counts = read_meta(tmp_path / "out")["counts"]
    assert counts.get("rows", counts["conversations"]) == len(stored) and counts[
        "conversations"
    ] == len({key.partition("/")[0] for key in stored})
    assert all(key.partition("/")[0] in stored for key in stored), (
        "a conversation's last row has the plain id"
    )
    assert "rows" in counts or budget
    assert (
        f"{len(stored)} rows, because the chat template rewrites" in capsys.readouterr().out
    ) == (len(stored) > counts["conversations"])
    target = Target.load(str(target_dir), "float32")
    tokenizer = target.tokenizer
    held = FeatureStore.open(tmp_path / "out", (1,))
    for key, row in stored.items():
        name, _, part = key.partition("/")
        turn = (
            int(part)
            if part
            else max([-1, *(int(k.partition("/")[2]) for k in stored if k.startswith(f"{name}/"))])
            + 1
        )
        ((start, _),) = row["spans"]
        users = "".join(
            "<|im_start|>user\n-<|im_end|>\n<|im_start|>assistant\n-<|im_end|>\n"
            for _ in range(turn)
        )
        last = f"<|im_start|>user\n{rows[int(name[1:])][turn]}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(row["tokens"][:start]) == users + last
        want = target.forward(torch.tensor([row["tokens"][:-1]]), (1,)).features[0]
        torch.testing.assert_close(
            held.get(key)["features"].float(), want.float(), rtol=1e-2, atol=1e-3
        )


@pytest.mark.parametrize(
    ("answer", "known"),
    [
        ("<t>so</t>yes", False),
        ("<t>cut", False),
        (f"<t>so</t>{json.dumps(CALL['function'])}", False),
        ("yes", True),
        ("yes, <t>", True),
        (f"<call>{json.dumps(CALL['function'])}</call>", True),
    ],
)
def test_reasoning_that_a_template_keeps_as_content_is_not_counted_as_none(answer, known):
    """As SmolLM3's template, which only writes an empty block where the target shall not reason."""
    template = TEMPLATE.replace("m.reasoning_content", "0").replace("m.tool_calls or []", "[]")
    tokenizer = tokenizer_with(template + "{# a call is JSON within <call></call> #}")
    record = conversation_record(tokenizer, [ASKED, {"role": "assistant", "content": answer}], "a")
    assert record.get("reasoning") == ([0] if known else None)


def test_the_loss_leaves_out_reasoning_where_asked():
    rows = Dataset.from_list(
        [{"id": "a", "tokens": [1] * 9, "spans": [[2, 5], [6, 9]], "reasoning": [2, 0]}]
    )
    assert without_reasoning(rows, "d")["spans"] == [[[4, 5], [6, 9]]]
    with pytest.raises(
        UserError, match="loss_on='answer', but 1 of 2 rows of data='d' do not say which tokens"
    ):
        without_reasoning(Dataset.from_list([*rows, {**rows[0], "reasoning": None}]), "d")


def test_counts_of_reasoning_are_checked(tmp_path, target):
    with Store(tmp_path, {"target": target.identity()}) as store:
        store.append(
            {
                "id": "a",
                "tokens": [1, 2, 3],
                "spans": [[1, 3]],
                "finish": ["stop"],
                "source": "",
                "reasoning": [3],
            }
        )
    with pytest.raises(
        UserError, match=r"line 1: reasoning=\[3\]: there must be one count for each span"
    ):
        load_records(tmp_path)


def test_other_template_variables_than_the_datas_are_a_finding():
    training = {"data_set": {"chat_template_kwargs": {"thinking": False}}}
    assert (
        "add --chat-template-kwargs '{\"thinking\": false}'"
        in other_template_kwargs({}, training)["advice"]
    )
    assert other_template_kwargs({"thinking": False}, training) is None
    assert other_template_kwargs({"thinking": False}, {}) is None, (
        "an earlier release did not record them"
    )
