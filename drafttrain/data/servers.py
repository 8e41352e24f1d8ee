"""Requests to servers with OpenAI's API: addresses, the key, the list of models, bounded replies.

A reply is bounded in time and bytes as a whole. httpx bounds each read only, so a server that sends
a byte now and then would never be late. Therefore all requests run in one event loop, where a
deadline covers name, connection, headers and content; threads wait for their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError
from email.utils import parsedate_to_datetime
from typing import TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from drafttrain.credentials import note_variable, redact
from drafttrain.data.failures import BadReply
from drafttrain.data.openai_replies import ListedModel, ModelList
from drafttrain.errors import UserError
from drafttrain.files import Json, violation

# Of a reply, unpacked: two million token ids. Parsed, JSON takes 20 times the memory.
_MOST_BYTES = 16_000_000
_CONNECT_SECONDS = 10.0
_LIST_SECONDS = 30.0  # for the list of models
_LONGEST_PAUSE = 60.0  # seconds that a server may ask to wait before a retry
_SENT = {"Content-Type": "application/json", "Accept-Encoding": "gzip"}
# One layer of these unpacks to at most 1,032 times its bytes; httpx hands out pieces of 64 KB.
_ENCODINGS = ("", "identity", "gzip", "deflate")
# reasons of bad replies
UNREACHABLE = "no connection"
TIME_OUT = "time-out"
T = TypeVar("T")


def server_address(url: str) -> str:
    """A server's address without /v1.

    Raises UserError: not an http address.
    """
    if not re.match(r"https?://[^/]", url):
        raise UserError(f"url={url!r} is not an address; write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


def key_headers(variable: str) -> dict[str, str]:
    """The header with the API key in an environment variable; none without a key.

    Raises UserError: characters that no key has.
    """
    note_variable(variable)  # servers may repeat the key in their replies
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"the environment variable {variable} holds characters that no key has; set it again"
        )
    if key:
        return {"Authorization": f"Bearer {key}"}
    return {}


async def bounded_pieces(reply: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """The pieces of a reply's content, unpacked. Raises BadReply: more than `most` bytes."""
    encoding = reply.headers.get("content-encoding", "").lower()
    if encoding not in _ENCODINGS:
        raise BadReply("bad encoding", f"Content-Encoding: {encoding}")
    size = 0
    async for piece in reply.aiter_bytes():
        size += len(piece)
        if size > most:
            raise BadReply("endless", f"{size} bytes and no end")
        yield piece


class Requests:
    """Sends requests to servers. Threads may share it; each waits for its own reply.

    Args:
        variable: environment variable of the API key. connections: most of them at once; None for
            any number.
    """

    deadline = staticmethod(asyncio.timeout)  # of a whole request, in seconds; tests replace it

    def __init__(self, variable: str = "OPENAI_API_KEY", connections: int | None = None):
        self.variable = variable
        limits = httpx.Limits(max_connections=connections)
        self._client = httpx.AsyncClient(headers=key_headers(variable), limits=limits)
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._closed = False
        # A daemon: a process that ends does not wait for servers that hang.
        threading.Thread(
            target=self._run,
            name="requests",
            daemon=True,
        ).start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def first_model(self, url: str, seconds: float = _LIST_SECONDS) -> ListedModel:
        """The first model that a server lists. Raises as `json`."""
        seconds = min(seconds, _LIST_SECONDS)
        model = self.json("GET", f"{url}/v1/models", None, ModelList, seconds)["data"][0]
        if not model["id"].isprintable():
            raise BadReply("malformed", f"the model's name {model['id']!r} is not printable")
        return model

    def json(
        self,
        method: str,
        url: str,
        body: Json | None,
        schema: type[T],
        seconds: float,
    ) -> T:
        """Sends a request once, and returns the JSON reply.

        The reply is checked against the schema, whose keys alone are kept.

        Raises BadReply; UserError for a refused key.
        """
        with self._closing:
            if self._closed:
                raise BadReply("connection lost", "closed here")
            sent = self._reply(method, url, body, seconds)
            asked = asyncio.run_coroutine_threadsafe(sent, self._loop)
        try:
            reply, content = asked.result()
        except CancelledError as error:
            raise BadReply("connection lost", "closed here") from error
        status = reply.status_code
        shown = redact(content[:4000].decode(errors="replace"))[:500]
        if status == 401:  # the server's text may repeat the key
            fix = "name the environment variable of its key: --api-key-env"
            if self.variable:
                fix = f"set the environment variable {self.variable}"
            raise UserError(f"url={url!r} refuses the key (HTTP 401); {fix}")
        if status != 200:
            retry = status in (408, 425, 429) or status >= 500
            if 300 <= status < 400:
                shown = f"redirects to {reply.headers.get('location', '')}"
            raise BadReply(f"HTTP {status}", shown, retry, _retry_after(reply))
        try:
            return TypeAdapter(schema).validate_python(json.loads(content), strict=True)
        except ValidationError as error:
            raise BadReply("malformed", violation(error)) from error
        except (ValueError, RecursionError) as error:
            raise BadReply("not JSON", shown) from error

    async def _reply(
        self,
        method: str,
        url: str,
        body: Json | None,
        seconds: float,
    ) -> tuple[httpx.Response, bytearray]:
        """A reply and its content. Raises BadReply."""
        content = bytearray()
        text = None
        if body is not None:
            text = json.dumps(body)
        timeout = httpx.Timeout(None, connect=min(_CONNECT_SECONDS, seconds))
        stream = self._client.stream(
            method,
            url,
            content=text,
            headers=_SENT,
            timeout=timeout,
        )
        try:
            async with self.deadline(seconds), stream as reply:
                async for chunk in bounded_pieces(reply, _MOST_BYTES):
                    content += chunk
        except TimeoutError as error:
            if content:
                raise BadReply("endless", f"{len(content)} bytes and no end") from error
            raise BadReply(TIME_OUT, f"no reply in {seconds:g} s") from error
        except (
            httpx.ConnectError,
            httpx.ConnectTimeout,
            httpx.UnsupportedProtocol,
            httpx.InvalidURL,
        ) as error:
            raise BadReply(UNREACHABLE, _named(error)) from error
        except httpx.DecodingError as error:
            raise BadReply("bad encoding", _named(error), retry=True) from error
        except httpx.TransportError as error:
            raise BadReply("connection lost", _named(error), retry=True) from error
        return reply, content

    def close(self) -> None:
        """Ends waiting requests, which raise, and the connections."""

        async def end() -> None:
            waiting = asyncio.all_tasks() - {asyncio.current_task()}
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await self._client.aclose()
            self._loop.stop()

        with self._closing:
            if not self._closed:
                self._closed = True
                asyncio.run_coroutine_threadsafe(end(), self._loop)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _retry_after(reply: httpx.Response) -> float:
    """Seconds that a reply's Retry-After asks to wait, at most _LONGEST_PAUSE; 0 without one."""
    text = reply.headers.get("retry-after", "")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    if seconds > 0:
        return min(seconds, _LONGEST_PAUSE)
    return 0.0
