"""Backends that generate responses: the target in this process, and servers with an OpenAI API.
vllm_backend.py has vLLM, existing_backend.py the answers of a file.

Each backend takes conversations and yields them when they end. The stored records do not depend on
the backend: token ids of the target's tokenizer, with response spans known from how the
conversation was put together.
"""

from __future__ import annotations

import random
import threading
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from drafttrain.credentials import redact
from drafttrain.data.chat import has_template, render_text, shared_length, text_ids
from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.data.failures import BadReply
from drafttrain.data.image_parts import with_uris
from drafttrain.data.openai_replies import (
    ChatIdsReply,
    ChatReply,
    IdsReply,
    TextReply,
    check_unicode,
    reassembled,
    sent_message,
)
from drafttrain.data.servers import UNREACHABLE, Requests, server_address
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.inference.responses import Finished, ResponseEngine, ResponseRequest
from drafttrain.ops.sampling import SamplingParams
from drafttrain.target import Target

if TYPE_CHECKING:
    from drafttrain.target.sight import ImagePrompt

_IN_FLIGHT = 32  # requests per server
_TIMEOUT = 600.0  # seconds of a server's reply
_TRIES = 6  # of a request
_FIRST_PAUSE = 0.5  # seconds before the first retry; doubles with each
_IN_A_ROW = 32  # conversations that fail in a row end the run
# What tokenizers split differently: digits, runs of spaces, words of other scripts, symbols of
# several bytes.
_PROBE = "It's 1234567 o'clock:\n\n\t x  +=  y;  na\u00efve \u732b\u306f \u043c\u0438\u0440 \U0001f642 <end>"
T = TypeVar("T")

# A conversation, and the engine's result if that captures hidden states, or why it has no complete
# answer.
Ended = tuple[Conversation, Finished | BadReply | None]


@dataclass(frozen=True)
class ResponseSettings:
    """How responses are generated.

    Each has at most max_new_tokens, and a conversation at most max_length tokens.
    """

    renderer: ChatRenderer
    sampling: SamplingParams
    max_new_tokens: int
    max_length: int
    seed: int

    def allowance(self, it: Conversation) -> int:
        """Most tokens of the conversation's next response."""
        return min(self.max_new_tokens, self.max_length - len(it.tokens))

    def accept(self, it: Conversation, tokens: list[int], finish: str) -> None:
        """Appends a response that another program generated.

        Raises BadReply: no tokens, or tokens that the target does not have.
        """
        size = self.renderer.target.vocab_size
        room = self.allowance(it)  # servers may answer beyond what was asked
        if not tokens:
            raise BadReply("no text", "the answer is empty")
        for token in tokens:
            if type(token) is not int or not 0 <= token < size:
                raise BadReply(
                    "token ids", f"{token!r} is not in the target's vocabulary of {size}"
                )
        if len(tokens) > room:
            finish = "length"
        it.accept(tokens[:room], finish)

    def closed(self, tokens: list[int], finish: str, stop_reason: object) -> list[int]:
        """An engine's response with its stop token, which engines may leave out.

        Args:
            stop_reason: that token's id, if it is known.
        """
        if finish != "stop" or (tokens and tokens[-1] in self.renderer.stop_ids):
            return tokens
        closing = self.renderer.closing_id
        if type(stop_reason) is int:
            closing = stop_reason
        return [*tokens, closing]

    def next_turn(self, it: Conversation) -> list[int] | None:
        """Appends the next prompt to the conversation; None when its row ends."""
        return it.next_turn(self.renderer, self.max_length)

    def rest(self, it: Conversation) -> Conversation | None:
        """The next row of a conversation whose row has ended, opened; None after its last."""
        return it.rest(self.renderer, self.max_length)


