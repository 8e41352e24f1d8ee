"""A bad reply of a server costs one conversation: it is counted, listed and asked for again; what arrived is stored."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from contextvars import ContextVar
from random import Random

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError

from drafttrain.data import backends, servers
from drafttrain.data.failures import BadReply, Failures
from drafttrain.data.openai_replies import ChatReply, IdsReply, ModelList, TextReply
from drafttrain.data.servers import Requests
from drafttrain.data.store import load_records
from drafttrain.files import read_jsonl, write_jsonl
from tests.data import commands
from tests.data.faulty_server import ENDLESS, FAULTS, FaultyServer
from tests.files import load_json, load_jsonl

REASONS = {
    "not JSON": {"bad JSON", "HTML", "latin-1", "deep nesting", "empty"},
    "malformed": {
        "null content",
        "content of parts",
        "no content",
        "finish_reason missing",
        "finish_reason null",
        "content filter",
        "empty choices",
        "no object",
        "an error with status 200",
    },
    "not Unicode": {"lone surrogates"},
    "no text": {"empty and cut off"},
    "bad encoding": {"bad gzip", "gzip in gzip"},
    "connection lost": {"too short", "truncated chunk", "reset", "no HTTP"},
    "time-out": {"hang", "slow headers"},
    "endless": {"drip"},
}
REASON_OF = {fault: reason for reason, faults in REASONS.items() for fault in faults}
RETRIED = {"429", "500", "503", "bad gzip", "too short", "truncated chunk", "reset", "no HTTP"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Retries come at once. Late are replies that never end, and no others, however busy the machine is."""
    monkeypatch.setattr(backends, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(backends, "_TIMEOUT", 5.0)
    asked = ContextVar("asked")
    plain = Requests._reply

    async def reply(self, method, url, body, seconds):
        asked.set((FaultyServer.running.get(url.partition("/v1")[0]), body))
        return await plain(self, method, url, body, seconds)

    def deadline(seconds):
        limit = asyncio.timeout(None)
        server, body = asked.get()
        if server and body and server.never_ends(body):
            limit.ending = asyncio.ensure_future(expire(limit, server.asks_for(body)[0]))
        return limit

    async def expire(limit, key):
        before = ENDLESS[key]
        while ENDLESS[key] == before:
            await asyncio.sleep(0.005)
        for _ in range(20):  # the loop reads what has arrived
            await asyncio.sleep(0.005)
        with contextlib.suppress(RuntimeError):  # the request has ended by itself
            limit.reschedule(asyncio.get_running_loop().time())

    monkeypatch.setattr(Requests, "_reply", reply)
    monkeypatch.setattr(Requests, "deadline", staticmethod(deadline))


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
        write_jsonl(prompts, rows)
        more = ["--backend", "openai", "--max-new-tokens", "64"]
        for url in urls:
            more += ["--url", url]
        status = commands.generate(target_dir, prompts, tmp_path / name, *more)
        said = run.said = capsys.readouterr()
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
    return {row["id"]: row for row in load_jsonl(path)} if path.is_file() else {}


@pytest.mark.parametrize("schema", [ChatReply, TextReply, IdsReply, ModelList])
def test_one_bad_item_of_a_list_is_kept(schema):
    """An error of 2 KB for each of a million bad items would take gigabytes; one is enough."""
    items = ["x"] * 1000
    choice = {"token_ids": items, "prompt_token_ids": items, "message": {"tool_calls": items}}
    for reply in ({"choices": items, "data": items}, {"choices": [choice]}):
        with pytest.raises(ValidationError) as caught:
            TypeAdapter(schema).validate_python(reply)
        assert caught.value.error_count() <= 4


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
    summary = load_json(generate.folder / "summary.json")
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
                gate.wait(120)  # seven answers and the refusal leave together
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


def test_answers_never_exceed_what_was_asked_for(generate):
    with FaultyServer() as server:
        server.asked = lambda body: (None, "word " * 1000, "stop")
        assert generate({"a": ["q"]}, server.url)[0] == 0
    (record,) = stored(generate.folder).values()
    ((start, end),) = record["spans"]
    assert end - start == 64 and record["finish"] == ["length"]


def test_a_servers_echo_of_the_key_is_not_kept(generate, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "topsecret-1234")

    def echo(handler, good):
        handler.reply(400, f"headers: {dict(handler.headers)}".encode())

    monkeypatch.setitem(FAULTS, "echo", echo)
    with FaultyServer(script={"q": "echo"}) as server:
        assert generate({"a": ["q"], "b": ["fine"]}, server.url)[0] == 0
    detail = listed(generate.folder)["a"]["detail"]
    assert "Authorization" in detail and "topsecret" not in detail
    for path in generate.folder.rglob("*"):
        assert path.is_dir() or b"topsecret" not in path.read_bytes()


def test_passwords_and_keys_of_addresses_are_not_shown(generate):
    with FaultyServer() as server:
        address = server.url.replace("http://", "http://user:hunter2secret@")
        assert generate({"a": ["q"]}, address)[0] == 0
        assert "no exchange of token ids" in generate.said.out
        assert "hunter2secret" not in generate.said.out + generate.said.err
        generate({"b": ["q"]}, f"{server.url}?api_key=hunter2secret", name="b")
    assert "hunter2secret" not in generate.said.out + generate.said.err


def test_pauses_that_servers_ask_for():
    def reply(text):
        return httpx.Response(429, headers={"Retry-After": text})

    pauses = [
        servers._retry_after(reply(text))
        for text in ("7", "0.5", "1e9", "-3", "nan", "inf", "soon", "")
    ]
    assert pauses == [7, 0.5, 60, 0, 0, 60, 0, 0]
    assert servers._retry_after(reply("Fri, 31 Dec 2100 23:59:59 GMT")) == 60
    assert servers._retry_after(reply("Wed, 21 Oct 2015 07:28:00 GMT")) == 0
    assert servers._retry_after(reply("Wed, 99 Oct 99999 07:28:00 GMT")) == 0
    assert servers._retry_after(httpx.Response(503)) == 0


def test_the_list_of_failures(tmp_path, monkeypatch):
    failures = Failures(tmp_path, 3)
    (tmp_path / "failed-0003.jsonl").write_text('{"id": "old", "reason": "x"}\n{"id": "cut o')
    for key, reason in (("a", "HTTP 500"), ("b", "not JSON"), ("c", "HTTP 500")):
        failures.add(key, BadReply(reason, "line one\nline \ud800 two \x1b[31m"))
    assert str(failures) == "HTTP 500 2, not JSON 1"
    rows = load_jsonl(failures.path)
    assert [row["id"] for row in rows] == ["old", "a", "b", "c"] and rows[1][
        "detail"
    ] == "line one line   two  [31m"
    (tmp_path / "failed-0007.jsonl").write_text('{"id": "a", "reason": "x"}\n')
    failures.settle({"a", "old", "c"})
    assert [json.loads(line)["id"] for line in failures.path.read_text().splitlines()] == ["b"]
    assert not (tmp_path / "failed-0007.jsonl").exists()
    failures.settle({"b"})
    assert not list(tmp_path.glob("failed-*"))

    def quicker(path, **options):
        """Another process ends at the same time, before the list is read or behind it."""
        if path.name == "failed-0007.jsonl":
            path.unlink()
        yield from read_jsonl(path, **options)
        path.unlink()

    monkeypatch.setattr("drafttrain.data.failures.read_jsonl", quicker)
    for number in (7, 8):
        (tmp_path / f"failed-{number:04d}.jsonl").write_text('{"id": "b"}\n')
    failures.settle({"b"})
