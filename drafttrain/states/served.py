"""States of the target from vLLM servers that `drafttrain serve-target` started.

    client                                     server (vLLM, its own processes and GPUs)
    token ids of a row  ---- HTTP ---->        one forward of the target
    name of the states  <--- HTTP -----        states of the announced layers  ----+
    reads and deletes   <---- a file of a folder that both sides see, or an object of a Mooncake store

This file divides rows among servers and tries failed ones again; proven_server.py asks one server.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from drafttrain.credentials import redact
from drafttrain.data.failures import BadReply
from drafttrain.data.row_images import RowImages
from drafttrain.data.servers import TIME_OUT, UNREACHABLE, Requests, server_address
from drafttrain.errors import UserError
from drafttrain.images import Picture
from drafttrain.states.origins import Origin, Row, RowStates
from drafttrain.states.proven_server import ProvenServer
from drafttrain.states.transports.transport import StatesTransport
from drafttrain.target import Target

_IN_FLIGHT = 16  # requests to a server at once, which it runs together
_TIMEOUT = 600.0  # seconds of a row's forward, queue included
_PATIENCE = 900.0  # seconds that a server may be away; large targets take minutes to start again
_FIRST_PATIENCE = 5.0  # the same of a server that has never answered: it is not there
_BAD_STATES = 4  # tries of a row whose states arrive damaged
# seconds before a server is asked again; doubles with each failure
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
# Failures of a row's states; others are the server's.
_DAMAGE = ("torn file", "no file", "torn object", "no object", "other tokens", "not finite")

T = TypeVar("T")


class Served(Origin):
    """States from vLLM servers. Threads may share it; each request blocks its thread.

    Args:
        urls: of the servers, with or without /v1. A request goes to the one with the fewest in
            flight.
        shell: the target with embedding, final norm and head; its layers are not used.
        feature_layers: of the features; see `Target.forward`.
        states_dir: the servers' folder of states as this machine sees it; '' for the same path as
            theirs.
        dtype: to which states are rounded; None for the servers'.
        timeout: seconds of an answer. patience: seconds that servers which have answered may be
            away before a request fails.

    Attributes:
        images: of the rows, by index; None if all are text.

    Raises:
        UserError: no servers, or something that is not an address.
    """

    name = "streamed"
    reads = True

    def __init__(
        self,
        urls: Sequence[str],
        shell: Target,
        feature_layers: Sequence[int],
        states_dir: str = "",
        dtype: torch.dtype | None = None,
        timeout: float = _TIMEOUT,
        patience: float = _PATIENCE,
    ):
        # Without urls, the empty one is refused.
        addresses = [server_address(url) for url in urls or [""]]
        self._requests = Requests()
        self.shell = shell
        self.layers = tuple(feature_layers)
        self.servers = [
            ProvenServer(url, shell, self.layers, states_dir, self._requests, timeout)
            # One that is named twice is asked as one.
            for url in dict.fromkeys(addresses)
        ]
        self.threads = _IN_FLIGHT * len(self.servers)
        self.dtype = dtype
        self.patience = patience
        self.images: RowImages | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        # Retries must not draw from the generator that checkpoints hold.
        self._chance = random.Random()

    @property
    def proofs(self) -> list[str]:
        """A line about each proven server."""
        return [
            f"{redact(server.url)} serves {self.shell.name!r} in {server.dtype}: its log-probabilities "
            f"differ by {server.gap:.2g} nats from those of the target's head over its states"
            for server in self.servers
            if server.proven
        ]

    def prove(self) -> None:
        """Proves every server that is not proven yet; `request` proves one when it first uses it.

        Raises:
            UserError: a server cannot be reached, hands out no states, or is not the shell's
                target; with the figure.
        """
        for server in self.servers:
            self._retried(ProvenServer.prove_once, [server])

    def states(self, rows: Sequence[Row]) -> list[RowStates | None]:
        """The states of all but the last token of each row, which needs none."""
        return [row.cut(self._read(row)) for row in rows]

    def _read(self, row: Row) -> RowStates:
        pictures: list[Picture] = []
        if self.images is not None:
            pictures = self.images.pictures(row.index)
        if not pictures:
            return self.request(row.tokens[:-1].tolist())
        # Sent as text, whose end the tokenizer may split otherwise where a token is missing.
        found = self.request(row.tokens.tolist(), pictures)
        assert isinstance(found.last, Tensor)
        return RowStates(found.features[:-1], found.last[:-1])

    def request(self, tokens: list[int], pictures: Sequence[Picture] = ()) -> RowStates:
        """The states of all n tokens of a row, on the CPU.

        Args:
            pictures: that the tokens hold placeholders of, in order.

        Raises:
            UserError: after the retries, or at once where none can help; names the server, what
                came and the fix.
        """
        # No server takes an empty prompt.
        if not tokens:
            states = torch.zeros(0, self.shell.hidden_size, dtype=self.shell.embed_weight.dtype)
            return RowStates(states.repeat(1, len(self.layers)), states)
        found = self._retried(lambda server: server.states(tokens, pictures), self.servers)
        if self.dtype is not None:
            assert isinstance(found.last, Tensor)
            found = RowStates(found.features.to(self.dtype), found.last.to(self.dtype))
        return found

    def close(self) -> None:
        """Ends waiting requests, which raise, and the connections."""
        self._closing.set()
        self._requests.close()

    # -- retries -----------------------------------------------------------------------------------

    def _retried(self, ask: Callable[[ProvenServer], T], servers: Sequence[ProvenServer]) -> T:
        """The result of `ask(server)`, tried again while that may help, on all servers in turn."""
        damaged = 0
        began = time.monotonic()
        first_failure: float | None = None
        while True:
            server = self._next(servers)
            try:
                with self._in_flight(server):
                    return ask(server)
            except BadReply as bad:
                now = time.monotonic()
                if first_failure is None:
                    first_failure = now
                patience = 0.0
                if bad.reason in _DAMAGE:
                    damaged += 1
                    hopeless = not bad.retry or damaged == _BAD_STATES
                elif bad.reason == UNREACHABLE and not server.model:
                    # Nothing has ever answered there.
                    hopeless = now - began > min(_FIRST_PATIENCE, self.patience)
                elif bad.retry or bad.reason in (UNREACHABLE, TIME_OUT):
                    # The server is away, for a while perhaps.
                    patience = self.patience
                    hopeless = now - first_failure > patience
                else:
                    hopeless = True
                if hopeless or self._closing.is_set():
                    fix = _fix(bad, server.transport, patience)
                    raise UserError(f"url={server.url!r}: {bad}{fix}") from bad

    def _next(self, servers: Sequence[ProvenServer]) -> ProvenServer:
        """The least busy of the servers that do not rest after a failure; waits for one of them."""
        while True:
            with self._lock:
                now = time.monotonic()
                awake = [server for server in servers if server.rests_until <= now]
                # A run that ends does not wait for servers: its requests fail.
                if self._closing.is_set() and not awake:
                    awake = list(servers)
                if awake:
                    least = min(server.running for server in awake)
                    idlest = [server for server in awake if server.running == least]
                    server = self._chance.choice(idlest)
                    server.running += 1
                    return server
                pause = min(server.rests_until for server in servers) - now
            self._closing.wait(pause)

    @contextmanager
    def _in_flight(self, server: ProvenServer) -> Iterator[None]:
        """Counts the request out again, and lets a server rest after a failure."""
        try:
            yield
        except BadReply as bad:
            with self._lock:
                now = time.monotonic()
                # Requests that fail together are one failure.
                if server.rests_until <= now:
                    server.failures += 1
                doubled = _FIRST_PAUSE * 2 ** min(server.failures - 1, 10)
                pause = min(doubled, _LONGEST_PAUSE) * self._chance.uniform(0.75, 1.25)
                server.rests_until = now + max(bad.pause, pause)
                # What comes back after an outage may be another model.
                if bad.reason in (UNREACHABLE, "connection lost"):
                    server.proven = False
            raise
        else:
            server.failures = 0
        finally:
            with self._lock:
                server.running -= 1


def _fix(bad: BadReply, transport: StatesTransport | None, patience: float) -> str:
    """Ends the error of a request that failed for good."""
    if bad.reason == UNREACHABLE and not patience:
        return "; start it with drafttrain serve-target, or correct the address"
    if patience:
        return f" (asked for {patience:.0f} s); start it again with the same serve-target command, and run this again"
    if bad.reason == "not finite":
        return " in every try; serve the target in bfloat16 or float32: -- --dtype bfloat16"
    if bad.reason in _DAMAGE and transport is not None:
        return f" in every try; {transport.fix}, and see the server's log"
    return "; see the server's log"
