"""States of the target from vLLM servers that `drafttrain serve-target` started.

    client                                     server (vLLM, its own processes and GPUs)
    token ids of a row  ---- HTTP ---->        one forward of the target
    name of the states  <--- HTTP -----        states of the announced layers  ----+
    reads and deletes   <---- a file of a folder that both sides see, or an object of a Mooncake store

A server is proven before its first row is used, and again after it was away: the log-probabilities
that it returns must be those of the shell's head over the states that it hands out. The shell is
the target without its layers, see `load_shell`.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import httpx
import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from drafttrain.data.backends import TIME_OUT, UNREACHABLE, key_headers, send_json
from drafttrain.data.failures import BadReply
from drafttrain.errors import UserError
from drafttrain.files import first_change
from drafttrain.states.origins import Origin, Row, RowStates
from drafttrain.states.transports import open_transport
from drafttrain.states.transports.transport import (
    Announced,
    FileReply,
    StatesTransport,
    StoreReply,
)
from drafttrain.target import Target
from drafttrain.target.attention import LAST
from drafttrain.target.loading import is_finite

_IN_FLIGHT = 16  # requests at once, which a server runs together
_TIMEOUT = 600.0  # seconds of a row's forward, queue included
_PATIENCE = 900.0  # seconds that a server may be away; large targets take minutes to start
_BAD_STATES = 4  # tries of a row whose states arrive damaged
# seconds before a server is asked again; doubles with each failure
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
_TOP = 8  # most likely tokens of each probed position
_PROBE_IDS = 48
_PROBE_TEXT = "Prove it: the state of 1,024 tokens — naïve café, 東京, здравствуй, def f(x): return x**2\n\tend."
_LEAST_GAP = 5e-3  # nats; kernels of float32 differ by less
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Failures of a row's states; others are the server's.
_DAMAGE = ("torn file", "no file", "torn object", "no object", "other tokens", "not finite")

T = TypeVar("T")


class _Served(TypedDict):
    id: str
    max_model_len: NotRequired[int | None]


class _ServedModels(TypedDict):
    data: Annotated[list[_Served], Field(min_length=1)]


class _Logprob(TypedDict):
    logprob: float


class _Choice(TypedDict):
    # Per token of the prompt: id -> its log-probability after the tokens before. None for the
    # first, and if not asked for.
    prompt_logprobs: NotRequired[list[dict[str, _Logprob] | None] | None]


class _StatesReply(TypedDict):
    choices: Annotated[list[_Choice], Field(min_length=1)]
    kv_transfer_params: NotRequired[FileReply | StoreReply | None]


@dataclass
class _StateServer:
    """A server and what is known about it. Attributes without a comment are set by the proof."""

    url: str  # without /v1
    model: str = ""
    longest: int | None = None  # tokens of a row, one for the answer included
    transport: StatesTransport | None = None
    gap: float = 0.0
    dtype: str = ""  # of its states
    proven: bool = False
    running: int = 0  # requests in flight
    failures: int = 0  # in a row
    rests_until: float = 0.0  # time.monotonic() before which it is not asked
    proving: threading.Lock = field(default_factory=threading.Lock)


class StateClient:
    """Asks servers for the target's states of token rows. Threads may share it; each request blocks
    its thread.

    Args:
        urls: of the servers, with or without /v1. A request goes to the one with the fewest in
            flight.
        shell: the target with embedding, final norm and head; its layers are not used.
        feature_layers: of the features; see `Target.forward`.
        states_dir: the servers' folder of states as this machine sees it; '' for the same path as
            theirs.
        timeout: seconds of an answer. patience: seconds that all servers may be away before a
            request fails.

    Attributes:
        gaps: proven servers -> mean difference of their log-probabilities from the shell's, in
            nats.

    Raises:
        UserError: no servers, or something that is not an address.
    """

    def __init__(
        self,
        urls: Sequence[str],
        shell: Target,
        feature_layers: Sequence[int],
        states_dir: str = "",
        timeout: float = _TIMEOUT,
        patience: float = _PATIENCE,
    ):
        addresses: dict[str, _StateServer] = {}
        for url in urls or [""]:
            if not re.match(r"https?://[^/]", url):
                raise UserError(f"url={url!r} is not an address; write http://HOST:PORT")
            address = url.rstrip("/").removesuffix("/v1")
            addresses[address] = _StateServer(address)
        self.servers = list(addresses.values())
        self.shell = shell
        self.layers = tuple(feature_layers)
        self.states_dir = states_dir
        self.timeout = timeout
        self.patience = patience
        headers = key_headers("OPENAI_API_KEY")
        self._http = httpx.Client(headers=headers, limits=httpx.Limits(max_connections=None))
        self._lock = threading.Lock()
        self._closing = threading.Event()
        # Retries must not draw from the generator that checkpoints hold.
        self._chance = random.Random()

    @property
    def gaps(self) -> dict[str, float]:
        return {server.url: server.gap for server in self.servers if server.proven}

    @property
    def proofs(self) -> list[str]:
        """A line about each proven server."""
        return [
            f"{server.url} serves {self.shell.name!r} in {server.dtype}: its log-probabilities differ by {server.gap:.2g} nats "
            "from those of the target's head over its states"
            for server in self.servers
            if server.proven
        ]

    def prove(self) -> None:
        """Proves every server that has not been proven yet; `request` does so when it first uses
        one.

        Raises:
            UserError: a server cannot be reached, hands out no states, or is not the shell's
                target; with the figure.
        """
        for server in self.servers:
            self._retried(self._prove_once, [server])

    def request(self, tokens: Sequence[int]) -> RowStates:
        """The states of all n tokens of a row, on the CPU, in the server's dtype.

        A row's last token needs none in training: leave it out.

        Raises:
            UserError: after the retries, or at once where none can help; names the server, what
                came and the fix.
        """
        row = list(tokens)
        if not row:
            states = torch.zeros(0, self.shell.hidden_size, dtype=self.shell.embed_weight.dtype)
            return RowStates(states.repeat(1, len(self.layers)), states)

        def ask(server: _StateServer) -> RowStates:
            self._prove_once(server)
            states, _ = self._ask(server, row)
            return self._row_states(server, states)

        return self._retried(ask, self.servers)

    def close(self) -> None:
        """Ends waiting requests, which raise, and the connections."""
        self._closing.set()
        self._http.close()

    # -- retries -----------------------------------------------------------------------------------

    def _retried(self, ask: Callable[[_StateServer], T], servers: Sequence[_StateServer]) -> T:
        """The result of `ask(server)`, tried again while that may help, on all servers in turn."""
        damaged = 0
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
                elif bad.retry or bad.reason in (UNREACHABLE, TIME_OUT):
                    # The server is away, for a while perhaps.
                    patience = self.patience
                    hopeless = now - first_failure > patience
                else:
                    hopeless = True
                if hopeless or self._closing.is_set():
                    fix = _fix(bad, server.transport, patience)
                    raise UserError(f"url={server.url!r}: {bad}{fix}") from bad

    def _next(self, servers: Sequence[_StateServer]) -> _StateServer:
        """The least busy of the servers that do not rest after a failure; waits for one of them."""
        while True:
            with self._lock:
                now = time.monotonic()
                awake = [server for server in servers if server.rests_until <= now]
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
    def _in_flight(self, server: _StateServer) -> Iterator[None]:
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

    # -- a request ---------------------------------------------------------------------------------

    def _ask(
        self,
        server: _StateServer,
        prompt: list[int] | str,
        logprobs: int | None = None,
    ) -> tuple[dict[str, Tensor], list[dict[str, _Logprob] | None]]:
        """Asks once for hidden_states [n, layers, h], token_ids [n] and log-probabilities.

        Args:
            prompt: token ids, or a text of the proof.
            logprobs: likeliest tokens per position to get log-probabilities of; None for none.

        Raises:
            BadReply: no states this time. UserError: a row too long, or a server without states.
        """
        row = None
        if not isinstance(prompt, str):
            row = prompt
        if row is not None and server.longest is not None and len(row) >= server.longest:
            raise UserError(
                f"url={server.url!r} reads rows of at most {server.longest - 1} tokens, one has {len(row)}; start it with "
                f"-- --max-model-len {len(row) + 1}, or shorten the rows"
            )
        body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        if logprobs is not None:
            body["prompt_logprobs"] = logprobs
        address = f"{server.url}/v1/completions"
        reply = send_json(self._http, "POST", address, body, _StatesReply, self.timeout)
        named = reply.get("kv_transfer_params")
        if not named:
            raise UserError(f"url={server.url!r} hands out no states; {self._start}")
        if server.transport is None or not server.proven:
            server.transport = open_transport(
                named, self.states_dir, server.url, self._command, server.transport
            )
            self._check_record(server, server.transport.record)
        states = server.transport.take(named, self.timeout)
        self._check(server, states, row)
        found = reply["choices"][0].get("prompt_logprobs")
        if found is None:
            found = []
        return states, found

    @property
    def _start(self) -> str:
        return f"start it with: {self._command}"

    @property
    def _command(self) -> str:
        return f"drafttrain serve-target --target {self.shell.name}"

    def _check(
        self,
        server: _StateServer,
        states: Mapping[str, Tensor],
        row: list[int] | None,
    ) -> None:
        """Checks states against their row and the server's record.

        Raises:
            BadReply: states of another row, or not finite. UserError: of another shape than
                announced.
        """
        assert server.transport is not None
        found = states["hidden_states"]
        ids = states["token_ids"]
        layers = server.transport.record["layers"]
        width = self.shell.hidden_size
        if found.shape != (len(ids), len(layers), width) or found.dtype not in _DTYPES:
            raise UserError(
                f"url={server.url!r} hands out states {list(found.shape)} {found.dtype} of {len(ids)} tokens, its record "
                f"{server.transport.where!r} announces {len(layers)} layers of width {width}; {self._start}"
            )
        if row is not None and ids.tolist() != row:
            raise BadReply(
                "other tokens",
                f"states of {len(ids)} tokens that are not the row's",
                retry=True,
            )
        if not is_finite(found):
            raise BadReply(
                "not finite",
                f"states of {len(ids)} tokens hold NaN or infinity",
                retry=True,
            )

    @torch.no_grad()
    def _row_states(self, server: _StateServer, states: Mapping[str, Tensor]) -> RowStates:
        assert server.transport is not None
        found = states["hidden_states"]  # [n, layers, h]
        held = server.transport.record["layers"]
        last = _normed(self.shell, found).to("cpu", found.dtype)  # [n, h]
        parts = [last[:, :0]]  # a drafter may read no layer
        for layer in self.layers:
            if layer == LAST:
                parts.append(last)
            else:
                parts.append(found[:, held.index(layer)])
        return RowStates(torch.cat(parts, dim=-1), last.clone())

    # -- the proof ---------------------------------------------------------------------------------

    def _prove_once(self, server: _StateServer) -> None:
        """Proves a server that has not been proven since it started; other threads wait meanwhile."""
        with server.proving:
            if not server.proven or (server.transport and not server.transport.is_current()):
                self._prove(server)

    def _prove(self, server: _StateServer) -> None:
        """Compares a server with the shell.

        Raises:
            BadReply: it does not answer. UserError: it serves another target.
        """
        address = f"{server.url}/v1/models"
        seconds = min(30.0, self.timeout)
        listed = send_json(self._http, "GET", address, None, _ServedModels, seconds)
        model = listed["data"][0]
        server.model = model["id"]
        server.longest = model.get("max_model_len")
        # So its record is read again: it may have been started with other layers.
        server.proven = False
        rows: list[list[int] | str] = [_spread_ids(self.shell.vocab_size)]
        if self.shell.tokenizer is not None:
            rows.append(_PROBE_TEXT)
        gaps = []
        allowed = 0.0
        for row in rows:
            states, logprobs = self._ask(server, row, _TOP)
            if isinstance(row, str):
                self._check_tokens(server, states["token_ids"].tolist(), row)
            gap, allowed = head_gap(self.shell, states["hidden_states"], logprobs)
            gaps.append(gap)
            server.dtype = str(states["hidden_states"].dtype).removeprefix("torch.")
            self._check_embedding(server, states)
        server.gap = max(gaps)
        if not server.gap <= allowed:
            raise self._refused(
                server,
                f"its log-probabilities differ from those of the target's head over its states by {server.gap:.3g} nats on "
                f"average, and {allowed:.2g} are allowed: another model, other layers or another final norm",
            )
        server.proven = True

    def _check_tokens(self, server: _StateServer, ids: list[int], text: str) -> None:
        """Raises UserError: the server tokenizes a text otherwise than the target does."""
        wanted = self.shell.tokenizer(text)["input_ids"]
        if ids == wanted:
            return
        pairs = zip(ids, wanted, strict=False)
        differing = (number for number, (own, theirs) in enumerate(pairs) if own != theirs)
        raise self._refused(
            server,
            f"its tokenizer makes {len(ids)} tokens of a text, the target's {len(wanted)}, and they differ from token "
            f"{next(differing, 0)} on",
        )

    def _refused(self, server: _StateServer, why: str) -> UserError:
        return UserError(
            f"url={server.url!r} does not serve target {self.shell.name!r}: {why}; {self._start}"
        )

    def _check_record(self, server: _StateServer, record: Announced) -> None:
        """Raises UserError: the record announces another target, or lacks a layer."""
        own = self.shell.identity()
        theirs = dict(record["target"])
        theirs["name"] = own["name"]  # a path or an id, which may differ
        changed = first_change(theirs, own)
        if changed:
            changed = changed.replace("this run has", "the target has")
            raise self._refused(server, f"its record announces {changed}")
        layers = record["layers"]
        held = set(layers)
        wanted = set(self.layers) - {LAST} | {self.shell.num_layers}
        ascending = layers == sorted(held) and layers[-1] == self.shell.num_layers
        if not ascending or not wanted <= held:
            named = ",".join(map(str, sorted(wanted)))
            raise UserError(
                f"url={server.url!r} hands out layers {','.join(map(str, layers))}, and {named} are needed; {self._start} "
                f"--layers {named}"
            )

    def _check_embedding(self, server: _StateServer, states: Mapping[str, Tensor]) -> None:
        """Raises UserError: layer 0 is asked for, and its input is not the shell's embedding."""
        assert server.transport is not None
        if server.transport.record["layers"][0] != 0:
            return
        found = states["hidden_states"][:, 0].float()  # [n, h]
        ours = self.shell.embed(states["token_ids"].to(self.shell.device)).detach().cpu().float()
        apart = float((found - ours).norm() / ours.norm())
        if not apart <= 2 * torch.finfo(states["hidden_states"].dtype).eps + 1e-5:
            raise self._refused(server, f"its input embedding differs by {apart:.2g} of its norm")


