"""One timed request to an OpenAI-compatible server, and the speculation metrics of its Prometheus
page.

Formats: https://platform.openai.com/docs/api-reference/chat-streaming (server-sent events), and
https://prometheus.io/docs/instrumenting/exposition_formats (text).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated

import httpx
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from drafttrain.data.failures import BadReply, one_line
from drafttrain.data.servers import Requests, bounded_pieces, key_headers, server_address
from drafttrain.errors import UserError, first_line
from drafttrain.files import Json, value_of, violation


class _Delta(TypedDict, total=False):
    content: str | None
    reasoning_content: str | None  # reasoning models send reasoning tokens in a field of their own
    reasoning: str | None


class _StreamChoice(TypedDict, total=False):
    delta: _Delta | None
    finish_reason: str | None


class _TokenCount(TypedDict):
    completion_tokens: Annotated[int, Field(ge=0, le=10**9)]


class _StreamEvent(TypedDict, total=False):
    choices: Annotated[list[_StreamChoice], Field(fail_fast=True)] | None
    usage: _TokenCount | None
    error: object


_LONGEST_LINE = 1_000_000  # bytes; servers send a token or a few in each
_LONGEST_STREAM = 500_000_000  # a million tokens
_LONGEST_PAGE = 16_000_000  # of metrics
_VLLM = "vllm:spec_decode_num_"
_SGLANG_PASSES = "sglang:spec_verify_calls"
_EVENT = TypeAdapter(_StreamEvent)


@dataclass
class Answer:
    """The course of a request; times in seconds since it was sent."""

    # Arrival of each piece of text. A server that speculates may send several tokens at once.
    chunks: list[float] = field(default_factory=list)
    tokens: int = 0  # of the answer
    counted: bool = False  # the server counted the tokens; else each piece counts as one
    end: float = 0.0  # when the stream ended
    # Empty, or a kind: connect, timeout, http_STATUS, stream (broken off, or malformed), server (an
    # error sent within the stream), empty (no text).
    error: str = ""
    detail: str = ""  # first line of the error's text

    @property
    def ttft(self) -> float:
        """Time to the first text; only without an error."""
        return self.chunks[0]

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first piece; None if the answer has only one piece."""
        if self.tokens < 2 or len(self.chunks) < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1)


@dataclass
class Server:
    """A server under test."""

    url: str  # without a trailing /v1
    model: str  # its name there
    headers: dict[str, str] = field(default_factory=dict)  # of every request


def connect(url: str, model: str, variable: str = "") -> Server:
    """Finds the server and, if `model` is empty, the first model that it lists.

    Args:
        variable: environment variable of the API key; '' for none.

    Raises:
        UserError: no server, or no list of models.
    """
    url = server_address(url)
    headers = {**key_headers(variable), "Accept-Encoding": "gzip"}
    if model:
        return Server(url, model, headers)
    with contextlib.closing(Requests(variable)) as requests:
        try:
            name = requests.first_model(url)["id"]
        except BadReply as bad:
            raise UserError(
                f"url={url!r} does not say which models it has ({bad}); is it running? if so, give --model"
            ) from bad
    return Server(url, name, headers)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return violation(error)
    return one_line(first_line(error))


