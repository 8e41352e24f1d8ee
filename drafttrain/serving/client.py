"""One request to an OpenAI-compatible server, timed; and what its Prometheus page says about speculation.

Formats: https://platform.openai.com/docs/api-reference/chat-streaming (server-sent events), and
https://prometheus.io/docs/instrumenting/exposition_formats (text).
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx

from drafttrain.errors import UserError


@dataclass
class Answer:
    """A request's course; times in seconds from when it was sent.

    Attributes:
        chunks: when each piece of text came. A server that speculates may send several tokens at once.
        tokens: of the answer: the server's own count, or else the number of pieces (then counted is False).
        end: when the stream ended.
        error: empty, or its kind: connect, timeout, http_STATUS, stream (broken off, or not in the format), server (an
            error sent within the stream), empty (no text).
        detail: the first line of what was said about the error.
    """

    chunks: list[float] = field(default_factory=list)
    tokens: int = 0
    counted: bool = False
    end: float = 0.0
    error: str = ""
    detail: str = ""

    @property
    def ttft(self) -> float:
        """Time to the first text; there is one, unless there was an error."""
        return self.chunks[0]

    @property
    def tpot(self) -> float | None:
        """Mean time of each token after the first piece; None where nothing followed it."""
        if self.tokens < 2 or len(self.chunks) < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1)


@dataclass
class Server:
    """A server under test. Attributes: url: without a trailing /v1; model: its name there; headers: of every request."""

    url: str
    model: str
    headers: dict[str, str] = field(default_factory=dict)


def base_url(url: str) -> str:
    """Raises UserError for what is no http address."""
    if not re.match(r"https?://[^/]+", url):
        raise UserError(f"url={url!r} is not an address; write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


async def connect(client: httpx.AsyncClient, url: str, model: str, headers: dict[str, str]) -> Server:
    """Finds the server and, unless a model is named, the one that it serves.

    Raises:
        UserError: nobody answers there, or it does not say which model it has.
    """
    url = base_url(url)
    if model:
        return Server(url, model, headers)
    try:
        reply = await client.get(f"{url}/v1/models", headers=headers)
        names = [str(one["id"]) for one in reply.raise_for_status().json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"url={url!r} does not say which models it has ({_line(error)}); is it running? if so, give --model"
        ) from error
    if not names:
        raise UserError(f"url={url!r} lists no model; give --model")
    return Server(url, names[0], headers)


async def ask(client: httpx.AsyncClient, server: Server, body: dict[str, Any]) -> Answer:
    """Sends one chat request and reads its stream. Errors are part of the answer.

    Args:
        body: messages, max_tokens and other fields; stream and model are added.
    """
    body = {"model": server.model, "stream": True, "stream_options": {"include_usage": True}, **body}
    answer, start = Answer(), time.perf_counter()
    try:
        url = f"{server.url}/v1/chat/completions"
        async with client.stream("POST", url, json=body, headers=server.headers) as reply:
            if reply.status_code != 200:
                said = (await reply.aread()).decode(errors="replace")
                answer.error, answer.detail = f"http_{reply.status_code}", said.strip().split("\n")[0][:200]
            else:
                await _read(reply, answer, start)
    except httpx.TimeoutException as error:
        answer.error, answer.detail = "timeout", _line(error)
    except httpx.ConnectError as error:
        answer.error, answer.detail = "connect", _line(error)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        answer.error, answer.detail = "stream", _line(error)
    answer.end = time.perf_counter() - start
    if not answer.error and not answer.chunks:
        answer.error, answer.detail = "empty", "the stream held no text"
    if not answer.counted:
        answer.tokens = len(answer.chunks)
    return answer


async def _read(reply: httpx.Response, answer: Answer, start: float) -> None:
    """Raises ValueError, KeyError or such for events that are not in the format, and for a stream without its end."""
    finished = False
    async for line in reply.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if event.get("error"):
            answer.error, answer.detail = "server", str(event["error"])[:200]
            return
        usage = event.get("usage")
        if usage:
            answer.tokens, answer.counted = int(usage["completion_tokens"]), True
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            # Reasoning models send their thoughts in a field of their own; they are tokens all the same.
            if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
                answer.chunks.append(time.perf_counter() - start)
            finished = finished or bool(choice.get("finish_reason"))
    if not finished:
        raise ValueError("the stream broke off before its end")


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:200]


# -- Prometheus -------------------------------------------------------------------------------------------------------

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
Samples = dict[str, list[tuple[dict[str, str], float]]]


def parse_metrics(text: str) -> Samples:
    """A Prometheus page: by name, the samples with their labels. Counters lose the ending _total."""
    samples: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found:
            try:
                value = float(found[3])
            except ValueError:
                continue
            samples[found[1].removesuffix("_total")].append((dict(_LABEL.findall(found[2] or "")), value))
    return dict(samples)


async def read_metrics(client: httpx.AsyncClient, server: Server) -> Samples:
    """The server's Prometheus page; empty where it has none."""
    try:
        reply = await client.get(f"{server.url}/metrics", headers=server.headers, timeout=10)
        return parse_metrics(reply.text) if reply.status_code == 200 else {}
    except httpx.HTTPError:
        return {}


def speculation(before: Samples, after: Samples) -> dict[str, Any]:
    """What the server says about acceptance between two looks at its page.

    vLLM counts (`vllm:spec_decode_num_drafts`, `_draft_tokens`, `_accepted_tokens`, `_accepted_tokens_per_pos`), so the
    difference is exact for all requests in between, others' included. SGLang keeps gauges of its last interval
    (`sglang:spec_accept_length`, `_accept_rate`), of which the later look is taken.

    Returns:
        source, accepted_length (bonus token included), acceptance_rate and, of vLLM, drafts and acceptance_by_depth as in
        results.json; empty where the page says nothing or nothing was drafted.
    """
    drafts = _grown(before, after, "vllm:spec_decode_num_drafts")
    if drafts:
        accepted = _grown(before, after, "vllm:spec_decode_num_accepted_tokens")
        drafted = _grown(before, after, "vllm:spec_decode_num_draft_tokens")
        joint = [count / drafts for count in _per_position(before, after)]
        above = [1.0, *joint]
        return {
            "source": "vllm counters",
            "drafts": int(drafts),
            "accepted_length": round(1 + accepted / drafts, 4),
            "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
            "acceptance_by_depth": {
                "conditional": [round(b / a, 4) if a else 0.0 for a, b in zip(above, joint, strict=False)],
                "joint": [round(share, 4) for share in joint],
            },
        }
    lengths = [value for _, value in after.get("sglang:spec_accept_length", []) if value > 0]
    if not lengths:
        return {}
    rates = [value for _, value in after.get("sglang:spec_accept_rate", [])]
    return {
        "source": "sglang gauges",
        "accepted_length": round(sum(lengths) / len(lengths), 4),
        "acceptance_rate": round(sum(rates) / len(rates), 4) if rates else None,
    }


def _grown(before: Samples, after: Samples, name: str) -> float:
    """By how much a counter grew, over all its labels (engines, models)."""
    return sum(value for _, value in after.get(name, [])) - sum(value for _, value in before.get(name, []))


def _per_position(before: Samples, after: Samples) -> list[float]:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    counts: defaultdict[int, float] = defaultdict(float)
    for sign, samples in ((1, after), (-1, before)):
        for labels, value in samples.get(name, []):
            counts[int(labels["position"])] += sign * value
    return [counts[position] for position in sorted(counts)]
