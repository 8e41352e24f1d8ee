"""Adaptive speculation: a smaller tree where the given one does not pay, plain decoding where none does.

A `Pace` chooses the tree of every round and observes what the round cost and committed. `Adaptive` estimates, for the tree
that the user allows and a ladder of smaller ones,

    rate(tree) = tokens that a round commits / seconds that a round takes

and drafts the tree with the highest rate. Tokens are a running mean. A round also updates smaller trees, because the drafted
tree contains the nodes that they would have accepted. Seconds are running medians: of target passes by number of new tokens
(roots and nodes of all rows), of drafting by tree and rows. Nothing needs configuration. Batches change the costs by
themselves: many rows fill the pass, so trees shrink.

Where plain decoding is faster, drafting stops and the drafter reads nothing. Exploration rounds may cost at most a fixed share
of run time plus what earlier ones have saved. So a useless drafter costs no more than that share, and a drafter that starts to
hit pays for its own next trial.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Protocol

from drafttrain.batch import TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec

_ALLOWANCE = 0.015  # share of run time that exploration may cost
_MOST = 4.0  # most plain rounds that the allowance accumulates
_WINDOW = 16  # rounds in the running mean of accepted tokens
_TRUST = 8  # initial credit of a drafter: rounds with one accepted token each, because real acceptance comes in bursts
_SAMPLES = 9  # rounds per median
_LOOK = 32  # rounds between two trials of plain decoding, and of the next larger tree
_MARGIN = 1.03  # drafting resumes when it is estimated to be faster by this factor


@dataclass
class RoundReport:
    """What a round cost and committed.

    Attributes:
        spec: the requested tree. rows: sequences in the round. new_tokens: roots and nodes of the target's pass.
        seconds: the full round. draft_seconds: proposing.
        read: committed tokens that the drafter read first; read_seconds: time for that.
        drafted: tree and accepted path per sequence that drafted.
    """

    spec: TreeSpec
    rows: int
    new_tokens: int
    seconds: float
    draft_seconds: float
    read: int
    read_seconds: float
    drafted: Sequence[tuple[TokenTree, list[int]]]


class Pace(Protocol):
    """Chooses the tree of each round. One pace may serve several calls at a time."""

    def choose(self, rows: int, behind: int) -> TreeSpec:
        """The next round's tree for `rows` sequences, with `behind` committed tokens that the drafter has not read yet."""
        ...

    def observe(self, done: RoundReport) -> None:
        """Receives the report of every round."""
        ...


class Costs:
    """Median cost per size, interpolated."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def add(self, size: int, seconds: float) -> None:
        size = self._key(size)
        samples = self._samples.setdefault(size, deque(maxlen=_SAMPLES))
        samples.append(seconds)
        self._medians[size] = median_low(samples)

    def lowest(self) -> int | None:
        """The smallest size with a sample."""
        return min(self._medians, default=None)

    def at(self, size: float) -> float:
        """Seconds at a size: constant below the known range, extrapolated above it, 0 without samples."""
        known = sorted(self._medians)
        if not known:
            return 0.0
        above = next((i for i, key in enumerate(known) if key >= size), len(known) - 1)
        if above == 0:
            return self._medians[known[0]]
        left, right = known[above - 1], known[above]
        low, high = self._medians[left], self._medians[right]
        return max(low, low + (high - low) * (size - left) / (right - left))

    @staticmethod
    def _key(size: int) -> int:
        """Every size up to 16, then coarser, so that large passes share their samples."""
        step = 1 << max(0, size.bit_length() - 5)
        return size // step * step


class Adaptive:
    """The pace of `@adapt`. It keeps what it has learned, so use one decoder for many calls.

    Args:
        spec: the largest tree.
    """

    def __init__(self, spec: TreeSpec):
        self.levels = [TreeSpec.parse("none"), *spec.smaller()]
        count = len(self.levels)
        # Per level, accepted tokens per row: decayed sum and decayed number of rounds.
        self._sums, self._weights = [0.0] + [float(_TRUST)] * (count - 1), [float(_TRUST)] * count
        self._hits, self._tries = 0.5, 1.0  # decayed counts of accepted tokens, and of accepted and first rejected ones
        self._nodes = [float(level.budget) for level in self.levels]
        self._passes = Costs()
        self._drafting = [Costs() for _ in self.levels]
        self._reading = Costs()  # by committed tokens read
        self._credit = 0.0  # seconds that exploration may cost
        self._rounds = 0
        self._on = True
        self._lock = threading.Lock()

    def choose(self, rows: int, behind: int) -> TreeSpec:
        with self._lock:
            self._rounds += 1
            return self.levels[self._choose(rows, behind)]

    def _choose(self, rows: int, behind: int) -> int:
        lowest = self._passes.lowest()
        if lowest is None:
            return 1
        if rows < lowest:
            return 0  # the cost of plain decoding is unknown
        plain = self._passes.at(rows)
        rates = [rows * self.tokens(level) / self._cost(level, rows) for level in range(1, len(self.levels))]
        best = 1 + max(range(len(rates)), key=rates.__getitem__)
        self._on = rates[best - 1] * plain > rows * (1.0 if self._on else _MARGIN)
        if self._on:
            if self._rounds % _LOOK == 0:
                return 0
            return min(best + 1, len(rates)) if self._rounds % _LOOK == _LOOK // 2 else best
        loss = self._cost(best, rows) + self._reading.at(behind) - plain
        return best if self._credit >= loss else 0

    def tokens(self, level: int) -> float:
        """Estimated tokens that a row commits per round at a level, bonus token included."""
        return 1.0 + self._sums[level] / self._weights[level]

    def _cost(self, level: int, rows: int) -> float:
        """Estimated seconds of a round of `rows` sequences."""
        drafting = self._drafting[level].at(rows)
        if drafting == 0.0:  # not tried yet: the cost per depth of another level
            known = [(costs.at(rows), self.levels[i].depth) for i, costs in enumerate(self._drafting) if i]
            drafting = self.levels[level].depth * max((seconds / depth for seconds, depth in known), default=0.0)
        reading = self._reading.at(rows * self.tokens(level))
        return self._passes.at(rows * (1 + self._nodes[level])) + drafting + reading

    def observe(self, done: RoundReport) -> None:
        with self._lock:
            if self._rounds > 2:  # the first two lay out weights, for many rows and for few, which no later round does
                self._observe(done)

    def _observe(self, done: RoundReport) -> None:
        self._passes.add(done.new_tokens, done.seconds - done.draft_seconds - done.read_seconds)
        if done.read:
            self._reading.add(done.read, done.read_seconds)
        plain = self._passes.at(done.rows)
        earned = _ALLOWANCE * done.seconds
        if done.drafted:
            level = self.levels.index(done.spec)
            tokens = done.rows + sum(len(path) for _, path in done.drafted)
            earned += plain * tokens / done.rows - done.seconds
            self._drafting[level].add(done.rows, done.draft_seconds)
            self._learn(level, done.drafted)
        self._credit = min(max(self._credit + earned, 0.0), _MOST * plain)

    def _learn(self, drafted_level: int, drafted: Sequence[tuple[TokenTree, list[int]]]) -> None:
        """Updates the running means of every level from a round at one level."""
        count, here = len(drafted), drafted_level
        nodes = sum(len(tree) for tree, _ in drafted) / count
        self._nodes[here] += (nodes - self._nodes[here]) / _WINDOW
        mean = sum(len(path) for _, path in drafted) / count
        keep = 1 - 1 / _WINDOW
        self._hits = keep * self._hits + mean
        self._tries = keep * self._tries + mean + sum(len(path) < tree.drafted_depth for tree, path in drafted) / count
        before = self.tokens(here)
        for level in range(1, len(self.levels)):
            accepted = mean
            if level < here:
                accepted = sum(reached(self.levels[level], tree, path) for tree, path in drafted) / count
            elif level > here:
                accepted += max(self.tokens(level) - before, self._beyond(here, level))
            self._sums[level] = keep * self._sums[level] + accepted
            self._weights[level] = keep * self._weights[level] + 1

    def _beyond(self, here: int, level: int) -> float:
        """Tokens that a deeper level would add to this one if all depths have the same acceptance rate."""
        share = self._hits / self._tries
        return sum(share**depth for depth in range(self.levels[here].depth + 1, self.levels[level].depth + 1))


def reached(spec: TreeSpec, tree: TokenTree, path: Sequence[int]) -> int:
    """Number of a larger tree's accepted nodes that a smaller tree would have held, judged by its depth and scores."""
    if not path:
        return 0
    if tree.log_probs is None or spec.shape != "dynamic":
        return min(len(path), spec.depth)
    scores = tree.log_probs.tolist()
    shallow = [node for node, depth in enumerate(tree.depths) if depth <= spec.depth]
    kept = set(sorted(shallow, key=lambda node: (-scores[node], node))[: spec.budget])
    return next((count for count, node in enumerate(path) if node not in kept), len(path))