class Served(Origin):
    """States from vLLM servers.

    Args:
        dtype: to which states are rounded; None for the server's.
    """

    name = "streamed"
    reads = True

    def __init__(self, client: StateClient, dtype: torch.dtype | None = None):
        self.client = client
        self.dtype = dtype
        self.threads = _IN_FLIGHT * len(client.servers)
        self.once: dict[int, RowStates | None] = {}  # rows that are read once

    def states(self, rows: Sequence[Row]) -> list[RowStates | None]:
        return [row.cut(self._ask(row)) for row in rows]

    def _ask(self, row: Row) -> RowStates:
        known = self.once.get(row.index)
        if known is not None:
            return known
        # The last token's state is not needed.
        states = self.client.request(row.tokens[:-1].tolist())
        if self.dtype is not None:
            assert isinstance(states.last, Tensor)
            states = RowStates(states.features.to(self.dtype), states.last.to(self.dtype))
        if row.index in self.once:
            self.once[row.index] = states
        return states

    def read_once(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.once.setdefault(index)

    def close(self) -> None:
        self.client.close()


def _fix(bad: BadReply, transport: StatesTransport | None, patience: float) -> str:
    """Ends the error of a request that failed for good."""
    if patience:
        return f" (asked for {patience:.0f} s); start it again with the same serve-target command, and run this again"
    if bad.reason == "not finite":
        return " in every try; serve the target in bfloat16 or float32: -- --dtype bfloat16"
    if bad.reason in _DAMAGE and transport is not None:
        return f" in every try; {transport.fix}, and see the server's log"
    return "; see the server's log"


def _spread_ids(vocab_size: int) -> list[int]:
    """Token ids from all over the vocabulary, in an order that looks random and is always the same."""
    chosen = torch.linspace(0, vocab_size - 1, min(_PROBE_IDS, vocab_size)).long()
    return chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))].tolist()


