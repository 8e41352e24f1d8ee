"""How much to draft: less where it does not pay, nothing where it never does, and back again when it does.

A `Pace` is asked for the tree of every round and told what the round took and brought. `Adaptive` estimates, for the tree
that the user allows and a ladder of smaller ones,

    rate(tree) = tokens that a round commits / seconds that a round takes

and drafts the one with the highest rate. Tokens are a running mean; a round tells about smaller trees too, since what
they would have accepted lies in what was drafted. Seconds are running medians: of target passes by the number of new tokens
(all rows' roots and nodes), of drafting by tree and rows. Nothing needs to be configured, and batches change the costs by
themselves: many rows fill the pass, so trees shrink.

Where plain decoding is faster, drafting stops, the drafter is not even fed, and small trials are paid from an allowance: a
fixed share of the time that passes, plus whatever trials gain. So a useless drafter costs no more than that share, while one
that starts to hit earns its own next trial at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Protocol

from drafttrain.batch import TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec

_ALLOWANCE = 0.015  # share of the time that trials may lose
_MOST = 4.0  # plain rounds that the allowance holds at most
_WINDOW = 16  # rounds that the running mean of accepted tokens goes back
_TRUST = (
    8  # rounds with an accepted token each that a drafter is credited with at first: real acceptance comes in bursts
)
_SAMPLES = 9  # rounds that a median is taken of
_LOOK = 32  # rounds between two looks at plain decoding, and at the next larger tree
_MARGIN = 1.03  # how much faster drafting must look before it starts again


@dataclass
class Round:
    """What a round did.

    Attributes:
        spec: the tree asked for. rows: sequences in the round. new_tokens: of the target's pass, roots and nodes.
        seconds: of the whole round. draft_seconds: of proposing.
        read: committed tokens that the drafter took in first; read_seconds: what that took.
        drafted: per row that a tree was asked for, the tree and the accepted path.
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
    """Chooses the tree of each round."""

    def choose(self, rows: int, behind: int) -> TreeSpec:
        """The next round's tree for `rows` sequences; the drafter has `behind` committed tokens still to take in."""
        ...

    def observe(self, done: Round) -> None:
        """Is told about every round."""
        ...


