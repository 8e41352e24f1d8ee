"""Rows that users write: suites, prompts, chats, calibration prompts, corpora, openings and trees in files."""

from __future__ import annotations

import json
import random as chance
from argparse import Namespace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given

from drafttrain.cli import parsed
from drafttrain.data import prompts, sources
from drafttrain.data.filters import Filter, PromptLimits
from drafttrain.data.generate import read_prompts
from drafttrain.data.loader import load_text
from drafttrain.data.magpie import load_openings
from drafttrain.data.ngram_corpus import texts
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.evaluation.suites import load_suite, take_evenly
from drafttrain.files import JsonlLog
from drafttrain.tuning.tune import calibration_prompts
from tests.conftest import make_target
from tests.data.records import records_of
from tests.data.templates.families import FAMILIES
from tests.files import FIXTURES, dump_json, dump_jsonl, load_json, load_jsonl
from tests.fuzz import fuzz, json_faults, outcome, seeds, text_faults

TARGET = make_target()
ANSWERED = [
    {
        "id": str(i),
        "messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}],
    }
    for i in range(2)
]

CALLING = {  # a prompt with everything that a row may give the chat template
    "id": "t",
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}],
    "chat_template_kwargs": {"enable_thinking": False, "documents": [{"title": "a", "text": "b"}]},
    "messages": [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": "What is there to be seen?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": [1, {"b": null}]}'}}
        ]},
        {"role": "tool", "tool_call_id": "c", "name": "look", "content": "a tree"},
        {"role": "assistant", "content": "A tree.", "thinking": "Yes."},
    ],
}  # fmt: skip


def rows_of(name: str) -> list[dict]:
    return load_jsonl(FIXTURES / name)


def suite(path: Path) -> None:
    for name in (str(path), f"mt_bench:{path}"):
        for question in take_evenly(load_suite(name).questions, 3):
            assert question.category.strip() != "None"
            question.prompt(TARGET.tokenizer)


FUNCTION = {
    "name": "look_up",
    "description": "Looks up?",
    "parameters": {"type": "dict", "properties": {"x": {"type": "float"}}, "required": ["x"]},
}
WITH_TOOLS = [
    {
        "turns": ["Why?"],
        "opening": [{"role": "system", "content": "Be kind."}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    {"turns": ["How?"]},
]
BFCL = [
    {
        "id": "live_simple_1-0-0",
        "question": [[{"role": "user", "content": "Why?"}]],
        "function": [FUNCTION],
    },
    {
        "id": "simple_2",
        "question": [[{"role": "user", "content": "Oh?"}], []],
        "function": [FUNCTION] * 2,
    },
]


def with_tools(name: str) -> None:
    tokenizer = next(family for family in FAMILIES if family.name == "Qwen3").tokenizer
    for question in load_suite(name).questions:
        question.prompt(tokenizer)
        question.request()


def collected(path: Path) -> None:
    output = path.with_name(f"{chance.random()}.out")
    words = [
        "--source",
        "file",
        "--input",
        str(path),
        "--output",
        str(output),
        "--no-exclude-suites",
    ]
    prompts.run(Namespace(**parsed(["prompts", *words])[1]))
    list(prompts.evaluation_texts([path], False))


def conversations(path: Path) -> None:
    for conversation in read_prompts(path)[1]:
        assert conversation.id not in ("None", "") and (conversation.text or conversation.turns)


# What reads the rows of a file, and sound rows.
READERS = {
    "suite": (suite, rows_of("suite.jsonl")),
    "suite with tools": (lambda path: with_tools(str(path)), WITH_TOOLS),
    "suite bfcl:FILE": (lambda path: with_tools(f"bfcl:{path}"), BFCL),
    "prompts --source file": (collected, rows_of("chats.jsonl")),
    "generate --prompts": (conversations, rows_of("prompts.jsonl")[:3]),
    "generate --prompts, tools": (conversations, [CALLING]),
    "prompts --source file, tools": (collected, [CALLING]),
    "generate --backend existing": (
        lambda path: list(records_of(TARGET.tokenizer, path)),
        ANSWERED,
    ),
    "tune --calibrate": (
        lambda path: calibration_prompts(TARGET, str(path), {}),
        rows_of("chats.jsonl"),
    ),
    "ngram-store --text": (
        lambda path: list(texts(path, TARGET.tokenizer)),
        [{"text": "one"}, *ANSWERED],
    ),
    "data=FILE.jsonl": (
        lambda path: load_text(str(path), TARGET, 16),
        [{"text": "one two"}, {"text": "three"}],
    ),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "rows.jsonl"


@pytest.mark.thorough
@pytest.mark.parametrize("border", READERS)
@fuzz(examples=14)
@given(fault=text_faults(), seed=seeds())
def test_bytes_of_rows(path, border, fault, seed):
    read, rows = READERS[border]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(fault.apply(content, Random(seed)))
    outcome(border, fault.name, lambda: read(path))


@pytest.mark.thorough
@pytest.mark.parametrize("border", READERS)
@fuzz(examples=15)
@given(fault=json_faults(), seed=seeds())
def test_values_of_rows(path, border, fault, seed):
    read, rows = READERS[border]
    dump_jsonl(path, fault.apply(rows, Random(seed)))
    outcome(border, fault.name, lambda: read(path))


@pytest.mark.parametrize("border", READERS)
def test_a_line_separator_within_a_text_ends_no_line(path, border):
    """U+2028 and U+0085 end a line for str.splitlines, not in JSON lines."""
    read, rows = READERS[border]
    changed = [
        json.loads(json.dumps(row).replace("?", "\\u2028?").replace("Name ", "Name\\u2028 "))
        for row in rows
    ]
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in changed), encoding="utf-8"
    )
    assert outcome(border, "line separators", lambda: read(path)) == ""


@fuzz(examples=15)
@given(fault=text_faults(), seed=seeds())
def test_bytes_of_a_public_suite(path, fault, seed):
    for name in ("q.json", "q.csv", "q.jsonl"):
        rows = [{"question": "Why is it", "answer": "a"}] * 3
        whole = json.dumps(rows) if name.endswith("json") else "\n".join(map(json.dumps, rows))
        content = "question,answer\nWhy is it,a\n" if name.endswith("csv") else whole
        file = path.with_name(name)
        file.write_bytes(fault.apply(content.encode(), Random(seed)))
        outcome("suite NAME:FILE", fault.name, lambda file=file: load_suite(f"gsm8k:{file}"))


@pytest.mark.parametrize("name", ["q.parquet", "q.jsonl.gz"])
@fuzz(examples=15)
@given(fault=text_faults(), seed=seeds())
def test_bytes_of_a_packed_suite(path, name, fault, seed):
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    file = path.with_name(name)
    if name.endswith("gz"):
        file.write_bytes(gzip.compress(b'{"question": "Why"}\n'))
    else:
        pq.write_table(pa.table({"question": ["Why", "How"]}), file)
    file.write_bytes(fault.apply(file.read_bytes(), Random(seed)))
    outcome("suite NAME:FILE", fault.name, lambda: load_suite(f"gsm8k:{file}"))


@fuzz(examples=6)
@given(fault=text_faults(), seed=seeds())
def test_bytes_of_plain_text(path, fault, seed):
    file = path.with_name("text.txt")
    file.write_bytes(fault.apply("One line.\nAnd é another.\n".encode(), Random(seed)))
    outcome("ngram-store --text", fault.name, lambda: list(texts(file, TARGET.tokenizer)))
    outcome("data=FILE.txt", fault.name, lambda: load_text(str(file), TARGET, 16))
    outcome("prompts --openings", fault.name, lambda: load_openings(str(file)))


@fuzz(examples=18)
@given(fault=json_faults(), damage=text_faults(), seed=seeds())
def test_a_tree_in_a_file(path, fault, damage, seed):
    random = Random(seed)
    paths = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]
    file = path.with_name("tree.json")
    name = random.choice([fault, damage]).name
    changed = (
        json.dumps(fault.apply(paths, random)).encode()
        if name == fault.name
        else damage.apply(b"[[0], [1]]", random)
    )
    file.write_bytes(changed)
    outcome("tree paths:FILE.json", name, lambda: str(TreeSpec.parse(f"paths:{file}")))


@fuzz(examples=18)
@given(fault=json_faults(), seed=seeds())
def test_a_log_of_written_prompts(path, fault, seed):
    """FILE.partial of `prompts --source magpie`."""
    log = path.with_name("p.partial")
    settings = {"seed": 0}
    result = {"messages": [{"role": "user", "content": "Name a river."}]}
    rows = [settings, {"number": 0, "result": result}, {"number": 1, "result": "empty"}]
    dump_jsonl(log, fault.apply(rows, Random(seed)))
    keep = Filter(PromptLimits(1, 100, 0, 0), [], 8, None)

    def call():
        open_log = JsonlLog(log, settings, sources.WrittenPrompt)
        sources.write_prompts(None, lambda start: iter(()), open_log, keep, 5, None, 0)

    outcome("partial log of prompts", fault.name, call)


@fuzz(examples=10)
@given(fault=json_faults(), seed=seeds())
def test_a_summary_of_prompts(path, fault, seed):
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Name bread."}]}) + "\n")
    output = path.with_name("done.jsonl")
    output.write_text("{}\n")
    summary = load_json(FIXTURES / "prompts.jsonl.summary.json")
    dump_json(output.with_name("done.jsonl.summary.json"), fault.apply(summary, Random(seed)))
    words = ["prompts", "--source", "file", "--input", str(path), "--output", str(output)]
    args = Namespace(**parsed(words)[1])
    outcome("prompts: summary", fault.name, lambda: prompts.run(args))