@torch.no_grad()
def head_gap(
    shell: Target,
    states: Tensor,
    logprobs: Sequence[Mapping[str, _Logprob] | None],
) -> tuple[float, float]:
    """How far a server's log-probabilities are from those of the shell's head over its states.

    Args:
        states: [n, layers, h]; the last layer's output before the final norm comes last.
        logprobs: per token the most likely ids at its place, and itself; None for the first.

    Returns:
        The mean difference in nats, and the largest that rounding explains: the server's logits
            have the dtype of its states.
    """
    logits = shell.head(_normed(shell, states)).float().cpu()  # [n, v]
    ours = logits.log_softmax(-1)
    positions = list[int]()
    tokens = list[int]()
    theirs = list[float]()
    # The state at a token predicts the next one.
    for position, entries in zip(range(len(ours)), logprobs[1:], strict=False):
        for token, entry in (entries or {}).items():
            if token.isdecimal() and int(token) < ours.shape[-1]:
                positions.append(position)
                tokens.append(int(token))
                theirs.append(entry["logprob"])
    if not tokens:
        return float("inf"), 0.0

    gap = (ours[positions, tokens] - torch.tensor(theirs)).abs().mean()
    eps = max(torch.finfo(states.dtype).eps, torch.finfo(shell.embed_weight.dtype).eps)
    rounding = float(logits.abs().amax(-1).mean()) * eps
    return float(gap), max(_LEAST_GAP, rounding)


def _normed(shell: Target, states: Tensor) -> Tensor:
    """States [n, layers, h], the last layer before the final norm -> [n, h] behind it."""
    last = states[:, -1].to(shell.device, shell.embed_weight.dtype)
    return shell.final_norm(last)  # type: ignore[attr-defined]  # of TargetShell
