"""A chat completion server that fails in every way that tests need."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import ClassVar, Self

MODELS = (200, b'{"data": [{"id": "served-model"}]}')


def chat(text: str, finish: str = "stop") -> dict:
    """A chat completion as servers write it, with fields that are not read."""
    message = {"role": "assistant", "content": text}
    logprobs = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": []}]}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": finish,
        "logprobs": logprobs,
        "token_ids": [1, 2, -7, "x"],
    }
    return {
        "id": "c-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [choice],
        "usage": {"total_tokens": 3},
    }


def completion(text: str, finish: str = "stop") -> dict:
    return {
        "object": "text_completion",
        "choices": [{"index": 0, "text": text, "finish_reason": finish}],
    }


ENDLESS: Counter[str] = Counter()  # replies without an end that have begun, by `Handler.key`


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    key = ""  # what is asked for

    def reply(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content_length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close_connection = True
        self.connection.close()

    def chunk_cut_off(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"ff\r\n" + content[:20])
        self.close_connection = True

    def hang(self) -> None:
        ENDLESS[self.key] += 1
        self.server.owner.closing.wait(60)
        self.close_connection = True

    def drip(self) -> None:
        """A byte now and then, for ever."""
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        while not self.server.owner.closing.wait(0.05):
            self.wfile.write(b" ")
            self.wfile.flush()
            ENDLESS[self.key] += 1

    def slow_headers(self) -> None:
        """A header now and then, for ever."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        self.close_connection = True
        while not self.server.owner.closing.wait(0.05):
            self.wfile.write(b"X-Wait: 1\r\n")
            self.wfile.flush()
            ENDLESS[self.key] += 1

    def do_GET(self) -> None:
        self.reply(*self.server.owner.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self.server.owner.respond(self, body)
        except OSError:  # the client has left
            self.close_connection = True

    def answer(self, content: dict) -> None:
        self.reply(200, json.dumps(content).encode())

    def log_message(self, *args: object) -> None:
        pass


class _Http(ThreadingHTTPServer):
    """A server whose end closes its connections, as the end of a process does."""

    request_queue_size = 256
    daemon_threads = True
    block_on_close = False

    def __init__(self, owner: LocalServer, port: int):
        self.owner = owner
        self.accepted = []
        super().__init__(("127.0.0.1", port), Handler)

    def get_request(self) -> tuple:
        found = super().get_request()
        self.accepted.append(found[0])
        return found

    def handle_error(self, *_: object) -> None:
        """Clients that leave are no error."""

    def server_close(self) -> None:
        super().server_close()
        for connection in self.accepted:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class LocalServer:
    """A server on this machine.

    Attributes: url, port; models: status and content of the list of models; closing: set at its end.
    """

    models = MODELS
    port = 0

    def start(self) -> None:
        """Listens; again on the same port after `stop`."""
        self.closing = threading.Event()
        self.http = _Http(self, self.port)
        self.port = self.http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()

    def respond(self, handler: Handler, body: dict) -> None:
        """Replies to a request."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def status(number: int, **headers: str) -> Callable[[Handler, dict], None]:
    return lambda handler, good: handler.reply(
        number, b'{"error": {"message": "no\\nway"}}', **headers
    )


def changed(**fields: object) -> Callable[[Handler, dict], None]:
    """The good reply with other fields in its choice; ... leaves one out. `content` is the answer's text."""

    def answer(handler: Handler, good: dict) -> None:
        choice = good["choices"][0]
        for name, value in fields.items():
            holder = choice.get("message", choice) if name == "content" else choice
            key = "text" if name == "content" and "message" not in choice else name
            holder[key] = value
            if value is ...:
                del holder[key]
        handler.reply(200, json.dumps(good).encode())

    return answer


def content(text: bytes, **headers: str) -> Callable[[Handler, dict], None]:
    return lambda handler, good: handler.reply(200, text, **headers)


# Name of a fault -> how the server replies. `REASONS` names how each is counted.
FAULTS: dict[str, Callable[[Handler, dict], None]] = {
    "bad JSON": content(b'{"choices": [{"mess'),
    "HTML": content(b"<html><body>It works!</body></html>", content_type="text/html"),
    "latin-1": content('{"choices": "caf\xe9"}'.encode("latin-1")),
    "deep nesting": content(b"[" * 100_000),
    "empty": content(b""),
    "400": status(400),
    "404": status(404),
    "413": status(413),
    "429": status(429, Retry_After="0"),
    "500": status(500),
    "503": status(503, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
    "204": lambda handler, good: handler.reply(204, b""),  # a body would be read as the next reply
    "redirect": status(302, Location="http://127.0.0.1:9/v1"),
    "lone surrogates": changed(content="\ud800 half"),
    "null content": changed(content=None),
    "content of parts": changed(content=[{"type": "text", "text": "a"}]),
    "empty and cut off": changed(content="", finish_reason="length"),
    "no content": changed(content=...),
    "finish_reason missing": changed(finish_reason=...),
    "finish_reason null": changed(finish_reason=None),
    "content filter": changed(finish_reason="content_filter"),
    "empty choices": lambda handler, good: handler.reply(
        200, json.dumps({**good, "choices": []}).encode()
    ),
    "no object": content(b'["choices"]'),
    "an error with status 200": content(b'{"error": {"message": "out of memory"}}'),
    "bad gzip": content(b"no gzip at all", content_encoding="gzip"),
    "too short": lambda handler, good: handler.reply(
        200, b'{"cho', content_length="500", connection="close"
    ),
    "truncated chunk": lambda handler, good: handler.chunk_cut_off(json.dumps(good).encode()),
    "reset": lambda handler, good: handler.reset(),
    "no HTTP": lambda handler, good: (
        handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n") and handler.reset()
    ),
    "hang": lambda handler, good: handler.hang(),
    "drip": lambda handler, good: handler.drip(),
    "slow headers": lambda handler, good: handler.slow_headers(),
    # Each layer unpacks to up to 1,032 times its bytes.
    "gzip in gzip": content(
        gzip.compress(gzip.compress(bytes(10_000_000))), content_encoding="gzip, gzip"
    ),
}


_ENDLESS_FAULTS = ("hang", "drip", "slow headers")


class FaultyServer(LocalServer):
    """Answers `reply to TEXT` to a message TEXT. Faults strike by a seed, so that a run can be repeated.

    Args:
        share: of the requests that meet a fault, drawn by the request's content, its number of tries and the seed.
        faults: names of FAULTS to draw from.
        script: message -> name of a fault that every request with this last message meets.
        models: status and content of the list of models.

    Attributes: url; requests: bodies; struck: faults by name.
    """

    running: ClassVar[dict[str, FaultyServer]] = {}  # by url

    def __init__(self, share=0.0, faults=tuple(FAULTS), seed=0, script=None, models=MODELS):
        self.share, self.faults, self.seed, self.script, self.models = (
            share,
            list(faults),
            seed,
            script or {},
            models,
        )
        self.requests: list[dict] = []
        self.struck: Counter[str] = Counter()
        self.tries: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.start()
        self.running[self.url] = self

    def respond(self, handler: Handler, body: dict) -> None:
        if body.get("return_token_ids"):  # the question whether it exchanges ids
            handler.reply(400, b'{"error": "prompt must be a string"}')
            return
        handler.key = self.asks_for(body)[0]
        fault, text, finish = self.asked(body)
        good = chat(text, finish) if "messages" in body else completion(text, finish)
        if fault is None:
            handler.answer(good)
        else:
            FAULTS[fault](handler, good)

    def asked(self, body: dict) -> tuple[str | None, str, str]:
        """The fault that a request meets, and text and finish reason of its answer."""
        key, last = self.asks_for(body)
        with self.lock:
            fault = self._coming_fault(body)
            self.requests.append(body)
            self.tries[key] += 1
            self.struck.update([fault] if fault else [])
        return fault, f"reply to {last}", "length" if last == "cut" else "stop"

    @staticmethod
    def asks_for(body: dict) -> tuple[str, str]:
        """What requests with equal faults share, and the last message."""
        last = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        return json.dumps(body.get("messages", last)), last

    def never_ends(self, body: dict) -> bool:
        """Whether this request will meet a reply without an end when it is sent next."""
        return "return_token_ids" not in body and self._coming_fault(body) in _ENDLESS_FAULTS

    def _coming_fault(self, body: dict) -> str | None:
        key, last = self.asks_for(body)
        random = Random(f"{self.seed}/{self.tries[key] + 1}/{key}")
        fault = self.script.get(last)
        if fault is None and random.random() < self.share:
            fault = random.choice(self.faults)
        return fault

    def stop(self) -> None:
        del self.running[self.url]
        super().stop()