class Costs:
    """Running medians of seconds by a number, read off between two of them on a straight line."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def add(self, at: int, seconds: float) -> None:
        at = self._key(at)
        samples = self._samples.setdefault(at, deque(maxlen=_SAMPLES))
        samples.append(seconds)
        self._medians[at] = median_low(samples)

    def lowest(self) -> int | None:
        """The least number with a sample."""
        return min(self._medians, default=None)

    def at(self, place: float) -> float:
        """Seconds at `place`; flat below the known range, on the last line above it, 0 without samples."""
        known = sorted(self._medians)
        if not known:
            return 0.0
        above = next((i for i, key in enumerate(known) if key >= place), len(known) - 1)
        if above == 0:
            return self._medians[known[0]]
        left, right = known[above - 1], known[above]
        low, high = self._medians[left], self._medians[right]
        return max(low, low + (high - low) * (place - left) / (right - left))

    @staticmethod
    def _key(at: int) -> int:
        """Every number up to 16, then coarser, so that large passes share their samples."""
        step = 1 << max(0, at.bit_length() - 5)
        return at // step * step


class Adaptive:
    """The pace of `@adapt`. It keeps what it has learned, so use one decoder for many calls.

    Args:
        spec: the largest tree.
    """

    def __init__(self, spec: TreeSpec):
        self.levels = [TreeSpec.parse("none"), *spec.smaller()]
        count = len(self.levels)
        # Per level accepted tokens a row: their decayed sum over the decayed number of rounds.
        self._sums, self._weights = [0.0] + [float(_TRUST)] * (count - 1), [float(_TRUST)] * count
        self._hits, self._tries = 0.5, 1.0  # decayed counts of accepted tokens, and of accepted and first rejected ones
        self._nodes = [float(level.budget) for level in self.levels]
        self._passes = Costs()
        self._drafting = [Costs() for _ in self.levels]
        self._reading = Costs()  # by committed tokens taken in
        self._credit = 0.0  # seconds that trials may lose
        self._rounds = 0
        self.on = True
        self.level = count - 1

    def choose(self, rows: int, behind: int) -> TreeSpec:
        self._rounds += 1
        self.level = self._choose(rows, behind)
        return self.levels[self.level]

    def _choose(self, rows: int, behind: int) -> int:
        lowest = self._passes.lowest()
        if lowest is None:
            return 1
        if rows < lowest:
            return 0  # what plain decoding takes must be known
        plain = self._passes.at(rows)
        rates = [rows * self.tokens(level) / self._cost(level, rows) for level in range(1, len(self.levels))]
        best = 1 + max(range(len(rates)), key=rates.__getitem__)
        self.on = rates[best - 1] * plain > rows * (1.0 if self.on else _MARGIN)
        if self.on:
            if self._rounds % _LOOK == 0:
                return 0
            return min(best + 1, len(rates)) if self._rounds % _LOOK == _LOOK // 2 else best
        loss = self._cost(best, rows) + self._reading.at(behind) - plain
        return best if self._credit >= loss else 0

    def tokens(self, level: int) -> float:
        """Tokens that a row commits a round at a level, the bonus token included."""
        return 1.0 + self._sums[level] / self._weights[level]

    def _cost(self, level: int, rows: int) -> float:
        """Seconds that a round of so many rows takes."""
        drafting = self._drafting[level].at(rows)
        if drafting == 0.0:  # not tried yet: as much per depth as a neighbour takes
            known = [(costs.at(rows), self.levels[i].depth) for i, costs in enumerate(self._drafting) if i]
            drafting = self.levels[level].depth * max((seconds / depth for seconds, depth in known), default=0.0)
        reading = self._reading.at(rows * self.tokens(level))
        return self._passes.at(rows * (1 + self._nodes[level])) + drafting + reading

    def observe(self, done: Round) -> None:
        if self._rounds <= 2:  # they lay out weights, for many rows and for few, which no later round does
            return
        self._passes.add(done.new_tokens, done.seconds - done.draft_seconds - done.read_seconds)
        if done.read:
            self._reading.add(done.read, done.read_seconds)
        plain = self._passes.at(done.rows)
        earned = _ALLOWANCE * done.seconds
        if done.drafted:
            tokens = done.rows + sum(len(path) for _, path in done.drafted)
            earned += plain * tokens / done.rows - done.seconds
            self._drafting[self.level].add(done.rows, done.draft_seconds)
            self._learn(done.drafted)
        self._credit = min(max(self._credit + earned, 0.0), _MOST * plain)

    def _learn(self, drafted: Sequence[tuple[TokenTree, list[int]]]) -> None:
        """Running means of every level from a round at `self.level`."""
        count = len(drafted)
        nodes = sum(len(tree) for tree, _ in drafted) / count
        self._nodes[self.level] += (nodes - self._nodes[self.level]) / _WINDOW
        mean = sum(len(path) for _, path in drafted) / count
        keep = 1 - 1 / _WINDOW
        self._hits = keep * self._hits + mean
        self._tries = keep * self._tries + mean + sum(len(path) < tree.drafted_depth for tree, path in drafted) / count
        here = self.tokens(self.level)
        for level in range(1, len(self.levels)):
            accepted = mean
            if level < self.level:
                accepted = sum(reached(self.levels[level], tree, path) for tree, path in drafted) / count
            elif level > self.level:
                accepted += max(self.tokens(level) - here, self._beyond(level))
            self._sums[level] = keep * self._sums[level] + accepted
            self._weights[level] = keep * self._weights[level] + 1

    def _beyond(self, level: int) -> float:
        """Tokens that a deeper tree would get below the present one, if depths accept alike."""
        share = self._hits / self._tries
        return sum(share**depth for depth in range(self.levels[self.level].depth + 1, self.levels[level].depth + 1))


def reached(spec: TreeSpec, tree: TokenTree, path: Sequence[int]) -> int:
    """How many of a larger tree's accepted nodes a smaller one would have held, as far as its depth and scores tell."""
    if not path:
        return 0
    if tree.log_probs is None or spec.shape != "dynamic":
        return min(len(path), spec.depth)
    scores = tree.log_probs.tolist()
    shallow = [node for node, depth in enumerate(tree.depths) if depth <= spec.depth]
    kept = set(sorted(shallow, key=lambda node: (-scores[node], node))[: spec.budget])
    return next((count for count, node in enumerate(path) if node not in kept), len(path))