async def ask(
    client: httpx.AsyncClient,
    server: Server,
    body: Json,
    timeout: float,
) -> Answer:
    """Sends one chat request and reads its stream. The answer reports errors.

    Args:
        body: messages, max_tokens and other fields; stream and model are added.
        timeout: seconds of the complete answer; httpx limits each read only.
    """
    body = {
        "model": server.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    url = f"{server.url}/v1/chat/completions"
    headers = {**server.headers, "Content-Type": "application/json"}
    answer = Answer()
    start = time.perf_counter()
    try:
        stream = client.stream("POST", url, content=json.dumps(body), headers=headers)
        async with asyncio.timeout(timeout), stream as reply:
            if reply.status_code == 200:
                await _read(reply, answer, start)
            else:
                answer.error = f"http_{reply.status_code}"
                answer.detail = await _first_text(reply)
    # Of the whole answer; httpx's limits of a read are below.
    except TimeoutError:
        return Answer(
            error="timeout",
            detail=f"no end after {timeout:g} s",
            end=timeout,
        )
    except (httpx.HTTPError, httpx.InvalidURL, BadReply, ValueError, RecursionError) as error:
        answer.detail = _reason(error)
        if isinstance(error, httpx.TimeoutException):
            answer.error = "timeout"
        elif isinstance(error, (httpx.ConnectError, httpx.InvalidURL)):
            answer.error = "connect"
        elif not answer.error:
            answer.error = "stream"
    answer.end = time.perf_counter() - start
    most = body.get("max_tokens")
    if answer.counted and most and answer.tokens > most:
        answer.error = "server"
        answer.detail = f"completion_tokens={answer.tokens}, and {most} were asked for"
    if not answer.error and not answer.chunks:
        answer.error = "empty"
        answer.detail = "the stream held no text"
    if not answer.counted:
        answer.tokens = len(answer.chunks)
    return answer


async def _read(reply: httpx.Response, answer: Answer, start: float) -> None:
    """Reads a stream into an answer.

    Raises:
        ValueError: a malformed event, or a stream without its end.
    """
    finished = False
    async for raw in _lines(reply):
        line = raw.decode(errors="replace")  # every event stream is UTF-8
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        event = _EVENT.validate_python(json.loads(data), strict=True)
        if event.get("error"):
            answer.error = "server"
            answer.detail = one_line(str(event["error"]))
            return
        usage = event.get("usage")
        if usage:
            answer.tokens = usage["completion_tokens"]
            answer.counted = True
        for choice in value_of(event, "choices", []):
            delta = value_of(choice, "delta", {})
            if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
                answer.chunks.append(time.perf_counter() - start)
            if choice.get("finish_reason"):
                finished = True
    if not finished:
        raise ValueError("the stream broke off before its end")


async def _lines(reply: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a reply. Raises BadReply: a line, or all of them, without an end."""
    begun = b""  # of a line
    async for piece in bounded_pieces(reply, _LONGEST_STREAM):
        # The last part has no line end yet.
        *lines, begun = (begun + piece).split(b"\n")
        for line in lines:
            yield line
        if len(begun) > _LONGEST_LINE:
            raise BadReply("endless", f"a line of {len(begun)} bytes and no end")
    yield begun


async def _first_text(reply: httpx.Response) -> str:
    """The first line with text of a reply that is an error. Its end is not waited for."""
    read = 0
    async for line in _lines(reply):
        if line.strip():
            return one_line(line.decode(errors="replace"))
        read += len(line) + 1
        if read > _LONGEST_LINE:
            break
    return ""


# -- Prometheus ------------------------------------------------------------------------------------

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MOST_COUNT = 1e15  # of a counter; what is larger is damaged
Samples = dict[str, list[tuple[dict[str, str], float]]]  # by name: labels and value of each sample


def parse_metrics(text: str) -> Samples:
    """Parses a Prometheus page; removes the ending _total of counters."""
    samples: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if not found:
            continue
        name, labels, number = found.groups(default="")
        try:
            value = float(number)
        except ValueError:
            continue
        if abs(value) < _MOST_COUNT:  # so not NaN
            samples[name.removesuffix("_total")].append((dict(_LABEL.findall(labels)), value))
    return dict(samples)


async def read_metrics(client: httpx.AsyncClient, server: Server) -> Samples:
    """The samples of the server's Prometheus page; empty without one."""
    try:
        stream = client.stream("GET", f"{server.url}/metrics", headers=server.headers)
        async with asyncio.timeout(10), stream as reply:
            if reply.status_code != 200:
                return {}
            page = b"".join([piece async for piece in bounded_pieces(reply, _LONGEST_PAGE)])
    except (httpx.HTTPError, httpx.InvalidURL, BadReply, TimeoutError):
        return {}
    return parse_metrics(page.decode(errors="replace"))


def speculation(before: Samples, after: Samples) -> Json:
    """Acceptance between two readings of a server's Prometheus page, over all its users' requests.

    vLLM counts passes, drafted and accepted tokens, the latter by depth too
    (`vllm:spec_decode_num_drafts`, `_draft_tokens`, `_accepted_tokens`, `_accepted_tokens_per_pos`).
    SGLang counts the passes and tokens of requests that have ended
    (`sglang:spec_verify_calls_total`, `generation_tokens_total`, `num_requests_total`).

    Returns:
        source, drafts (passes over drafted tokens), accepted_length (bonus token included),
        acceptance_rate and acceptance_by_depth as in results.json (vLLM); empty if the page has no
        such figures or nothing was drafted.
    """
    # Without a first reading the counters hold all requests since the server began.
    if not before or passes(before, after) <= 0:
        return {}
    if increase(before, after, f"{_VLLM}drafts") > 0:
        return _of_vllm(before, after)
    drafts = increase(before, after, _SGLANG_PASSES)
    tokens = increase(before, after, "sglang:generation_tokens")
    # A request's first token comes from its prompt's pass.
    tokens -= increase(before, after, "sglang:num_requests")
    return {
        "source": "sglang counters",
        "drafts": int(drafts),
        "accepted_length": round(tokens / drafts, 4),
        "acceptance_rate": None,
    }


def passes(before: Samples, after: Samples) -> float:
    """Passes over drafted tokens between two readings of the page; less than 0 if the server began anew."""
    return increase(before, after, f"{_VLLM}drafts") + increase(before, after, _SGLANG_PASSES)


def _of_vllm(before: Samples, after: Samples) -> Json:
    drafts = increase(before, after, f"{_VLLM}drafts")
    drafted = increase(before, after, f"{_VLLM}draft_tokens")
    accepted = increase(before, after, f"{_VLLM}accepted_tokens")
    rate = None
    if drafted:
        rate = round(accepted / drafted, 4)

    joint = []  # share of drafts whose first k tokens were accepted
    conditional = []  # share of those that accepted the tokens before
    above = 1.0
    counts: defaultdict[int, float] = defaultdict(float)  # by position
    for sign, samples in ((1, after), (-1, before)):
        for labels, value in samples.get(f"{_VLLM}accepted_tokens_per_pos", []):
            if re.fullmatch("[0-9]{1,4}", labels.get("position", "")):
                counts[int(labels["position"])] += sign * value
    # A counter of position k counts the drafts of which at least k + 1 tokens were accepted.
    for position in sorted(counts):
        share = counts[position] / drafts
        joint.append(round(share, 4))
        kept = 0.0
        if above:
            kept = round(share / above, 4)
        conditional.append(kept)
        above = share
    return {
        "source": "vllm counters",
        "drafts": int(drafts),
        "accepted_length": round(1 + accepted / drafts, 4),
        "acceptance_rate": rate,
        "acceptance_by_depth": {"conditional": conditional, "joint": joint},
    }


def increase(before: Samples, after: Samples, name: str) -> float:
    """Increase of a counter, over all labels (engines, models)."""
    now = sum(value for _, value in after.get(name, []))
    return now - sum(value for _, value in before.get(name, []))
