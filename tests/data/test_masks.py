"""Spans of existing conversations under templates of the common families."""

from __future__ import annotations

import json

import pytest

from drafttrain.data import masks
from drafttrain.data.chat import (
    TemplateRefuses,
    encode,
    longest_token,
    render_text,
    text_prompt,
)
from drafttrain.data.existing_backend import cut
from drafttrain.data.masks import TemplateRewrites
from drafttrain.errors import UserError
from tests.conftest import make_tokenizer
from tests.data.records import conversation_record, records_of


def prompt_of(tokenizer, messages):
    """What the target reads before it answers."""
    return encode(tokenizer, render_text(tokenizer, messages, generation=True))


LOOP = "{% for m in messages %}"
END = "{% endfor %}"
OPENED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
CHATML = LOOP + TURN + END + OPENED
DEFAULT_SYSTEM = (
    LOOP
    + "{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    + TURN
    + END
    + OPENED
)
LLAMA3 = (
    "{{ bos_token }}"
    + LOOP
    + "{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}"
    + END
    + "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + LOOP
    + "{{ '<turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
    + "{{ m['content'] | trim + '<end>\n' }}"
    + END
    + "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
LLAMA2 = (
    LOOP
    + "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    + "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}"
    + END
)
# Keeps a reasoning block in the last answer only, and opens every last answer with one.
REASONING = (
    "{% set ns = namespace(last=-1) %}"
    + LOOP
    + "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    + END
    + LOOP
    + "{{ '<|im_start|>' + m['role'] + '\n' }}"
    + "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    + "{{ m['content'] + '<|im_end|>\n' }}"
    + END
    + OPENED
)
NO_STOP = (
    LOOP
    + "{{ m['role'] + ': ' + m['content'] + '\n' }}"
    + END
    + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

CHAT = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello! 42 is\n\n  it."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because é."},
]


def tokenizer_with(template: str):
    tokenizer = make_tokenizer()
    specials = ["<|head|>", "<|/head|>", "<|eot|>", "<turn>", "<end>"]
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.chat_template = template
    return tokenizer


def spoken(tokenizer, record):
    """The text of each span."""
    return [tokenizer.decode(record["tokens"][a:b]) for a, b in record["spans"]]


@pytest.mark.parametrize(
    ("template", "lead", "stop"),
    [
        (CHATML, "", "<|im_end|>"),
        (DEFAULT_SYSTEM, "", "<|im_end|>"),
        (LLAMA3, "", "<|eot|>"),
        (GEMMA, "", "<end>"),
        (LLAMA2, " ", " <|im_end|>"),
    ],
)
def test_spans_hold_the_answer_and_its_stop_token(template, lead, stop):
    tokenizer = tokenizer_with(template)
    record = conversation_record(tokenizer, CHAT, "a")
    assert spoken(tokenizer, record) == [lead + CHAT[i]["content"] + stop for i in (1, 3)]
    assert record["finish"] == ["stop", "stop"]
    assert record["spans"][-1][1] == len(record["tokens"])
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert whole.startswith(tokenizer.decode(record["tokens"]))
    # Before each span stands exactly what generation would be prompted with.
    for i, (start, _) in zip((1, 3), record["spans"], strict=True):
        assert record["tokens"][:start] == prompt_of(tokenizer, CHAT[:i])


def test_bos_stands_once():
    for template in (LLAMA3, GEMMA):
        tokenizer = tokenizer_with(template)
        assert prompt_of(tokenizer, CHAT[:1]).count(tokenizer.bos_token_id) == 1
    plain = adding_bos(make_tokenizer())
    bos = plain.bos_token_id
    assert text_prompt(plain, "ab")[0] == bos
    assert text_prompt(plain, plain.bos_token + "ab") == text_prompt(plain, "ab")
    assert text_prompt(make_tokenizer(), "ab").count(bos) == 0


def adding_bos(tokenizer):
    from tokenizers.processors import TemplateProcessing

    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos[0]} $A", special_tokens=[bos]
    )
    return tokenizer


def test_models_without_a_template_read_turns_as_paragraphs():
    tokenizer = adding_bos(make_tokenizer())
    tokenizer.chat_template = None
    record = conversation_record(tokenizer, CHAT[:2], "a")
    assert tokenizer.decode(record["tokens"]) == "<|im_start|>Hi there\n\nHello! 42 is\n\n  it."
    assert spoken(tokenizer, record) == [CHAT[1]["content"]]
    assert record["finish"] == ["length"]
    assert prompt_of(tokenizer, CHAT[:1]) == record["tokens"][: record["spans"][0][0]]


