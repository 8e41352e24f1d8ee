"""Responses to any number of requests: what data generation and on-policy answers run on.

Requests are read lazily and share one continuous batch. Where transformers' generate waits for the
longest of a batch and pads to the longest prompt, a finished response frees its row for the next
request and no step computes padding.

    row 0    [system prompt | prompt a | response a ........ ] ends -> [system prompt | prompt d | response d ..
    row 1    [system prompt | prompt b ... | response b ..................................
    row 2    [system prompt | prompt c | response c ....]  free until a few are, then refilled in one pass

A prefix that all prompts share is computed once. A follow-up (the next user turn) extends a
sequence in its row.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from drafttrain.drafters.common.configs import layer_config
from drafttrain.errors import UserError
from drafttrain.inference.engine import Engine
from drafttrain.inference.sequence import Sequence, images_of
from drafttrain.inference.static import rounded_capacity
from drafttrain.inference.verify import ProcessedText, Verifier
from drafttrain.ops.sampling import SamplingParams
from drafttrain.target import Target
from drafttrain.target.attention import LAST
from drafttrain.target.generation import LogitsRules
from drafttrain.target.sight import ImagePrompt

# First number of positions per row; the cache doubles, up to max_length, when a sequence outgrows it.
_FIRST_CAPACITY = 1024
# Shorter prefixes are not worth a pass of their own.
_LEAST_PREFIX = 16


@dataclass
class ResponseRequest:
    """A prompt to continue.

    Attributes:
        key: names the request and, with the run's seed, fixes its random numbers.
        prompt_ids: at least one token, or a prompt with images.
        max_new_tokens: limit of each response.
        stop_ids: tokens that end a response; the one that does is kept.
    """

    key: str
    prompt_ids: Items[int] | ImagePrompt
    max_new_tokens: int
    stop_ids: Collection[int]


@dataclass
class Finished:
    """A response.

    Attributes:
        tokens: the new tokens of the last turn, stop token included.
        finish_reason: 'stop' or 'length' (limit of new tokens or of the sequence, or the run was
            stopped).
        sequence: all tokens from the first prompt on.
        features: [len(sequence) - 1, f*h] bfloat16 on the CPU, if the engine captures features: of
            every position that the target read. It has not read the last token, nor follow-ups
            that a stopped run left unread.
        last_hidden: [len(sequence) - 1, h] likewise.
    """

    key: str
    tokens: list[int]
    finish_reason: str
    sequence: list[int]
    features: Tensor | None = None
    last_hidden: Tensor | None = None


FollowUp = Callable[[Finished], Items[int] | None]


def choose_slots(target: Target, max_length: int, features: int = 0) -> int:
    """The most slots that run fast, or fewer if their cache would fill half of the free memory.

    Args:
        max_length: as of `ResponseEngine`. features: target states that it captures.

    Raises:
        UserError: the GPU has no room for a single sequence.
    """
    numbers = _numbers_per_token(target)
    states = 0
    if features:
        states = (features + 1) * target.hidden_size * 2  # bfloat16, with the last hidden state
    on_gpu = target.device.type == "cuda"
    if on_gpu:
        target.release_steps()  # idle graphs and their caches count as taken memory
        free, _ = torch.cuda.mem_get_info(target.device)
        most = 256
        token = numbers * target.compute_dtype.itemsize + states
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = 128
        token = numbers * 4 + states  # a CPU's cache is float32
    row = token * rounded_capacity(max_length)  # bytes
    if on_gpu and 2 * row > 0.9 * free:
        raise UserError(
            f"max_length={max_length}: two sequences take {2 * row / 1e9:.1f} GB of keys and values, but target "
            f"{target.name!r} leaves {free / 1e9:.1f} GB of the GPU; shorten them or use a larger GPU"
        )
    # The other half is for activations, logits and graphs. One row more holds a shared prefix.
    return max(1, min(most, int(free / 2 / row) - 1))


def _numbers_per_token(target: Target) -> int:
    """Numbers of a token's keys and values in all layers."""
    total = 0
    for i in range(target.num_layers):
        config = layer_config(target.config, i)
        # Mamba has no heads, and a state of about this size.
        heads = getattr(config, "num_attention_heads", None) or 1
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        plain = getattr(config, "qk_nope_head_dim", None)
        if plain:  # latent attention, expanded
            width = plain + config.qk_rope_head_dim
        heads = getattr(config, "num_key_value_heads", None) or heads
        total += 2 * heads * width
    return total


