"""A vLLM server of states: its requests, and the proof that it serves the target.

A server is proven before its first row is used, and again after it was away: the log-probabilities
that it returns must be those of the shell's head over the states that it writes. The shell is the
target without its layers, see `load_shell`.

    rows of text     /v1/completions         token ids
    with images      /v1/chat/completions    pictures, and the row's text with their markers

`/v1/completions` would drop the images without a word. A chat has one message and a template that
writes its text as it is; the token ids that the server reads must be the row's.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from drafttrain.data.chat import decode, shared_length
from drafttrain.data.failures import BadReply
from drafttrain.data.image_parts import image_part, text_part, with_uris
from drafttrain.data.servers import Requests
from drafttrain.errors import UserError
from drafttrain.files import Json, first_change, value_of
from drafttrain.images import Picture
from drafttrain.progress import counted
from drafttrain.states.origins import RowStates
from drafttrain.states.transports import open_transport
from drafttrain.states.transports.transport import FileReply, StatesTransport, StoreReply
from drafttrain.target import Target
from drafttrain.target.attention import LAST
from drafttrain.target.loading import is_finite

_TOP = 8  # most likely tokens of each probed position
_PROBE_IDS = 48
_PROBE_TEXT = "Prove it: the state of 1,024 tokens — naïve café, 東京, здравствуй, def f(x): return x**2\n\tend."
_LEAST_GAP = 5e-3  # nats; kernels of float32 differ by less
# vLLM takes pictures out of the message, and the text has their markers.
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Logprob(TypedDict):
    logprob: float


class _Choice(TypedDict):
    # Per token of the prompt: id -> its log-probability after the tokens before. None for the
    # first, and if not asked for.
    prompt_logprobs: NotRequired[list[dict[str, _Logprob] | None] | None]


class _StatesReply(_Choice):
    """A completion, or a chat, which has the choice's keys itself."""

    choices: Annotated[list[_Choice], Field(min_length=1)]
    prompt_token_ids: NotRequired[list[int] | None]  # of a chat
    kv_transfer_params: NotRequired[FileReply | StoreReply | None]