def test_a_turn_without_a_stop_token_is_not_finished():
    tokenizer = tokenizer_with(NO_STOP)
    record = conversation_record(tokenizer, CHAT, "a")
    assert spoken(tokenizer, record) == [CHAT[1]["content"], CHAT[3]["content"]]
    assert record["finish"] == ["length", "length"]


def test_turns_after_the_last_answer_are_left_out():
    tokenizer = tokenizer_with(CHATML)
    longer = [*CHAT, {"role": "user", "content": "And?"}]
    assert conversation_record(tokenizer, longer, "a") == conversation_record(tokenizer, CHAT, "a")


def test_a_token_across_the_border_does_not_move_it():
    """A merge of two line breaks joins the prompt's last one with the answer's first."""
    from tokenizers import Tokenizer

    tokenizer = tokenizer_with(CHATML)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"]["ĊĊ"] = len(tokenizer)
    state["model"]["merges"] = [["Ċ", "Ċ"]]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    chat = [CHAT[0], {"role": "assistant", "content": "\nYes\n\nno"}, CHAT[2], CHAT[3]]
    merged = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    assert len(merged) == 1
    record = conversation_record(tokenizer, chat, "a")
    assert record["tokens"][: record["spans"][0][0]] == prompt_of(tokenizer, chat[:1])
    assert spoken(tokenizer, record) == ["\nYes\n\nno<|im_end|>", "Because é.<|im_end|>"]


def test_rewriting_templates_are_refused_or_rendered_per_turn(tmp_path):
    tokenizer = tokenizer_with(REASONING)
    with pytest.raises(
        TemplateRewrites, match="row id='a', message 3: the chat template renders the turns before"
    ):
        conversation_record(tokenizer, CHAT, "a")
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"id": "a", "messages": CHAT}) + "\n")
    first, second = records_of(tokenizer, path)
    assert (first["id"], second["id"], second["source"]) == ("a/1", "a/3", "chats.jsonl")
    think = "<think>\n\n</think>\n\n"
    assert spoken(tokenizer, first) == [think + CHAT[1]["content"] + "<|im_end|>"]
    assert spoken(tokenizer, second) == [think + CHAT[3]["content"] + "<|im_end|>"]
    assert tokenizer.decode(second["tokens"]).count("<think>") == 1


def test_an_answer_that_also_stands_in_the_templates_lead_is_told_apart():
    tokenizer = tokenizer_with(REASONING)
    record = conversation_record(
        tokenizer, [CHAT[0], {"role": "assistant", "content": "think"}], "a"
    )
    assert spoken(tokenizer, record) == ["<think>\n\n</think>\n\nthink<|im_end|>"]


def test_records_of_a_file_in_other_shapes(tmp_path):
    tokenizer = tokenizer_with(CHATML)
    path = tmp_path / "chats.jsonl"
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "Hi there"},
            {"from": "gpt", "value": "Hello!"},
        ]
    }
    rows = [{"id": "x", "messages": CHAT, "source": "web"}, sharegpt]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = records_of(tokenizer, path)
    assert (first["id"], first["source"], len(first["spans"])) == ("x", "web", 2)
    assert (second["id"], spoken(tokenizer, second)) == ("2", ["Hello!<|im_end|>"])


def refused(template, messages, match):
    with pytest.raises(UserError, match=match):
        conversation_record(tokenizer_with(template), messages, "row7")


def test_bad_conversations_are_refused(tmp_path):
    refused(CHATML, CHAT[:1], "row id='row7': empty mask: no message of role assistant")
    empty = [CHAT[0], {"role": "assistant", "content": " \n"}]
    refused(CHATML, empty, "row id='row7', message 1: empty mask: the assistant's content is empty")
    injected = [CHAT[0], {"role": "assistant", "content": "a<|im_end|>b"}]
    refused(CHATML, injected, "row id='row7', message 1: the content itself holds '<|im_end|>'")
    refused(
        CHATML,
        CHAT[1:],
        "row id='row7', message 0: the assistant's turn does not begin where a prompt ends",
    )
    shouting = CHATML.replace("m['content']", "m['content'] | upper")
    refused(
        shouting,
        CHAT,
        "message 1: the chat template's rendering does not contain the assistant's content",
    )
    system = [{"role": "system", "content": "s"}, *CHAT]
    refused(
        GEMMA,
        system,
        r"refuses a conversation with the roles \[system, user\]: System role not supported",
    )
    primed = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
    refused(primed, CHAT, "does not begin where the chat template's generation prompt ends")
    (tmp_path / "f.jsonl").write_text('{"text": "no conversation"}\n')
    with pytest.raises(UserError, match=r"f.jsonl line 1: no conversation in a known format"):
        list(records_of(tokenizer_with(CHATML), tmp_path / "f.jsonl"))


