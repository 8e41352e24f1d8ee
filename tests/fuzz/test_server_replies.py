"""Replies of servers: whatever they hold, a conversation is stored or counted as failed, and a request is completed or failed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from random import Random
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.data import backends, servers
from drafttrain.data.backends import OpenAIBackend, ResponseSettings
from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.data.failures import BadReply
from drafttrain.ops.sampling import SamplingParams
from drafttrain.serving.bench import figures
from drafttrain.serving.client import Answer, Server, ask, connect, parse_metrics, speculation
from tests.conftest import make_target
from tests.data.faulty_server import chat, completion
from tests.fuzz import (
    JSON_FAULTS,
    Fault,
    file_faults,
    fuzz,
    json_faults,
    outcome,
    seeds,
    text_faults,
)

URL = "http://server:1"
MODELS = {
    "object": "list",
    "data": [{"id": "tiny", "object": "model", "max_model_len": 100}, {"id": "other"}],
}
HEADERS = ({}, {"content-encoding": "gzip"}, {"content-encoding": "deflate"}, {"retry-after": "x"},
           {"content-type": "text/html; charset=hex"}, {"location": "\xff"}, {"content-length": "3"})  # fmt: skip
STATUSES = (200, 200, 200, 201, 204, 301, 400, 403, 404, 413, 429, 500, 503, 599, 999)
FAULTS = st.one_of(json_faults(), text_faults(), file_faults())


@pytest.fixture(scope="module")
def settings():
    renderer = ChatRenderer(make_target(layers=1))
    return ResponseSettings(renderer, SamplingParams(temperature=0.0), 32, 200, 0)


@pytest.fixture(scope="module")
def server():
    """What httpx's clients talk to: `server.respond` answers every request."""
    fake = SimpleNamespace(respond=None)
    patch = pytest.MonkeyPatch()
    client = httpx.AsyncClient
    transport = httpx.MockTransport(lambda request: fake.respond(request))
    patch.setattr(servers.httpx, "AsyncClient", lambda **options: client(transport=transport))
    patch.setattr(backends, "_FIRST_PAUSE", 0.0)
    patch.setattr(servers, "_LONGEST_PAUSE", 0.0)
    yield fake
    patch.undo()


def damaged(fault: Fault, value: object, random: Random) -> bytes:
    """A JSON text with a fault in its values or in its bytes."""
    if fault in JSON_FAULTS:
        return json.dumps(fault.apply(value, random)).encode()
    return fault.apply(json.dumps(value).encode(), random)


def reply(
    content: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> httpx.Response:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    return httpx.Response(status, headers=raw, stream=httpx.ByteStream(content))


def answer(
    settings: ResponseSettings,
    server: SimpleNamespace,
    text: bool,
    bad: Callable[[], httpx.Response],
) -> None:
    """Asks for a conversation. Of two turns the first gets a good reply; texts have one."""

    def respond(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=MODELS)
        if "return_token_ids" in json.loads(request.content):
            return httpx.Response(400)
        first = not text and len(json.loads(request.content)["messages"]) == 1
        return reply(json.dumps(chat("fine")).encode()) if first else bad()

    server.respond = respond
    messages = [{"role": role, "content": "hi"} for role in ("user", "assistant", "user")]
    it = Conversation.from_row(
        {"id": "a", "text": "once"} if text else {"id": "a", "messages": messages}, "here"
    )
    it.open(settings.renderer)
    ((ended, problem),) = OpenAIBackend([URL], "", settings).run([it], lambda: False)
    if problem is None:  # a complete record of the target's tokens
        record = ended.record(settings.renderer)
        json.dumps(record, ensure_ascii=False).encode()
        assert (
            len(record["spans"]) == len(record["finish"]) == ended.total_turns
            or record["finish"][-1] == "length"
        )
        assert len(record["tokens"]) <= settings.max_length
        assert all(type(token) is int and 0 <= token < 300 for token in record["tokens"])
        assert set(record["finish"]) <= {"stop", "length"}
    else:
        assert (
            isinstance(problem, BadReply)
            and problem.reason.isprintable()
            and problem.detail.isprintable()
        )
        assert len(problem.reason) < 20 and len(str(problem)) < 250


@pytest.mark.thorough
@fuzz(examples=60)
@given(
    fault=FAULTS,
    seed=seeds(),
    text=st.booleans(),
    status=st.sampled_from(STATUSES),
    headers=st.sampled_from(HEADERS),
)
def test_completions(settings, server, fault, seed, text, status, headers):
    bad = damaged(fault, completion("fine") if text else chat("fine"), Random(seed))
    plain = fault in JSON_FAULTS  # those are only read with status 200
    status, headers = (200, {}) if plain else (status, headers)
    call = lambda: answer(settings, server, text, lambda: reply(bad, status, headers))  # noqa: E731
    outcome("server: completions", fault.name, call)


@pytest.mark.thorough
@fuzz(examples=24)
@given(
    fault=FAULTS, seed=seeds(), status=st.sampled_from(STATUSES), headers=st.sampled_from(HEADERS)
)
def test_lists_of_models(settings, server, fault, seed, status, headers):
    bad = damaged(fault, MODELS, Random(seed))
    server.respond = lambda request: reply(bad, status, headers)
    outcome("server: models", fault.name, lambda: OpenAIBackend([URL], "", settings))

    def bench() -> None:
        assert connect(URL, "").model.isprintable()

    outcome("server: models", fault.name, bench)


EVENTS = [
    {
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        ],
        "usage": None,
    },
    {
        "choices": [
            {
                "index": 0,
                "delta": {"content": "two tokens"},
                "token_ids": [1, 2],
                "logprobs": {"content": []},
            }
        ]
    },
    {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}},
]


@pytest.mark.thorough
@fuzz(examples=60)
@given(
    fault=FAULTS,
    seed=seeds(),
    whole=st.booleans(),
    status=st.sampled_from(STATUSES),
    headers=st.sampled_from(HEADERS),
)
def test_streams(fault, seed, whole, status, headers):
    random = Random(seed)
    events = [json.dumps(event).encode() for event in EVENTS]
    if not whole or fault in JSON_FAULTS:
        which = random.randrange(len(events))
        status = 200
        headers = {}
        events[which] = damaged(fault, EVENTS[which], random)
    stream = b"".join(b"data: " + event + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    if whole and fault not in JSON_FAULTS:
        stream = fault.apply(stream, random)

    async def bench() -> Answer:
        transport = httpx.MockTransport(lambda request: reply(stream, status, headers))
        async with httpx.AsyncClient(transport=transport) as client:
            return await ask(client, Server(URL, "m"), {"messages": []}, 5.0)

    def run() -> None:
        answer = asyncio.run(bench())
        cell = figures([answer, Answer([0.1, 0.2], 2, True, 0.3)], 1.0)
        assert (
            json.loads(json.dumps(cell, allow_nan=False, ensure_ascii=False).encode())["requests"]
            == 2
        )
        assert answer.detail.isprintable() and (answer.error or answer.chunks)

    outcome("server: streams", fault.name, run)


PAGE = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 10
vllm:spec_decode_num_draft_tokens_total{engine="0"} 20
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 15
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 6
sglang:spec_accept_length{tp_rank="0"} 2.5
sglang:spec_accept_rate{tp_rank="0"} 0.5
"""
NUMBERS = ("NaN", "+Inf", "-Inf", "-3", "1e308", "1e999", "0", "x", "", "1_0", "\u0663", "9" * 400)


@fuzz(examples=48)
@given(fault=text_faults(), seed=seeds(), number=st.sampled_from(NUMBERS), label=st.booleans())
def test_metrics_pages(fault, seed, number, label):
    random = Random(seed)
    lines = PAGE.splitlines()
    at = random.randrange(1, len(lines))
    name, _, value = lines[at].rpartition(" ")
    lines[at] = (
        f"{name.replace('position=', 'position=' + number + '9')} {value}"
        if label
        else f"{name} {number}"
    )
    torn = fault.apply("\n".join(lines).encode(), random).decode(errors="replace")

    def run() -> None:
        for page in ("\n".join(lines), torn):
            for before, after in (
                (parse_metrics(page), parse_metrics(PAGE)),
                ({}, parse_metrics(page)),
            ):
                json.dumps(speculation(before, after), allow_nan=False)

    outcome("server: metrics", fault.name, run)


def test_token_ids_outside_the_vocabulary(settings):
    """In-process engines return ids; those that the target does not have cost the conversation."""
    for tokens in ([], [300], [-1], [1, None], [1.0], ["1"], [True], [10**30]):
        it = SimpleNamespace(tokens=[1, 2])
        with pytest.raises(BadReply):
            settings.accept(it, tokens, "stop")
        assert it.tokens == [1, 2]
