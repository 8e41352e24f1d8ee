"""Continuous batching inside the process: many sequences share one target forward per token.

A fixed number of slots holds one running sequence each. A step feeds every running sequence's newest token; a sequence
that ends frees its slot for the next request. Where transformers' generate waits for the longest of a batch and pads to
the longest prompt, slots stay full and no step computes padding.

    slot 0   [system prompt | prompt a | response a ........ ] ends -> [system prompt | prompt d | response d ..
    slot 1   [system prompt | prompt b ... | response b ..................................
    slot 2   [system prompt | prompt c | response c ....]  free until a few are, then refilled in one pass
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.inference.slot_cache import SlotCache
from drafttrain.ops.sampling import SamplingParams, sample
from drafttrain.target import Target

# Prompts are read in pieces of at most this many tokens, and at most this many padded tokens go into one pass.
_PIECE = 512
_PASS_TOKENS = 2048


@dataclass
class Request:
    """A prompt to continue.

    Attributes:
        key: names the request and, with the run's seed, fixes its random numbers.
        prompt_ids: at least one token.
        max_new_tokens: limit of each response.
        stop_ids: tokens that end a response; the one that does is kept.
    """

    key: str
    prompt_ids: Sequence[int]
    max_new_tokens: int
    stop_ids: Collection[int]


@dataclass
class Finished:
    """A response.

    Attributes:
        tokens: the new ones, stop token included; of the last turn where a follow-up extended the sequence.
        finish_reason: 'stop' or 'length' (limit of new tokens, of the sequence, or the run was stopped).
        sequence: everything from the first prompt on.
        features, last_hidden: [len(sequence) - 1, f*h] and [.., h] bfloat16 on the CPU, of every position that was fed,
            when the engine captures features: all but the last token (and follow-ups that a stopped run left unread).
    """

    key: str
    tokens: list[int]
    finish_reason: str
    sequence: list[int]
    features: Tensor | None = None
    last_hidden: Tensor | None = None


@dataclass
class _Running:
    """A sequence in a slot: `cached` tokens are in the cache, the response begins at `start`."""

    request: Request
    sequence: list[int]
    start: int
    cached: int
    turn: int = 0
    uniforms: list[float] = field(default_factory=list)

    @property
    def waiting(self) -> bool:
        """More than the newest token is still to be fed, so a plain step cannot run it."""
        return len(self.sequence) - self.cached > 1


FollowUp = Callable[[Finished], Sequence[int] | None]


class SlotEngine:
    """Generates with a target for any number of requests.

    Args:
        target: its linear layers get packed.
        slots: sequences per step.
        max_length: most tokens of a sequence, prompt included.
        feature_layers: capture these target states (see Target.forward) and the last hidden ones.

    Attributes:
        new_tokens: tokens sampled since the engine was made.

    Raises:
        UserError: max_length is more than the target reads.
    """

    def __init__(
        self, target: Target, slots: int = 128, max_length: int = 2048, feature_layers: Sequence[int] | None = None
    ):
        if target.max_positions is not None and max_length > target.max_positions:
            raise UserError(
                f"max_length={max_length}, but target {target.name!r} reads at most {target.max_positions} tokens; "
                f"use max_length={target.max_positions}"
            )
        self.target, self.slots, self.max_length = target.pack(), slots, max_length
        self.feature_layers = tuple(feature_layers or ())
        self.new_tokens = 0
        # Waiting for a few free slots makes prompt passes efficient; idle slots cost up to 1/16 of a step meanwhile.
        self.refill = max(1, slots // 16)

    def run(
        self,
        requests: Iterable[Request],
        sampling: SamplingParams,
        seed: int = 0,
        follow_up: FollowUp | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[Finished]:
        """Yields requests as they finish.

        Args:
            requests: read lazily, a few slots' worth ahead.
            sampling: for all of them.
            seed: a request's random numbers depend on it, its key and its turn only, not on its neighbours.
            follow_up: called with each response; returns tokens that go on the same sequence (the next user turn),
                whose keys and values stay in the slot, or None to finish.
            stop: asked before each step; once true, running sequences are yielded as they are ('length') and the rest
                of the requests is not read.

        Raises:
            UserError: an empty prompt, one that leaves no room for a response, or a repetition penalty.
        """
        if sampling.repetition_penalty != 1:
            raise UserError(
                f"repetition_penalty={sampling.repetition_penalty}: responses are generated without; leave it at 1"
            )
        run = _Run(self, sampling, seed, follow_up)
        source = iter(requests)
        queue = deque(islice(source, 2 * self.slots))
        run.share_prefix([request.prompt_ids for request in queue])
        while True:
            queue.extend(islice(source, 2 * self.slots - len(queue)))
            if stop is not None and stop():
                yield from run.flush()
                return
            room = min(len(run.free), len(queue))
            waiting = [slot for slot, it in run.running.items() if it.waiting]
            stepping = len(waiting) < len(run.running)
            if room + len(waiting) >= self.refill or not stepping or (waiting and not queue):
                if not room and not waiting:
                    return
                for _ in range(room):
                    run.admit(queue.popleft())
                yield from run.prefill()
            elif stepping:
                yield from run.step(drain=not queue)


class _Run:
    """The state of one `SlotEngine.run`."""

    def __init__(self, engine: SlotEngine, sampling: SamplingParams, seed: int, follow_up: FollowUp | None):
        self.engine, self.target = engine, engine.target
        self.sampling, self.seed, self.follow_up = sampling, seed, follow_up
        self.cache = SlotCache(engine.target, engine.slots, engine.feature_layers)
        self.running: dict[int, _Running] = {}
        self.free = list(range(engine.slots))
        self.prefix: list[int] = []

    def share_prefix(self, prompts: list[Sequence[int]]) -> None:
        """Computes what all prompts begin with (system prompt, chat opening) once. Each keeps a token of its own."""
        if len(prompts) < 2 or min(map(len, prompts)) < 2:
            return
        low, high = min(map(tuple, prompts)), max(map(tuple, prompts))
        length = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
        self.prefix = list(low[: min(length, min(map(len, prompts)) - 1)])
        for piece in range(0, len(self.prefix), _PIECE):
            self._feed([self.free[0]], [self.prefix[piece : piece + _PIECE]], [piece])
        self.cache.keep_prefix(self.free[0], len(self.prefix))

    def admit(self, request: Request) -> None:
        """Gives a request the first free slot."""
        prompt = list(request.prompt_ids)
        limit = self.engine.max_length
        if not 0 < len(prompt) < limit:
            raise UserError(
                f"prompt {request.key!r} has {len(prompt)} tokens; it needs at least 1 and, with max_length={limit}, "
                f"at most {limit - 1}: shorten it or raise max_length"
            )
        slot = self.free.pop(0)
        shared = len(self.prefix) if len(prompt) > len(self.prefix) and self._has_prefix(prompt) else 0
        if shared:
            self.cache.paste_prefix(slot)
        self.running[slot] = _Running(request, prompt, len(prompt), shared)
        self._draw_uniforms(self.running[slot])

    def _has_prefix(self, prompt: list[int]) -> bool:
        return prompt[: len(self.prefix)] == self.prefix

    def _draw_uniforms(self, it: _Running) -> None:
        if self.sampling.greedy:
            return
        name = f"{self.seed}/{it.turn}/{it.request.key}".encode()
        seed = int.from_bytes(hashlib.sha256(name).digest()[:8], "little", signed=True)
        generator = torch.Generator().manual_seed(seed)
        it.uniforms = torch.rand(it.request.max_new_tokens, dtype=torch.float64, generator=generator).tolist()

    # -- forwards -----------------------------------------------------------------------------------------------

    def prefill(self) -> Iterator[Finished]:
        """Feeds all tokens that wait (prompts, follow-ups) and samples the first token of each response.

        Rows of similar length go together, padded on the right; long ones in pieces.
        """
        last: dict[int, Tensor] = {}
        for batch in self._prefill_batches():
            while batch:
                rows = [self.running[slot] for slot in batch]
                pieces = [it.sequence[it.cached : it.cached + _PIECE] for it in rows]
                hidden = self._feed(batch, pieces, [it.cached for it in rows])
                for i, it in enumerate(rows):
                    it.cached += len(pieces[i])
                    last[batch[i]] = hidden[i, len(pieces[i]) - 1]
                batch = [slot for slot in batch if self.running[slot].cached < len(self.running[slot].sequence)]
        if last:
            yield from self._accept(list(last), torch.stack(list(last.values())))

    def _prefill_batches(self) -> list[list[int]]:
        """Waiting slots in groups of similar length, small enough for one pass."""
        lengths = {slot: len(it.sequence) - it.cached for slot, it in self.running.items() if it.waiting}
        batches: list[list[int]] = []
        real = 0
        for slot in sorted(lengths, key=lengths.__getitem__):
            length = min(lengths[slot], _PIECE)
            padded = length * (len(batches[-1]) + 1) if batches else 0
            real += length
            # Another pass costs about as much as 64 more tokens in this one.
            if not batches or padded > _PASS_TOKENS or padded - real > max(64, real // 8):
                batches.append([])
                real = length
            batches[-1].append(slot)
        return batches

    def step(self, drain: bool) -> Iterator[Finished]:
        """Feeds the newest token of every running sequence and samples the next."""
        if drain:
            self._compact()
        rows = max(self.running) + 1
        # Free slots compute along, at a column that a sliding window has to read anyway.
        tokens, starts = [[0]] * rows, [min(it.cached for it in self.running.values())] * rows
        for slot, it in self.running.items():
            # So do waiting slots: what they write lies behind their cached tokens and is overwritten later.
            tokens[slot], starts[slot] = [it.sequence[it.cached]], it.cached
        stepped = [slot for slot, it in self.running.items() if not it.waiting]
        hidden = self._feed(None, tokens, starts)[stepped, 0]
        for slot in stepped:
            self.running[slot].cached += 1
        yield from self._accept(stepped, hidden)

    def _feed(self, slots: list[int] | None, tokens: list[list[int]], starts: list[int]) -> Tensor:
        """Runs ragged token rows, row i at positions starts[i].. of its slot (None: slot i). Returns [b, n, h]."""
        longest = max(map(len, tokens))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in tokens], device=self.target.device)
        return self.cache.forward(slots, ids, torch.tensor(starts, device=self.target.device))

    def _compact(self) -> None:
        """Moves the last running sequences into free slots below them, so that steps run fewer rows."""
        rows = max(self.running) + 1
        if rows - len(self.running) < max(1, rows // 8):
            return
        holes = [slot for slot in range(rows) if slot not in self.running]
        for source in sorted(self.running, reverse=True):
            if not holes or holes[0] > source:
                break
            self.cache.move(source, holes[0], self.running[source].cached)
            self.running[holes.pop(0)] = self.running.pop(source)
        self.running = dict(sorted(self.running.items()))
        self.free = [slot for slot in range(self.engine.slots) if slot not in self.running]

    # -- tokens -------------------------------------------------------------------------------------------------

    def _accept(self, slots: list[int], hidden: Tensor) -> Iterator[Finished]:
        """Samples a token for each slot from its last state, hidden [len(slots), h], and ends what is done."""
        uniforms = None
        if not self.sampling.greedy:
            rows = [self.running[slot] for slot in slots]
            draws = [it.uniforms[len(it.sequence) - it.start] for it in rows]
            uniforms = torch.tensor(draws, dtype=torch.float64, device=hidden.device)
        tokens = sample(self.target.head(hidden), self.sampling, uniforms).tolist()
        self.engine.new_tokens += len(tokens)
        for slot, token in zip(slots, tokens, strict=True):
            it = self.running[slot]
            it.sequence.append(token)
            full = len(it.sequence) >= self.engine.max_length
            if token in it.request.stop_ids:
                yield from self._end(slot, "stop")
            elif full or len(it.sequence) - it.start >= it.request.max_new_tokens:
                yield from self._end(slot, "length")

    def _end(self, slot: int, reason: str) -> Iterator[Finished]:
        it = self.running[slot]
        finished = Finished(it.request.key, it.sequence[it.start :], reason, list(it.sequence))
        more = self.follow_up(finished) if self.follow_up is not None else None
        if more and len(it.sequence) + len(more) < self.engine.max_length:
            it.sequence.extend(more)
            it.start, it.turn = len(it.sequence), it.turn + 1
            self._draw_uniforms(it)
            return
        yield self._close(slot, finished)

    def _close(self, slot: int, finished: Finished) -> Finished:
        finished.features, finished.last_hidden = self.cache.features(slot, self.running[slot].cached)
        del self.running[slot]
        self.free = sorted([*self.free, slot])
        return finished

    def flush(self) -> Iterator[Finished]:
        """Ends every running sequence where it is; those that have no response yet are dropped."""
        for slot, it in list(self.running.items()):
            if it.turn > 0 or len(it.sequence) > it.start:
                finished = Finished(it.request.key, it.sequence[it.start :], "length", list(it.sequence))
                yield self._close(slot, finished)
