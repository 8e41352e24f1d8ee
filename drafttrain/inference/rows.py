"""The sequences that a decoder has at hand: what is known of each, and how their prompts share forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from drafttrain.drafters.base import Session
from drafttrain.inference.stats import Stats
from drafttrain.inference.text import TextStream
from drafttrain.inference.verify import Verdict, Verifier


@dataclass
class Row:
    """A sequence on its way.

    Attributes:
        index: which prompt it continues; slot: its row of the cache.
        prompt: [L]; limit: most new tokens.
        verifier: says which drafted tokens the target would have chosen.
        text: looks for stop strings; None without any.
        root: [1], the last committed token, whose keys are not in the cache yet.
        speculate: something may be drafted.
        session: the drafter's; None where nothing is drafted.
        pending: committed tokens [m] and their features [m, f*h] that the session has not taken in yet.
        probed: the node of each probe that the session has asked for in this round.
        joined: when its prefill began.
    """

    index: int
    prompt: Tensor
    limit: int
    verifier: Verifier
    text: TextStream | None
    stats: Stats
    root: Tensor
    speculate: bool = True
    slot: int = 0
    session: Session | None = None
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    probed: list[int] = field(default_factory=list)
    joined: float = 0.0

    @property
    def left(self) -> int:
        return self.limit - self.stats.new_tokens

    @property
    def behind(self) -> int:
        """Committed tokens that the session has not taken in yet."""
        return sum(len(tokens) for tokens, _ in self.pending)

    def record(self, verdict: Verdict, moment: float) -> list[int]:
        """Books a round's tokens, known at `moment`, and returns them: up to the end of a stop string."""
        stats, tokens = self.stats, verdict.tokens
        if self.text is not None:
            tokens = tokens[: self.text.push(tokens)]
        stats.new_tokens += len(tokens)
        stats.total_seconds = moment - self.joined
        stats.token_seconds += [stats.total_seconds] * len(tokens)
        if self.text is not None and self.text.stopped:
            stats.finish = "stop"
        elif verdict.ended:
            stats.finish = "eos"
        elif self.left <= 0:
            stats.finish = "length"
        return tokens

    def count(self, accepted: int, tokens: int, depth: int) -> None:
        """Counts a round that accepted so many drafted tokens, committed so many in all and offered such a depth."""
        cut = self.stats.ended and tokens <= accepted
        self.stats.target_passes += 1
        self.stats.accepted.append(tokens if cut else accepted)
        self.stats.offered.append(tokens if cut else depth)


def chunks(lengths: Sequence[int], size: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cuts sequences into forwards of at most `size` tokens, in order: lists of (which sequence, begin, end)."""
    chunk: list[tuple[int, int, int]] = []
    room = size
    for i, length in enumerate(lengths):
        begin = 0
        while begin < length:
            end = min(length, begin + room)
            chunk.append((i, begin, end))
            room -= end - begin
            begin = end
            if room == 0:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk
