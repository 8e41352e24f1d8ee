"""A bad reply of a server costs one conversation: it is counted, listed and asked for again; what arrived is stored."""

from __future__ import annotations

import json
import re
import threading
from random import Random

import pytest

from drafttrain import cli
from drafttrain.data import backends
from drafttrain.data.failures import BadReply, Failures
from drafttrain.data.store import load_records
from tests.data.faulty_server import FAULTS, FaultyServer

REASONS = {
    "not JSON": {"bad JSON", "HTML", "latin-1", "deep nesting", "empty"},
    "malformed": {"null content", "content of parts", "no content", "finish_reason missing", "finish_reason null",
                  "content filter", "empty choices", "no object", "an error with status 200"},
    "not Unicode": {"lone surrogates"},
    "no text": {"empty and cut off"},
    "bad encoding": {"bad gzip"},
    "connection lost": {"too short", "truncated chunk", "reset", "no HTTP"},
    "time-out": {"hang"},
    "endless": {"drip"},
}  # fmt: skip
REASON_OF = {fault: reason for reason, faults in REASONS.items() for fault in faults}
RETRIED = {"429", "500", "503", "bad gzip", "too short", "truncated chunk", "reset", "no HTTP"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(backends, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(backends, "_TIMEOUT", 5.0)


@pytest.fixture
def generate(target_dir, tmp_path, capsys):
    """Runs the command on conversations {id: user messages}; gives its status, and the last line before its results."""

    def run(conversations, *urls, name="out"):
        prompts = tmp_path / "prompts.jsonl"
        rows = []
        for key, turns in conversations.items():
            answered = [m for turn in turns for m in (("user", turn), ("assistant", "x"))]
            rows.append(
                {
                    "id": key,
                    "messages": [{"role": role, "content": text} for role, text in answered],
                }
            )
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = [
            "--target",
            str(target_dir),
            "--prompts",
            str(prompts),
            "--output",
            str(tmp_path / name),
        ]
        urls = [word for url in urls for word in ("--url", url)]
        status = cli.main(
            ["generate", *words, "--backend", "openai", *urls, "--max-new-tokens", "64"]
        )
        said = capsys.readouterr()
        lines = (said.err if status else said.out).strip().splitlines()
        return status, [line for line in lines if not line.startswith(("wrote ", "next: "))][-1]

    run.folder = tmp_path / "out"
    return run


def stored(folder) -> dict[str, dict]:
    """Records by id; no id is stored twice."""
    rows = [
        json.loads(line)
        for part in folder.glob("part-*.jsonl")
        for line in part.read_text().splitlines()
    ]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def listed(folder) -> dict[str, dict]:
    path = folder / "failed-0000.jsonl"
    return (
        {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}
        if path.is_file()
        else {}
    )


@pytest.mark.thorough
def test_every_fault_costs_its_conversation_only(generate, tokenizer):
    conversations = {f"bad {fault}": ["fine at first", f"then {fault}"] for fault in FAULTS}
    conversations |= {f"good {i}": [f"hello {i}", f"again {i}"] for i in range(len(FAULTS))}
    mixed = dict(Random(0).sample(list(conversations.items()), len(conversations)))
    with FaultyServer(script={f"then {fault}": fault for fault in FAULTS}) as server:
        status, line = generate(mixed, server.url)
        assert status == 0
        assert re.search(
            rf"^failed: {len(FAULTS)} conversations \(.*malformed 9.*\), listed in \S+/failed-0000.jsonl; run the",
            line,
        )
        tries = {fault: server.struck[fault] for fault in FAULTS}
    assert {fault for fault, count in tries.items() if count == 6} == RETRIED
    assert {count for fault, count in tries.items() if fault not in RETRIED} == {1}
    assert set(stored(generate.folder)) == {key for key in conversations if key.startswith("good")}
    failed = listed(generate.folder)
    assert {key.removeprefix("bad ") for key in failed} == set(FAULTS)
    for fault in FAULTS:
        row = failed[f"bad {fault}"]
        assert row["reason"] == (
            REASON_OF.get(fault) or f"HTTP {302 if fault == 'redirect' else fault}"
        ), fault
        assert len(row["detail"]) <= 200 and row["detail"].isprintable()
    assert failed["bad redirect"]["detail"] == "redirects to http://127.0.0.1:9/v1"
    assert failed["bad 413"]["detail"] == '{"error": {"message": "no\\nway"}}'
    assert "choices.0.message.content=None" in failed["bad null content"]["detail"]
    summary = json.loads((generate.folder / "summary.json").read_text())
    assert sum(summary["this_run"]["failed"].values()) == len(FAULTS)

    with FaultyServer() as server:  # the next run asks for what is missing, from the first turn on
        status, line = generate(mixed, server.url)
        assert status == 0 and line.startswith(f"this run: {len(FAULTS)} conversations")
        assert len(server.requests) == 2 * len(FAULTS)
    assert set(stored(generate.folder)) == set(conversations) and not listed(generate.folder)
    text = tokenizer.decode(stored(generate.folder)["bad reset"]["tokens"])
    assert text.count("<|im_end|>") == 4 and text.endswith("reply to then reset<|im_end|>")
    assert len(load_records(generate.folder)) == len(conversations)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_run_at_30_percent_faults_stores_or_lists_each(generate, tokenizer, monkeypatch, count):
    monkeypatch.setattr(
        backends, "_TIMEOUT", 1.0
    )  # what a busy machine answers later counts as a fault
    conversations = {f"c{i}": [f"q{i}"] if i % 8 else [f"q{i}", f"and {i}"] for i in range(count)}
    with FaultyServer(share=0.3) as server:
        status, line = generate(conversations, server.url)
        struck = sum(server.struck.values())
        assert status == 0 and struck > 0.25 * len(server.requests) > 0.25 * count
    done = stored(generate.folder)
    failed = listed(generate.folder)
    assert set(done) | set(failed) == set(conversations) and not set(done) & set(failed)
    assert 0 < len(failed) < 0.4 * count and line.startswith(
        f"failed: {len(failed)} conversations ("
    )
    for key, turns in conversations.items():
        if key in done:
            record = done[key]
            answers = [
                tokenizer.decode(record["tokens"][start:end]) for start, end in record["spans"]
            ]
            assert answers == [f"reply to {turn}<|im_end|>" for turn in turns], key
    with FaultyServer(share=0.3, seed=1) as server:  # faults go on
        status, line = generate(conversations, server.url)
    assert status == 0 and len(stored(generate.folder)) > len(done)
    monkeypatch.setattr(backends, "_TIMEOUT", 60.0)  # no reply is late, however busy the machine
    with FaultyServer() as server:
        missing = len(listed(generate.folder))
        status, line = generate(conversations, server.url)
        assert status == 0 and line.startswith(f"this run: {missing} conversations")
    assert set(stored(generate.folder)) == set(conversations) and not listed(generate.folder)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"models": (401, b'{"error": "Incorrect API key provided: sk-1234"}')},
            "refuses the key (HTTP 401); set the env",
        ),
        ({"models": (404, b"<html>")}, "lists no models (HTTP 404: <html>); name one with --model"),
        ({"models": (200, b'{"data": []}')}, "lists no models (malformed: data=[]"),
        ({"models": (500, b"")}, "lists no models (HTTP 500); name one"),
        (
            {"share": 1, "faults": ["404"]},
            "32 conversations in a row failed, the last with HTTP 404: {",
        ),
        (
            {"share": 1, "faults": ["503"]},
            "32 conversations in a row failed, the last with HTTP 503: {",
        ),
        (
            {"share": 1, "faults": ["HTML"]},
            "32 conversations in a row failed, the last with not JSON: <html>",
        ),
        (
            {"share": 1, "faults": ["hang"]},
            "32 conversations in a row failed, the last with time-out: no reply in 5 s",
        ),
    ],
    ids=["key", "no list", "empty list", "500", "unknown model", "busy", "another server", "hang"],
)
def test_a_server_that_is_wrong_for_all_ends_the_run(generate, options, message):
    with FaultyServer(**options) as server:
        status, line = generate({f"c{i}": [f"q{i}"] for i in range(500)}, server.url)
        assert status == 2 and line.startswith("error: url=") and message in line
        assert len({json.dumps(body["messages"]) for body in server.requests}) < 200
    assert "sk-1234" not in line