class Backend(ABC):
    """Generates the responses of conversations.

    Attributes:
        asks: whether it asks the target, so that a run without answers is an error.
        drops: reasons why a conversation is not stored, or not all of it.
    """

    asks = True
    drops: tuple[str, ...] = (
        "prompt_too_long",
        "turns_not_reached",
        "other_tool_calls",
        "template_refuses_answer",
        "later_image_refused",
    )
    _new_tokens = 0

    @property
    def new_tokens(self) -> int:
        """Response tokens so far, those of unfinished conversations included."""
        return self._new_tokens

    @abstractmethod
    def run(
        self,
        conversations: Iterable[Conversation],
        stop: Callable[[], bool],
    ) -> Iterator[Ended]:
        """Yields the rows of conversations as they end.

        The conversations are open: their tokens hold the first prompt.

        Once `stop` returns True, no new conversation starts.
        """


class LocalBackend(Backend):
    """The target in this process, with continuous batching."""

    def __init__(
        self,
        target: Target,
        settings: ResponseSettings,
        slots: int,
        feature_layers: Sequence[int],
    ):
        self.settings = settings
        self.engine = ResponseEngine(target, slots, settings.max_length, feature_layers)

    @property
    def new_tokens(self) -> int:
        return self.engine.new_tokens

    def run(
        self,
        conversations: Iterable[Conversation],
        stop: Callable[[], bool],
    ) -> Iterator[Ended]:
        settings = self.settings
        running = dict[str, Conversation]()
        waiting = deque[Conversation]()  # later rows of conversations

        def follow_up(finished: Finished) -> list[int] | None:
            it = running[finished.key]
            it.accept(finished.tokens, finished.finish_reason)
            return settings.next_turn(it)

        requests = _Requests(waiting, iter(conversations), running, settings)
        results = self.engine.run(
            requests,
            settings.sampling,
            settings.seed,
            follow_up,
            stop,
        )
        for finished in results:
            it = running.pop(finished.key)
            # The engine stopped inside a response, so follow_up was not called.
            if len(it.tokens) < len(finished.sequence):
                it.accept(finished.tokens, finished.finish_reason)
            rest = settings.rest(it)
            if rest is not None:
                waiting.append(rest)
            yield it, finished


@dataclass
class _Requests(Iterator[ResponseRequest]):
    """Requests for the engine.

    Unlike a generator it continues when a later row of a conversation comes after the last one.
    """

    waiting: deque[Conversation]
    conversations: Iterator[Conversation]
    running: dict[str, Conversation]
    settings: ResponseSettings

    def __next__(self) -> ResponseRequest:
        if self.waiting:
            it = self.waiting.popleft()
        else:
            it = next(self.conversations)
        key = it.id  # random numbers depend on it
        if it.part:
            key = f"{it.id}\0{it.part}"
        self.running[key] = it
        prompt: list[int] | ImagePrompt = list(it.tokens)
        if it.image_prompt is not None:
            prompt = it.image_prompt
            it.image_prompt = None  # its pixels are large
        return ResponseRequest(
            key,
            prompt,
            self.settings.max_new_tokens,
            self.settings.renderer.stop_ids,
        )


class OpenAIBackend(Backend):
    """Servers with OpenAI's completion API (vLLM, SGLang, llama.cpp), queried concurrently.

    Servers that exchange token ids (`return_token_ids`: vLLM, SGLang) get prompts as ids and answer
    with ids, which are stored. From others the reply's text is tokenized here. Those tokens may be
    split differently from those that the server sampled; training is unaffected, because inputs and
    loss mask use the same tokens.

    A bad reply costs one conversation. The run ends where no reply can be good: a server that
    cannot be reached at the start, a refused key, `_IN_A_ROW` failed conversations in a row.

    Args:
        urls: base addresses with or without '/v1'; conversations are spread over them.
        model: name of the model in requests; '' takes the first one that the server lists.
        slots: requests in flight per server; None for 32.

    Attributes:
        by_ids: whether all servers exchange token ids.

    Raises:
        UserError: a server that cannot be reached, or that reads text as other ids than the
            target's tokenizer.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        settings: ResponseSettings,
        slots: int | None = None,
    ):
        self.settings = settings
        self.urls = [server_address(url) for url in urls]
        if not self.urls:
            raise UserError(
                "backend=openai needs --url, for example --url http://localhost:8000/v1"
            )
        if slots is None:
            slots = _IN_FLIGHT
        self.concurrency = slots * len(self.urls)
        self.requests = Requests(connections=self.concurrency)
        self._count = threading.Lock()
        self._closing = threading.Event()
        self._reached: set[str] = set()  # servers that have replied
        self.models = {url: self._model(url, model) for url in self.urls}

        self.by_ids = True
        for url in self.urls:
            reason = self._without_ids(url)
            if reason:
                self.by_ids = False
                print(
                    f"{redact(url)}: no exchange of token ids ({reason}); the text of answers is tokenized here",
                    flush=True,
                )
        if self.by_ids:
            print(
                f"{', '.join(redact(self.urls))}: prompts and answers are exchanged as token ids, and stored as served",
                flush=True,
            )

    def _model(self, url: str, given: str) -> str:
        """The model's name in requests to a server: as given, else the first that the server lists.

        Raises UserError: the server cannot be reached, or lists no models.
        """
        try:
            listed = self._retried(
                lambda _: self._sent(url, lambda: self.requests.first_model(url, _TIMEOUT))
            )
        except BadReply as bad:
            if bad.reason == UNREACHABLE:
                raise UserError(
                    f"url={url!r} cannot be reached ({bad.detail}); start it, or check the address"
                ) from bad
            if not given:
                raise UserError(
                    f"url={url!r} lists no models ({bad}); name one with --model"
                ) from bad
            return given  # servers need not list models
        if given:
            return given
        return listed["id"]

    def _without_ids(self, url: str) -> str:
        """Why a server cannot exchange token ids; '' if it can.

        Sends two short requests: one as text, which proves that the server's tokenizer is the target's,
        and one as ids.

        Raises UserError: another tokenizer, or sampled answers from a server that hands out states.
        """
        tokenizer = self.settings.renderer.tokenizer
        text = _PROBE
        if has_template(tokenizer):
            chat = [{"role": "user", "content": _PROBE}]
            text = render_text(tokenizer, chat, generation=True)
        ids = text_ids(tokenizer, text)
        options = {
            "model": self.models[url],
            "max_tokens": 1,
            "temperature": 0.0,
            "return_token_ids": True,
        }

        def ask(prompt: Json) -> Json:
            body = {**options, **prompt}
            return self._retried(lambda _: self._post(url, "completions", body, IdsReply))

        try:
            # As text, then as ids.
            for prompt in ({"prompt": text, "add_special_tokens": False}, {"prompt": ids}):
                reply = ask(prompt)
                if reply.get("kv_transfer_params") and self.settings.sampling.temperature > 0:
                    raise UserError(
                        f"url={url!r} hands out states (serve-target), and vLLM samples wrong tokens while it does so; ask an "
                        "ordinary `vllm serve`, or generate greedily: --temperature 0"
                    )
                read = reply["choices"][0]["prompt_token_ids"]
                # Servers may add BOS to text.
                if read not in (ids, [tokenizer.bos_token_id, *ids]):
                    at = shared_length(read, ids)
                    raise UserError(
                        f"url={url!r} serves another tokenizer than target={self.settings.renderer.target.name!r}: it reads "
                        f"{text[-60:]!r} as {read[at : at + 3]}... from token {at} on, the target as {ids[at : at + 3]}...; "
                        "serve the target, or name the one that is served with --target"
                    )
        except BadReply as bad:
            return str(bad)
        return ""

    def run(
        self,
        conversations: Iterable[Conversation],
        stop: Callable[[], bool],
    ) -> Iterator[Ended]:
        source = enumerate(conversations)
        # What a thread ends with: the rows of its conversation, and the error that ended it.
        ended: SimpleQueue[tuple[list[Conversation], Exception | None]] = SimpleQueue()
        running = 0  # conversations in flight
        failed = 0  # conversations in a row
        fatal: Exception | None = None

        def converse(number: int, it: Conversation) -> None:
            try:
                ended.put((self._converse(it, number), None))
            except Exception as error:  # raised in the main thread
                ended.put(([it], error))

        try:
            while True:
                if fatal is None and not stop():
                    # As many new ones as there is room for.
                    for job in islice(source, self.concurrency - running):
                        # Daemon threads: a process that ends does not wait for servers that hang.
                        threading.Thread(
                            target=converse,
                            args=job,
                            daemon=True,
                        ).start()
                        running += 1
                if fatal is not None and ended.empty():  # everything that has arrived is stored
                    raise fatal
                if not running:
                    return

                rows, problem = ended.get()
                running -= 1
                if problem is None:
                    failed = 0
                elif isinstance(problem, BadReply):
                    failed += 1
                else:
                    # The first error of this kind ends the run, when what has arrived is stored.
                    if fatal is None:
                        fatal = problem
                    continue
                for it in rows:
                    yield it, problem
                if failed == _IN_A_ROW:
                    fatal = UserError(
                        f"url={', '.join(self.urls)}: {failed} conversations in a row failed, the last with {problem}; finished "
                        "conversations are kept: check the server and run the same command again to continue"
                    )
        finally:
            self._closing.set()
            # Threads that still wait for a reply use the client.
            if not running:
                self.requests.close()

    def _converse(self, it: Conversation, number: int) -> list[Conversation]:
        """Holds one conversation with one server, which may keep its prefix cached; returns its rows.

        Raises BadReply.
        """
        rows = [it]
        while True:
            if rows[-1].images:
                tokens, finish = self._images(rows[-1], number)
            elif self.by_ids:
                tokens, finish = self._ids(rows[-1], number)
            else:
                tokens, finish = self._text(rows[-1], number)
            self.settings.accept(rows[-1], tokens, finish)
            with self._count:
                self._new_tokens += len(tokens)
            if self.settings.next_turn(rows[-1]) is None:
                rest = self.settings.rest(rows[-1])
                if rest is None:
                    return rows
                rows.append(rest)

    def _ids(self, it: Conversation, number: int) -> tuple[list[int], str]:
        """The next response's ids, stop token included, and finish reason."""
        body: Json = {**self._ids_options(), "prompt": it.tokens}
        choice = self._query(it, number, "completions", body, IdsReply)["choices"][0]
        # Some servers cut a long prompt without an error.
        if choice["prompt_token_ids"] != it.tokens:
            raise BadReply("token ids", "the server read another prompt than was sent")
        finish = choice["finish_reason"]
        return self.settings.closed(choice["token_ids"], finish, choice.get("stop_reason")), finish

    def _ids_options(self) -> Json:
        """What a request for token ids says besides its prompt."""
        sampling = self.settings.sampling
        # Values that mean "off" are sent too: otherwise the server takes those of the target's
        # generation_config.
        top_k = sampling.top_k
        if top_k == 0:
            top_k = -1
        return {
            "top_k": top_k,
            "min_p": sampling.min_p,
            "return_token_ids": True,
            "stop_token_ids": sorted(self.settings.renderer.stop_ids),
        }

    def _images(self, it: Conversation, number: int) -> tuple[list[int], str]:
        """The next response's ids and finish reason of a conversation with images.

        Images go as data URIs in a chat: `/v1/completions` with the ids of placeholders answers
        too, but silently drops the images. Ids are taken from the reply where the server returns
        them.

        Raises BadReply: the server read another prompt, or the answer is none.
        """
        it.image_prompt = None  # the server makes its own
        if not self.by_ids:
            return self._text(it, number)
        body = {**self._chat_body(it), **self._ids_options()}
        reply = self._query(it, number, "chat/completions", body, ChatIdsReply)
        choice = reply["choices"][0]
        if choice.get("token_ids") is None or reply.get("prompt_token_ids") is None:
            return self._chat_text(it, choice)
        count = len(reply["prompt_token_ids"])
        # Behind an answer the server splits its text again, perhaps elsewhere.
        if not it.spans and reply["prompt_token_ids"] != it.tokens:
            raise BadReply(
                "token ids",
                f"the server reads the prompt with images as {count} tokens, here it is {len(it.tokens)} others",
            )
        finish = "length" if choice["finish_reason"] == "length" else "stop"
        return self.settings.closed(choice["token_ids"], finish, choice.get("stop_reason")), finish

    def _chat_body(self, it: Conversation) -> Json:
        """The body of a chat request."""
        sampling = self.settings.sampling
        body: Json = {}
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.min_p:
            body["min_p"] = sampling.min_p
        messages = with_uris(it.messages)
        body["messages"] = [sent_message(message) for message in messages]
        if it.inputs.tools:
            body["tools"] = list(it.inputs.tools)
        if it.inputs.kwargs:
            body["chat_template_kwargs"] = it.inputs.kwargs
        return body

    def _text(self, it: Conversation, number: int) -> tuple[list[int], str]:
        """The next response's ids and finish reason from a server's text, which is tokenized here.

        What the server's parsers took out of the text is put back.
        """
        body = self._chat_body(it)
        if not it.turns:
            del body["messages"]
            body["prompt"] = it.text
            reply = self._query(it, number, "completions", body, TextReply)
            choice = reply["choices"][0]
            check_unicode(choice["text"])
            return self._closed_text(choice["text"], choice)
        reply = self._query(it, number, "chat/completions", body, ChatReply)
        return self._chat_text(it, reply["choices"][0])

    def _chat_text(self, it: Conversation, choice: Json) -> tuple[list[int], str]:
        """The ids of a chat's answer, which are tokenized here, and the finish reason."""
        renderer = self.settings.renderer
        text, end = reassembled(renderer, it, choice, it.messages)
        if end:
            return text_ids(renderer.tokenizer, text), "stop"
        return self._closed_text(text, choice)

    def _closed_text(self, text: str, choice: Json) -> tuple[list[int], str]:
        """The ids of a server's text with the stop token that it has stripped, and the finish reason."""
        finish = "stop"  # also of an answer that ends in tool calls
        if choice["finish_reason"] == "length":
            finish = "length"
        ids = text_ids(self.settings.renderer.tokenizer, text)
        # An empty answer stays empty, and `accept` refuses it.
        if ids:
            ids = self.settings.closed(ids, finish, choice.get("stop_reason"))
        return ids, finish

    def _query(
        self,
        it: Conversation,
        number: int,
        path: str,
        more: Json,
        schema: type,
    ) -> Json:
        """The server's reply for the conversation's next response. A retry asks the next server."""
        sampling = self.settings.sampling
        body: Json = {
            "max_tokens": self.settings.allowance(it),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # One seed per response: with one for all, equal prompts would get equal answers.
            "seed": zlib.crc32(f"{self.settings.seed}/{len(it.spans)}/{it.id}".encode()),
            **more,
        }
        if sampling.repetition_penalty is not None:
            body["repetition_penalty"] = sampling.repetition_penalty

        def send(attempt: int) -> Json:
            # Conversations alternate between servers, and a retry asks the next one.
            url = self.urls[(number + attempt) % len(self.urls)]
            return self._post(url, path, {"model": self.models[url], **body}, schema)

        return self._retried(send)

    def _retried(self, send: Callable[[int], T]) -> T:
        """The result of `send(attempt)`, tried again with growing pauses where that may help."""
        for attempt in range(_TRIES - 1):
            try:
                return send(attempt)
            except BadReply as bad:
                if not bad.retry or self._closing.is_set():
                    raise
                # Of random length, so that requests that failed together do not come back together.
                pause = _FIRST_PAUSE * 2**attempt * random.uniform(0.75, 1.25)
                self._closing.wait(max(bad.pause, pause))
        return send(_TRIES - 1)  # the last try raises what it meets

    def _post(self, url: str, path: str, body: Json, schema: type) -> Json:
        """A server's reply to a request."""
        address = f"{url}/v1/{path}"
        return self._sent(url, lambda: self.requests.json("POST", address, body, schema, _TIMEOUT))

    def _sent(self, url: str, send: Callable[[], T]) -> T:
        """The reply to a request. A server that has replied before may come back."""
        try:
            reply = send()
        except BadReply as bad:
            if bad.reason == UNREACHABLE:
                # A server that was never reached is not there; one that was may restart.
                bad.retry = url in self._reached
            else:
                self._reached.add(url)
            raise
        self._reached.add(url)
        return reply