class ResponseEngine:
    """Generates responses with a target for any number of requests.

    Args:
        target: its linear layers get packed.
        slots: sequences per step.
        max_length: most tokens of a sequence, prompt included.
        feature_layers: capture these target states (see Target.forward) and the last hidden states.
        rules: see `Decoder`.

    Attributes:
        new_tokens: tokens sampled since the engine was created.

    Raises:
        UserError: max_length is more than the target reads.
    """

    def __init__(
        self,
        target: Target,
        slots: int = 128,
        max_length: int = 2048,
        feature_layers: Items[int] | None = None,
        rules: LogitsRules | None = None,
    ):
        if target.max_positions is not None and max_length > target.max_positions:
            raise UserError(
                f"max_length={max_length}, but target {target.name!r} reads at most {target.max_positions} tokens; "
                f"use max_length={target.max_positions}"
            )
        self.target = target.pack()
        self.slots = slots
        self.max_length = max_length
        self.feature_layers: tuple[int, ...] = ()
        if feature_layers is not None:
            self.feature_layers = tuple(feature_layers)
        self.rules = rules
        self.new_tokens = 0

    @torch.inference_mode(False)  # what outlives the call may be changed in any mode
    @torch.no_grad()
    def run(
        self,
        requests: Iterable[ResponseRequest],
        sampling: SamplingParams,
        seed: int = 0,
        follow_up: FollowUp | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[Finished]:
        """Yields responses as they finish.

        Args:
            requests: read lazily, twice as many as there are slots ahead.
            sampling: for all of them.
            seed: a request's random numbers depend on it, the key and the turn only, not on the
                rest of the batch.
            follow_up: called with each response. Returns tokens that extend the same sequence (the
                next user turn), whose keys and values stay in the row, or None to finish.
            stop: called before each step. Once true, running sequences are yielded as they are
                ('length') and no further request is read.

        Raises:
            UserError: an empty prompt, or one that leaves no position for a response.
        """
        run = _Run(self, iter(requests), sampling, seed, follow_up)
        with closing(run.engine):
            yield from run.responses(stop)


@dataclass(eq=False)
class _Running:
    """A request in a row: `tokens` so far, whose present response begins at `start`."""

    request: ResponseRequest
    tokens: list[int]
    start: int
    sequence: Sequence
    turn: int = 0

    def finished(self, reason: str) -> Finished:
        """The present response, without captured features."""
        return Finished(self.request.key, self.tokens[self.start :], reason, list(self.tokens))


class _Run:
    """The state of one `ResponseEngine.run`."""

    def __init__(
        self,
        owner: ResponseEngine,
        source: Iterator[ResponseRequest],
        sampling: SamplingParams,
        seed: int,
        follow_up: FollowUp | None,
    ):
        self.owner = owner
        self.source = source
        self.sampling = sampling
        self.seed = seed
        self.follow_up = follow_up
        self.rules = owner.target.generation.rules_for(sampling, owner.rules)
        self.device = owner.target.device
        self.queue = deque(islice(source, 2 * owner.slots))
        # A prompt with images is read in one forward, and shares nothing.
        texts = [tokens_of(it) for it in self.queue if images_of(it.prompt_ids) is None]
        self.prefix = _shared_prefix(texts)
        self.prefix_states: list[Tensor] = []
        self.running: dict[int, _Running] = {}  # by row
        self.waiting: list[Sequence] = []  # sequences with a follow-up to read
        rows = owner.slots
        if self.prefix:  # it has a row of its own
            rows += 1
        capture: tuple[int, ...] = ()
        if owner.feature_layers:  # the last hidden state comes along
            capture = (*owner.feature_layers, LAST)
        self.engine = Engine(
            owner.target,
            capacity=min(owner.max_length, _FIRST_CAPACITY),
            rows=rows,
            plain=sampling.greedy and not self.rules,
            capture=capture,
        )

    def responses(self, stop: Callable[[], bool] | None) -> Iterator[Finished]:
        engine = self.engine
        slots = self.owner.slots
        # Waiting for a few free rows makes prompt passes efficient. Up to 1/16 of the rows idle
        # meanwhile, which costs less than a pass for every prompt.
        refill = max(1, slots // 16)
        if self.prefix:
            self.prefix_row = engine.free.pop()
            engine.cache.clear(self.prefix_row)  # an earlier call may have left tokens there
            self._reserve(len(self.prefix))
            tokens = torch.tensor(self.prefix, device=self.device)
            self.prefix_states = engine.read(self.prefix_row, tokens)
        while True:
            self.queue.extend(islice(self.source, 2 * slots - len(self.queue)))
            if stop is not None and stop():
                yield from self._flush()
                return
            free = min(len(engine.free), len(self.queue))
            joining = free + len(self.waiting)
            active = bool(engine.active)
            # With an empty queue, follow-ups have nothing more to wait for.
            if joining >= refill or not active or (self.waiting and not self.queue):
                if not joining:  # nothing runs, waits or is queued
                    return
                joined = self.waiting
                self.waiting = []
                for _ in range(free):
                    joined.append(self._admit(self.queue.popleft()))
                lengths = engine.cache.lengths
                self._reserve(max(lengths[it.row] + len(it.prompt) for it in joined))
                step = engine.prefill(joined)
            else:
                self._reserve(max(engine.cache.lengths[it.row] for it in engine.active) + 1)
                step = engine.round()
            for sequence, news in step:
                self.owner.new_tokens += len(news)
                running = self.running[sequence.row]
                running.tokens += news
                if sequence.stats.finish:
                    yield from self._end(running)

    def _reserve(self, length: int) -> None:
        """Grows the cache to `length` positions per row, and at least to twice its size."""
        capacity = self.engine.cache.capacity
        if length > capacity:
            self.engine.reserve(min(self.owner.max_length, max(length, 2 * capacity)))

    def _admit(self, request: ResponseRequest) -> Sequence:
        """Gives a request a free row."""
        prompt = tokens_of(request)
        images = images_of(request.prompt_ids)
        limit = self.owner.max_length
        if not 0 < len(prompt) < limit:
            raise UserError(
                f"prompt {request.key!r} has {len(prompt)} tokens; it needs at least 1 and, with max_length={limit}, "
                f"at most {limit - 1}: shorten it or raise max_length"
            )
        sequence = self._turn(request, prompt, prompt, 0)
        sequence.images = images
        self.engine.join(sequence)
        shared = len(self.prefix)
        if images is None and shared and len(prompt) > shared and prompt[:shared] == self.prefix:
            # Keys and values of the prefix.
            self.engine.cache.copy(self.prefix_row, sequence.row, shared)
            sequence.prompt = sequence.prompt[shared:]
            sequence.states = list(self.prefix_states)
        self.running[sequence.row] = _Running(
            request,
            prompt,
            len(prompt),
            sequence,
        )
        return sequence

    def _turn(
        self,
        request: ResponseRequest,
        unread: list[int],
        before: list[int],
        turn: int,
    ) -> Sequence:
        """A sequence that writes a response.

        Args:
            unread: tokens that it reads. before: all tokens before the response.
        """
        limit = min(request.max_new_tokens, self.owner.max_length - len(before))
        prompt = torch.tensor(unread, device=self.device)
        # The seed depends on run, turn and key alone, not on the rest of the batch.
        name = f"{self.seed}/{turn}/{request.key}".encode()
        seed = int.from_bytes(
            hashlib.sha256(name).digest()[:8],
            "little",
            signed=True,
        )
        generator = torch.Generator().manual_seed(seed)
        uniforms: list[float] = []
        if not self.sampling.greedy:
            count = request.max_new_tokens  # a number for every token it may write
            uniforms = torch.rand(count, dtype=torch.float64, generator=generator).tolist()
        read = torch.tensor(before, device=self.device)  # [L]
        text = ProcessedText.of(
            self.rules,
            self.owner.target,
            read,
            limit,
            request.stop_ids,
        )
        verifier = Verifier(
            self.sampling,
            request.stop_ids,
            generator,
            text,
            iter(uniforms),
        )
        return Sequence(0, prompt, limit, verifier)  # the index is of no use here

    def _end(self, it: _Running) -> Iterator[Finished]:
        """Extends a finished response by its follow-up, or yields it."""
        finished = it.finished("stop" if it.sequence.stats.ended else "length")
        more = None
        if self.follow_up is not None:
            more = self.follow_up(finished)
        if not more or len(it.tokens) + len(more) >= self.owner.max_length:
            yield self._close(it, finished)
            return
        unread = [it.tokens[-1], *more]  # the last token's keys are not in the cache yet
        it.tokens += more
        it.start = len(it.tokens)
        it.turn += 1
        ended = it.sequence
        it.sequence = self._turn(it.request, unread, it.tokens, it.turn)
        it.sequence.row = ended.row
        it.sequence.states = ended.states
        self.waiting.append(it.sequence)

    def _close(self, it: _Running, finished: Finished) -> Finished:
        """Frees the row of a response and attaches the captured features to it."""
        if self.owner.feature_layers:
            states = torch.cat(it.sequence.states).cpu()  # [positions, (f+1)*h] bfloat16
            width = states.shape[1] - self.owner.target.hidden_size
            finished.features = states[:, :width].clone()
            finished.last_hidden = states[:, width:].clone()
        del self.running[it.sequence.row]
        self.engine.release(it.sequence)
        return finished

    def _flush(self) -> Iterator[Finished]:
        """Ends every running sequence where it is. Sequences without a response yet are dropped."""
        for it in list(self.running.values()):
            # A response of an earlier turn is complete, even if its follow-up is not.
            if it.turn > 0 or len(it.tokens) > it.start:
                yield self._close(it, it.finished("length"))


def tokens_of(request: ResponseRequest) -> list[int]:
    """Its prompt's token ids."""
    prompt = request.prompt_ids
    if isinstance(prompt, ImagePrompt):
        return prompt.ids.tolist()
    return list(prompt)


def _shared_prefix(prompts: Items[Items[int]]) -> list[int]:
    """The tokens that all prompts begin with (system prompt, chat opening); [] if they are few.

    No prompt's last token is among them: the target must read it for the first prediction.
    """
    if len(prompts) < 2:
        return []
    # What the first and the last prompt in order have in common, all others have too.
    low = min(map(tuple, prompts))
    high = max(map(tuple, prompts))
    shortest = min(map(len, prompts))
    length = 0
    while length < shortest - 1 and low[length] == high[length]:
        length += 1
    if length < _LEAST_PREFIX:
        return []
    return list(low[:length])