@pytest.mark.thorough
def test_what_arrived_before_the_end_is_stored(generate):
    """A server refuses the key in the middle: answers of the same moment are kept."""
    conversations = {f"c{i}": [f"q{i}"] for i in range(40)}
    with FaultyServer() as server:
        gate = threading.Barrier(8)
        plain = server.asked

        def asked(body):
            result = plain(body)
            if int(body["messages"][-1]["content"][1:]) < 8:
                gate.wait(10)  # seven answers and the refusal leave together
            return result

        server.asked = asked
        server.script["q3"] = "401"
        FAULTS["401"] = lambda handler, good: handler.reply(401, b"no")
        try:
            status, line = generate(conversations, server.url)
        finally:
            del FAULTS["401"]
    assert status == 2 and "refuses the key (HTTP 401)" in line
    arrived = len(stored(generate.folder))
    with FaultyServer() as server:
        assert generate(conversations, server.url)[0] == 0
        assert len(server.requests) == 40 - arrived
    assert set(stored(generate.folder)) == set(conversations)


@pytest.mark.thorough
def test_a_retry_goes_to_the_next_server(generate):
    with FaultyServer(share=1, faults=["reset"]) as broken, FaultyServer() as good:
        assert generate({f"c{i}": [f"q{i}"] for i in range(20)}, broken.url, good.url)[0] == 0
        assert len(broken.requests) == 10 and len(good.requests) == 20
    assert len(stored(generate.folder)) == 20