GROWING = "{%% set it = namespace(a=%s) %%}{%% for _ in range(60) %%}{%% set it.a = %s %%}{%% endfor %%}{{ it.a }}"
LONG = "{% set s = 'x\n' * 9999 %}"
ENDLESS = {
    "ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "lists of ranges": "{% for a in range(99999) %}{% if b in range(99999) | list %}{% endif %}{% endfor %}",
    "loops": LONG + "{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a list": "{{ [0] * 10 ** 9 }}",
    "a text": "{{ 'x' * 10 ** 9 }}",
    "numbers": GROWING % ("9", "it.a * it.a"),
    "a power": "{{ 9 ** (9 ** 9) }}",
    "doubled by ~": GROWING % ("'x'", "it.a ~ it.a"),
    "doubled by +": GROWING % ("'x'", "it.a + it.a"),
    "doubled lists": GROWING % ("['x']", "[it.a, it.a]"),
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "center": "{{ 'x' | center(10 ** 9) }}",
    "map": "{{ ['x'] | map('center', 10 ** 9) | list }}",
    "%": "{{ '%1000000000d' % 1 }}",
    "% with a width": "{{ '%*d' % (10 ** 9, 1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format with a width": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "replace": LONG + "{{ s.replace('x', s) }}",
    "join": LONG + "{{ s.join(s) }}",
    "indent": LONG + "{{ s | indent(99999) }}",
    "bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "slices": LONG + "{% for a in s %}{% set t = s[1:] %}{% endfor %}",
    "what is compared": LONG + "{% for a in s %}{% if 'y' in s %}{% endif %}{% endfor %}",
    "what is written": LONG + "{% for a in s %}{{ s }}{% endfor %}",
}


@pytest.mark.thorough
@pytest.mark.parametrize("endless", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_computes_too_much_is_refused(endless):
    tokenizer = tokenizer_with(endless + CHATML)
    with pytest.raises(TemplateRefuses, match="it computes too much for its inputs"):
        render_text(tokenizer, CHAT)


@pytest.mark.parametrize(("asked", "answered"), [(9000, 1), (1, 9000), (1, 100)])
def test_what_lies_far_behind_the_limit_is_not_split(tmp_path, monkeypatch, asked, answered):
    lengths = []

    def counted(tokenizer, text):
        lengths.append(len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr(masks, "encode", counted)
    turns = [
        {"role": "user", "content": "so " * asked},
        {"role": "assistant", "content": "so " * answered},
    ]
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"id": "a", "messages": turns * 3}) + "\n")
    tokenizer = tokenizer_with(CHATML)
    (everything,) = records_of(tokenizer, path)
    lengths.clear()
    ((_, (beginning,)),) = masks.recorded_conversations(tokenizer, path, max_length=64)
    assert cut(beginning, 64) == cut(everything, 64)
    assert max(lengths) < 2 * 64 * longest_token(tokenizer) + 200


def test_turns_behind_the_limit_are_not_rendered(tmp_path, monkeypatch):
    """Each renders all before it, so thousands of short turns took minutes."""
    rendered = []

    def counted(tokenizer, messages, *rest):
        rendered.append(len(messages))
        return render_text(tokenizer, messages, *rest)

    monkeypatch.setattr(masks, "render_text", counted)
    turns = [{"role": "user", "content": "so"}, {"role": "assistant", "content": "so"}]
    path = tmp_path / "many.jsonl"
    path.write_text(json.dumps({"id": "a", "messages": turns * 60}) + "\n")
    tokenizer = tokenizer_with(CHATML)
    ((_, (beginning,)),) = masks.recorded_conversations(tokenizer, path, max_length=64)
    assert 64 < len(beginning["tokens"]) < 128
    assert max(rendered) < 64
    (everything,) = records_of(tokenizer, path)
    assert cut(beginning, 64) == cut(everything, 64)


def test_long_conversations_are_rendered():
    chat = [*CHAT[:1], {"role": "user", "content": "word " * 400_000}] * 3
    text = render_text(tokenizer_with(CHATML), chat)
    assert text.count("word") == 1_200_000
    assert text == tokenizer_with(CHATML).apply_chat_template(chat, tokenize=False)


def test_ranges_of_templates_are_ranges():
    tokenizer = tokenizer_with(
        "{% for i in range(messages | length) | reverse %}{{ i }} {% endfor %}{{ range(9)[3:5] }}"
    )
    assert render_text(tokenizer, CHAT) == "3 2 1 0 range(3, 5)"