@dataclass
class ProvenServer:
    """A server and what is known about it.

    Args:
        url: without /v1. shell: with embedding, final norm and head.
        layers: of the features, see `Target.forward`.
        states_dir: the server's folder of states as this machine sees it; '' for its own path.
        requests: sends them. timeout: seconds of an answer.

    Attributes:
        model: its name in requests. longest: tokens of a row, one for the answer included.
        transport: how its states arrive. dtype: of its states.
        gap: mean difference of its log-probabilities from the shell's, in nats.
        proven: the attributes above are those of the server that answers now.
        sees: a row with images has been proven too.
        running, failures, rests_until: requests in flight, failures in a row, and the time before
            which it is not asked; `Served` keeps them.
    """

    url: str
    shell: Target
    layers: Sequence[int]
    states_dir: str
    requests: Requests
    timeout: float
    model: str = ""
    longest: int | None = None
    transport: StatesTransport | None = None
    dtype: str = ""
    gap: float = 0.0
    proven: bool = False
    sees: bool = False
    proving: threading.Lock = field(default_factory=threading.Lock)
    running: int = 0
    failures: int = 0
    rests_until: float = 0.0

    # -- a request ---------------------------------------------------------------------------------

    @torch.no_grad()
    def states(self, row: list[int], pictures: Sequence[Picture] = ()) -> RowStates:
        """The states of all n tokens of a row, on the CPU, in the server's dtype.

        Args:
            pictures: of the row. The first row with some is a proof too.

        Raises:
            BadReply: no states this time. UserError: no such states at any time.
        """
        self.prove_once()
        unproven = bool(pictures) and not self.sees
        states, logprobs = self._ask(row, _TOP if unproven else None, pictures)
        if unproven:
            # Proof of text says nothing about the vision part.
            self._check_gap(*head_gap(self.shell, states["hidden_states"], logprobs))
            self.sees = True
        assert self.transport is not None
        found = states["hidden_states"]  # [n, layers, h]
        held = self.transport.record["layers"]
        last = _normed(self.shell, found).to("cpu", found.dtype)  # [n, h]
        parts = [last[:, :0]]  # a drafter may read no layer
        for layer in self.layers:
            if layer == LAST:
                parts.append(last)
            else:
                parts.append(found[:, held.index(layer)])
        return RowStates(torch.cat(parts, dim=-1), last.clone())

    def _ask(
        self,
        prompt: list[int] | str,
        logprobs: int | None = None,
        pictures: Sequence[Picture] = (),
    ) -> tuple[dict[str, Tensor], list[dict[str, _Logprob] | None]]:
        """Asks once for hidden_states [n, layers, h], token_ids [n] and log-probabilities.

        Args:
            prompt: token ids, or a text of the proof.
            logprobs: likeliest tokens per position to get log-probabilities of; None for none.
            pictures: of the token ids.
        """
        tokens = len(prompt)
        is_row = not isinstance(prompt, str)
        if is_row and self.longest is not None and tokens >= self.longest:
            raise UserError(
                f"url={self.url!r} reads rows of at most {self.longest - 1} tokens, one has "
                f"{tokens}; start it with -- --max-model-len {tokens + 1}, or shorten the rows"
            )
        body: Json = {"model": self.model, "max_tokens": 1, "temperature": 0.0}
        if logprobs is not None:
            body["prompt_logprobs"] = logprobs
        if pictures:
            assert is_row
            reply = self._chat(body, prompt, pictures)  # type: ignore[arg-type]  # a row's ids
            found: _Choice = reply
        else:
            body["prompt"] = prompt
            reply = self._post("completions", body)
            found = reply["choices"][0]
        named = reply.get("kv_transfer_params")
        if not named:
            raise UserError(f"url={self.url!r} hands out no states; start it with: {self._command}")
        if self.transport is None or not self.proven:
            self.transport = open_transport(
                named, self.states_dir, self.url, self._command, self.transport
            )
            self._check_record(self.transport)
        states = self.transport.take(named, self.timeout)
        self._check_shape(self.transport, states)
        if is_row and states["token_ids"].tolist() != prompt:
            raise BadReply(
                "other tokens", f"states of {tokens} tokens that are not the row's", retry=True
            )
        if not is_finite(states["hidden_states"]):
            raise BadReply(
                "not finite", f"states of {tokens} tokens hold NaN or infinity", retry=True
            )
        return states, value_of(found, "prompt_logprobs", [])

    def _post(self, what: str, body: Json) -> _StatesReply:
        return self.requests.json("POST", f"{self.url}/v1/{what}", body, _StatesReply, self.timeout)

    def _chat(self, body: Json, row: list[int], pictures: Sequence[Picture]) -> _StatesReply:
        """The reply to a row with images, which the server has read as these tokens.

        Raises:
            UserError: it takes no such chat, or reads it as other tokens.
        """
        shell = self.shell
        # vLLM reads the pictures in the order of their parts, wherever the text has their markers.
        parts = [image_part(picture) for picture in pictures]
        text = decode(shell.tokenizer, shell.require_sight().marked_ids(row, pictures))
        chat = {
            **body,
            "messages": with_uris([{"role": "user", "content": [*parts, text_part(text)]}]),
            "chat_template": _TEMPLATE,
            "add_generation_prompt": False,
            "return_token_ids": True,
        }
        try:
            reply = self._post("chat/completions", chat)
        except BadReply as bad:
            # A status such as 400 or 404 stays; others are tried again.
            if bad.retry or not bad.reason.startswith("HTTP"):
                raise
            raise UserError(
                f"url={self.url!r} gives no states of rows with images ({bad}); start it with: {self._command}"
            ) from bad
        read = value_of(reply, "prompt_token_ids", [])
        if read != row:
            at = shared_length(read, row)
            raise UserError(
                f"url={self.url!r} reads a row of {len(row)} tokens with {counted(len(pictures), 'images')} as "
                f"{len(read)} tokens, other ones from token {at} on; store its states here: drafttrain features "
                "--backend local"
            )
        return reply

    @property
    def _command(self) -> str:
        return f"drafttrain serve-target --target {shlex.quote(self.shell.name)}"

    def _check_shape(self, transport: StatesTransport, states: Mapping[str, Tensor]) -> None:
        """Raises UserError: states of another shape than announced."""
        found = states["hidden_states"]
        count = len(states["token_ids"])
        layers = len(transport.record["layers"])
        width = self.shell.hidden_size
        if found.shape != (count, layers, width) or found.dtype not in _DTYPES:
            raise UserError(
                f"url={self.url!r} hands out states {list(found.shape)} {found.dtype} of {count} "
                f"tokens, its record {transport.where!r} announces {layers} layers of width "
                f"{width}; start it with: {self._command}"
            )

    # -- the proof ---------------------------------------------------------------------------------

    def prove_once(self) -> None:
        """Proves the server unless it is proven since it started; other threads wait meanwhile."""
        with self.proving:
            if not self.proven or (self.transport and not self.transport.is_current()):
                self._prove()

    def _prove(self) -> None:
        """Compares the server with the shell.

        Raises:
            BadReply: it does not answer. UserError: it serves another target.
        """
        model = self.requests.first_model(self.url, self.timeout)
        self.model = model["id"]
        self.longest = model.get("max_model_len")
        # So its record is read again: it may have been started with other layers.
        self.proven = False
        self.sees = False

        self.gap, allowed = self._gap(_spread_ids(self.shell.vocab_size))
        if self.shell.tokenizer is not None:
            gap, allowed = self._gap(_PROBE_TEXT)
            self.gap = max(self.gap, gap)
        self._check_gap(self.gap, allowed)
        self.proven = True

    def _check_gap(self, gap: float, allowed: float) -> None:
        """Raises UserError: log-probabilities that are further apart than rounding explains."""
        if not gap <= allowed:
            raise self._refused(
                "its log-probabilities differ from those of the target's head over its states by "
                f"{gap:.3g} nats on average, and {allowed:.2g} are allowed: another model, "
                "other layers or another final norm"
            )

    def _gap(self, prompt: list[int] | str) -> tuple[float, float]:
        """`head_gap` of a prompt. Raises UserError: other token ids, or another embedding."""
        states, logprobs = self._ask(prompt, _TOP)
        ids = states["token_ids"]
        found = states["hidden_states"]
        if isinstance(prompt, str):
            read = ids.tolist()
            wanted = self.shell.tokenizer(prompt)["input_ids"]
            if read != wanted:
                raise self._refused(
                    f"its tokenizer makes {len(read)} tokens of a text, the target's {len(wanted)}, "
                    f"and they differ from token {shared_length(read, wanted)} on"
                )
        assert self.transport is not None
        if self.transport.record["layers"][0] == 0:
            embedded = found[:, 0].float()  # [n, h]
            ours = self.shell.embed(ids.to(self.shell.device)).detach().cpu().float()
            apart = float((embedded - ours).norm() / ours.norm())
            if not apart <= 2 * torch.finfo(found.dtype).eps + 1e-5:  # NaN is refused too
                raise self._refused(f"its input embedding differs by {apart:.2g} of its norm")
        self.dtype = str(found.dtype).removeprefix("torch.")
        return head_gap(self.shell, found, logprobs)

    def _refused(self, why: str) -> UserError:
        return UserError(
            f"url={self.url!r} does not serve target {self.shell.name!r}: {why}; start it with: "
            f"{self._command}"
        )

    def _check_record(self, transport: StatesTransport) -> None:
        """Raises UserError: the record announces another target, or lacks a layer."""
        own = self.shell.identity()
        theirs = dict(transport.record["target"])
        theirs["name"] = own["name"]  # a path or an id, which may differ
        changed = first_change(theirs, own)
        if changed:
            changed = changed.replace("this run has", "the target has")
            raise self._refused(f"its record announces {changed}")
        layers = transport.record["layers"]
        held = set(layers)
        wanted = set(self.layers) - {LAST} | {self.shell.num_layers}
        ascending = layers == sorted(held) and layers[-1] == self.shell.num_layers
        if not ascending or not wanted <= held:
            named = ",".join(map(str, sorted(wanted)))
            raise UserError(
                f"url={self.url!r} hands out layers {','.join(map(str, layers))}, and {named} are "
                f"needed; start it with: {self._command} --layers {named}"
            )


def _spread_ids(vocab_size: int) -> list[int]:
    """Token ids from all over the vocabulary, in an order that looks random and is always the same."""
    chosen = torch.linspace(0, vocab_size - 1, min(_PROBE_IDS, vocab_size)).long()
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))
    return chosen[order].tolist()


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
    # The coarser one.
    eps = max(torch.finfo(states.dtype).eps, torch.finfo(shell.embed_weight.dtype).eps)
    rounding = float(logits.abs().amax(-1).mean()) * eps
    return float(gap), max(_LEAST_GAP, rounding)


def _normed(shell: Target, states: Tensor) -> Tensor:
    """States [n, layers, h], the last layer before the final norm -> [n, h] behind it."""
    last = states[:, -1].to(shell.device, shell.embed_weight.dtype)
    return shell.final_norm(last)  # type: ignore[attr-defined]  # of TargetShell