def test_answers_never_exceed_the_longest_conversation(generate, target_dir, tmp_path):
    with FaultyServer() as server:
        server.asked = lambda body: (None, "word " * 1000, "stop")
        assert generate({"a": ["q"]}, server.url)[0] == 0
    (record,) = stored(generate.folder).values()
    assert len(record["tokens"]) == 2048 and record["finish"] == ["length"]


def test_pauses_that_servers_ask_for():
    def reply(text):
        return backends.httpx.Response(429, headers={"Retry-After": text})

    pauses = [
        backends._retry_after(reply(text))
        for text in ("7", "0.5", "1e9", "-3", "nan", "inf", "soon", "")
    ]
    assert pauses == [7, 0.5, 60, 0, 0, 60, 0, 0]
    assert backends._retry_after(reply("Fri, 31 Dec 2100 23:59:59 GMT")) == 60
    assert backends._retry_after(reply("Wed, 21 Oct 2015 07:28:00 GMT")) == 0
    assert backends._retry_after(reply("Wed, 99 Oct 99999 07:28:00 GMT")) == 0
    assert backends._retry_after(backends.httpx.Response(503)) == 0


def test_the_list_of_failures(tmp_path):
    failures = Failures(tmp_path, 3)
    (tmp_path / "failed-0003.jsonl").write_text('{"id": "old", "reason": "x"}\n{"id": "cut o')
    for key, reason in (("a", "HTTP 500"), ("b", "not JSON"), ("c", "HTTP 500")):
        failures.add(key, BadReply(reason, "line one\nline \ud800 two \x1b[31m"))
    assert str(failures) == "HTTP 500 2, not JSON 1"
    rows = [json.loads(line) for line in failures.path.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["old", "a", "b", "c"] and rows[1][
        "detail"
    ] == "line one line   two  [31m"
    (tmp_path / "failed-0007.jsonl").write_text('{"id": "a", "reason": "x"}\n')
    failures.settle({"a", "old", "c"})
    assert [json.loads(line)["id"] for line in failures.path.read_text().splitlines()] == ["b"]
    assert not (tmp_path / "failed-0007.jsonl").exists()
    failures.settle({"b"})
    assert not list(tmp_path.glob("failed-*"))
