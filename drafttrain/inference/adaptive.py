"""Adaptive speculation: a smaller tree, or plain decoding, where the given tree does not pay.

A `Pace` chooses the tree of every round and observes what the round cost and committed. `Adaptive`
estimates, for the tree that the user allows and every smaller depth and number of nodes,

    rate(tree) = tokens that a round commits / seconds that a round takes

and drafts the tree with the highest rate. Nothing needs configuration, and noise decides little:

tokens      counted, not timed: a drafted tree contains every smaller one, so each round tells what
            all of them would have accepted. The mean is over 256 rows of rounds, so that it is
            steady on a steady load; when recent rounds differ from it by more than chance, they
            replace it.
seconds     running medians: of target passes by number of new tokens (roots and nodes of all rows),
            of drafting by depth and rows. Larger batches change the costs: many rows fill the
            target's pass, so trees shrink.
start       with the given tree, which the user or `tune` found good; its first rounds inform about
            all others.

Where plain decoding is faster, drafting stops and the drafter reads nothing. Exploration may cost
at most 1.2 % of run time plus what it has saved: a trial of another tree pays what it loses against
the best one and earns what it gains. So a useless drafter costs little more than that share, and a
drafter that becomes useful pays for its own next trial.

What made drafting stop was perhaps one passage or one request. So while it is off, the mean returns
step by step to that of the last 512 rows of rounds, and with it drafting. A stretch in which
drafting did not pay for long halves the speed of the next return.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Protocol

import numpy as np

from drafttrain.batch import TokenTree
from drafttrain.drafters.combined import WORTH
from drafttrain.drafters.common.tree_spec import TreeSpec

_ALLOWANCE = 0.012  # share of run time that trials may lose
_MOST = 4.0  # plain rounds: the first budget of trials, and the most that it accumulates
_FIRST = 12  # first rounds that draft the given tree, as long as the budget lasts
_BLIND = 48  # most new tokens of a first pass, unless plain decoding has more
# Rounds between two trials of plain decoding, four times as many where drafting is clearly faster.
_LOOK = 64
_CLEAR = 1.15  # "clearly faster": by this factor
# Drafting starts if it is estimated to be faster by this factor, and stops if it is slower by it.
_MARGIN = 1.015
_TRUST = 4  # rows of rounds that the initial estimate of acceptance counts for
_SHARE = 0.5  # the initial estimate: acceptance of each depth
_WINDOW = 256  # rows of rounds in the running mean of accepted tokens
_USUAL = 512  # and in the mean to which it returns while drafting is off
_RETURN = 128  # rounds in which it goes most of that way, if drafting had paid for as many
_RECENT = 12  # rounds that are compared with the running mean
_SURE = 4.0  # standard deviations between the two that are not chance
_SAMPLES = 9  # rounds per median
_SLOWEST = 2.0  # a sample counts at most this many times what was expected
_PERIOD = 4  # rounds between two decisions, which read those rounds: most of the work of adapting
_LIKELY = math.log(WORTH)  # least score of a match's nodes that may exceed a tree's budget
_STEADY = 5  # passes that tell how fast the machine is now


@dataclass
class RoundReport:
    """What a round cost and committed.

    Attributes:
        spec: the requested tree.
        rows: sequences in the round.
        new_tokens: roots and nodes of the target's pass.
        seconds: of the full round.
        draft_seconds: of proposing.
        read: committed tokens that the drafter read first.
        read_seconds: of that reading.
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
        """The next round's tree.

        Args:
            rows: sequences. behind: committed tokens that the drafter has not read yet.
        """
        ...

    def observe(self, done: RoundReport) -> None:
        """Receives the report of every round."""
        ...


class Costs:
    """Median cost per size, interpolated."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._known = np.zeros((2, 0))  # see `_curve`
        self._stale = False

    def add(self, size: int, seconds: float) -> None:
        """Adds a sample."""
        size = self._key(size)
        expected = self.median(size)
        if expected:  # one slow round must not rule out a size
            seconds = min(seconds, _SLOWEST * expected)
        samples = self._samples.setdefault(size, deque(maxlen=_SAMPLES))
        samples.append(seconds)
        self._medians[size] = median_low(samples)
        self._stale = True

    def _curve(self) -> np.ndarray:
        """Sizes and seconds, [2, n]. No pass costs more than a larger one."""
        if self._stale:
            sizes = sorted(self._medians)
            seconds = np.array([self._medians[size] for size in sizes])
            # From the largest size down, so that no pass costs more than a larger one.
            bounded = np.minimum.accumulate(seconds[::-1])[::-1]
            self._known = np.stack([np.array(sizes, float), bounded])
            self._stale = False
        return self._known

    def settled(self, size: int) -> bool:
        """Whether a size has enough samples to be relied on."""
        return len(self._samples.get(self._key(size), ())) >= _STEADY

    def lowest(self) -> int | None:
        """The smallest size with a sample."""
        return min(self._medians, default=None)

    def median(self, size: int) -> float:
        """Seconds at one size: its own median if it has samples."""
        known = self._medians.get(self._key(size))
        if known:
            return known
        return float(self.at(size))

    def at(self, size: np.ndarray | float) -> np.ndarray:
        """Seconds at sizes: constant below the known range, extrapolated above it.

        All are 0 without samples.
        """
        sizes, seconds = self._curve()
        if not len(sizes):
            return np.zeros(np.shape(size))
        found = np.interp(size, sizes, seconds)
        if len(sizes) > 1:
            # The steeper of the whole curve and its end: noise must not make large passes free.
            overall = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
            recent = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            slope = max(0.0, overall, recent)
            beyond = max(seconds[-2:]) + slope * (size - sizes[-1])
            found = np.where(size > sizes[-1], beyond, found)
        return found

    @staticmethod
    def _key(size: int) -> int:
        """Every size below 32, then coarser, so that large passes share their samples."""
        step = 1 << max(0, size.bit_length() - 5)  # the five leading bits tell sizes apart
        return size // step * step


class Adaptive:
    """The pace of `@adapt`. It keeps what it has learned, so use one decoder for many calls.

    Args:
        spec: the largest tree.

    Attributes:
        levels: `none`, then all trees to choose from, the given one last.
    """

    def __init__(self, spec: TreeSpec):
        self.levels = [TreeSpec.parse("none")]
        self.levels += spec.smaller()
        self._index = {level: i for i, level in enumerate(self.levels)}
        self._depths = np.array([level.depth for level in self.levels])
        self._budgets = np.array([level.budget for level in self.levels])
        # A match may have more nodes than its tree's budget.
        self._most = np.maximum(self._budgets, spec.match)
        # [m, m]: the largest level that two levels contain.
        every = np.arange(len(self.levels))
        known = np.zeros((spec.depth + 1, spec.budget + 1), int)
        known[self._depths, self._budgets] = every
        self._common = known[
            np.minimum.outer(self._depths, self._depths),
            np.minimum.outer(self._budgets, self._budgets),
        ]
        self._contained = self._common == every  # [m, m]: what each level contains
        # A level's parent is the largest smaller level that it contains. Figures are kept as what a
        # level adds to its parent; `_sums` [m, m] is 1 where a level's figure includes another's
        # addition.
        self._parents = np.zeros(len(self.levels), int)
        self._sums = np.eye(len(self.levels))
        for i in every[1:]:
            self._parents[i] = every[:i][self._contained[i, :i]][-1]
            self._sums[i] += self._sums[self._parents[i]]
        # Per row: accepted tokens and drafted nodes [m], running means over `_weight` rows of
        # rounds, and what each level adds to its parent's.
        # The first guess is a geometric series: each depth is accepted with _SHARE of the one
        # above.
        self._accepted = _SHARE * (1 - _SHARE**self._depths) / (1 - _SHARE)
        self._nodes = self._budgets.astype(float)
        self._added = np.stack([self._accepted, self._nodes])  # [2, m]
        self._added[:, 1:] -= self._added[:, self._parents[1:]]
        self._weight = np.full(len(self.levels), float(_TRUST))
        self._usual = self._added.copy()  # the same over `_usual_weight` rows of rounds
        self._usual_weight = self._weight.copy()
        # Rounds at one level that `_learn` has not read yet: until the next decision.
        self._unread: list[RoundReport] = []
        # Accepted tokens of recent rounds against the mean: their mean difference and variance.
        self._drift = 0.0
        self._variance = 1.0
        self._main = 1.0  # share of rounds in which the drafter ran, rather than a match alone
        # Seconds: of target passes by new tokens, of reading by tokens, of matching by rows, and of
        # drafting by depth for each number of rows.
        self._passes = Costs()
        self._reading = Costs()
        self._matching = Costs()
        self._drafting: dict[int, Costs] = {}
        # Speed of the machine: recent passes over their medians.
        self._speeds: deque[float] = deque([1.0] * _STEADY, maxlen=_STEADY)
        self._credit = math.inf  # seconds that trials may lose; set with the first cost
        self._rounds = 0
        self._drafted = 0  # rounds that drafted
        self._rows = 0  # sequences at the latest decision
        self._kept = 0  # the level until the next decision
        self._on = True  # whether drafting pays
        self._began = 0  # the round since which it pays, earlier if it paid before
        self._paid = 0  # rounds for which it had paid when it stopped, at most _RETURN
        self._expected = 0.0  # seconds a token should take, if this round is a trial
        self._lock = threading.Lock()

    def choose(self, rows: int, behind: int) -> TreeSpec:
        with self._lock:
            self._rounds += 1
            self._expected = 0.0
            level = self._kept
            if self._rounds % _PERIOD == 0 or rows != self._rows or self._drafted < _FIRST:
                self._rows = rows
                level, self._kept = self._choose(rows, behind)
            return self.levels[level]

    def _choose(self, rows: int, behind: int) -> tuple[int, int]:
        """The level of this round, perhaps a trial, and that of the next ones."""
        self._learn()
        if not self._on:
            self._return()
        lowest = self._passes.lowest()
        if lowest is None:  # the largest tree that cannot take long
            first = self._largest(rows * (1 + self._budgets) <= max(_BLIND, 2 * rows))
            return first, first
        if rows < lowest:
            return 0, 0  # the cost of plain decoding is unknown

        # The best tree, and whether it is faster than plain decoding.
        tokens = 1 + self._accepted  # [m] per row
        seconds = self.seconds(rows)  # [m]
        paces = seconds / tokens  # seconds per token and row
        paces[-1] /= _MARGIN  # the given tree stays unless another is clearly better
        plain = float(seconds[0])
        best = 1 + int(paces[1:].argmin())
        # Hysteresis: drafting goes on, or stays off, unless the difference is clear.
        margin = 1 / _MARGIN if self._on else _MARGIN
        pays = bool(paces[best] * margin < plain)
        if pays and not self._on:
            self._drafted = 0  # as at the start
            self._began = self._rounds - self._paid // 2
        elif self._on and not pays:
            self._paid = min(self._rounds - self._began, _RETURN)
        self._on = pays
        pace = float(paces[best]) if self._on else plain
        losses = seconds - tokens * pace  # [m] seconds that a round loses against the best

        # A trial: sometimes plain decoding, sometimes a larger tree, sometimes a similar one.
        look = _LOOK if paces[best] * _CLEAR > plain else 4 * _LOOK
        turn = self._rounds % 16
        trial = best
        if self._on and self._rounds % look == 0:
            trial = 0
        elif self._drafted < _FIRST or (self._on and turn == 8):
            contains_best = self._common[best] == best
            # Half: some credit is left.
            larger = self._largest(contains_best & (losses <= self._credit / 2))
            if larger:
                trial = larger
        elif not self._on:
            # While drafting is off, its trial also reads all that the drafter has missed.
            losses[best] = seconds[best] + float(self._reading.at(behind)) - plain
        elif turn == 0:  # the next best of another size, at almost no loss
            others = self._budgets != self._budgets[best]
            others[0] = False  # plain decoding has trials of its own
            if others.any():
                trial = int(np.where(others, paces, np.inf).argmin())

        kept = best if self._on else 0
        wanted = trial != best or not self._on
        # Plain decoding may be tried without credit: nothing else shows that drafting stopped
        # paying.
        allowed = losses[trial] <= self._credit
        if wanted and (allowed or (self._on and not trial)):
            self._expected = pace
            return trial, kept
        return kept, kept

    def _largest(self, which: np.ndarray) -> int:
        """The level of a mask [m] that tells most about the others: deep and wide.

        It is `none` if the mask is empty.
        """
        return int(np.where(which, self._depths * self._budgets, 0).argmax())

    def seconds(self, rows: int) -> np.ndarray:
        """Estimated seconds of a round of `rows` sequences at each level."""
        passes = self._passes.at(rows * (1 + self._nodes))
        if not self._drafting:
            return passes
        # Drafting was timed at some numbers of rows only.
        nearest = min(self._drafting, key=lambda known: abs(known - rows))
        drafting = self._main * self._drafting[nearest].at(self._depths)  # [m]
        drafting += (1 - self._main) * self._matching.at(rows)
        made = passes + drafting + self._reading.at(rows * (1 + self._accepted))
        made[0] = passes[0]  # plain decoding neither drafts nor reads
        return made

    def observe(self, done: RoundReport) -> None:
        with self._lock:
            # The first two lay out weights, for many rows and for few, which no later round does.
            if self._rounds > 2:
                self._observe(done)

    def _observe(self, done: RoundReport) -> None:
        passed = done.seconds - done.draft_seconds - done.read_seconds
        if self._passes.settled(done.new_tokens):
            self._speeds.append(passed / self._passes.median(done.new_tokens))
        # Seconds count relative to the machine's speed now, so that trees that were tried in a slow
        # moment do not look slow.
        speed = median_low(self._speeds)
        self._passes.add(done.new_tokens, passed / speed)
        plain = self._passes.median(done.rows)
        if done.read:
            self._reading.add(done.read, done.read_seconds / speed)
        level = self._index[done.spec]
        tokens = done.rows  # the bonus tokens
        if level and done.draft_seconds:
            alone = bool(done.drafted)  # whether all trees are matches
            for tree, path in done.drafted:
                tokens += len(path)
                if len(tree.matched) != len(tree):
                    alone = False
            if alone:
                self._main -= self._main / _RECENT
                self._matching.add(done.rows, done.draft_seconds / speed)
            else:
                self._main += (1 - self._main) / _RECENT
                costs = self._drafting.setdefault(done.rows, Costs())
                if costs.lowest() is None:
                    costs.add(0, 0.0)  # no depth, no cost: where the curve begins
                costs.add(done.spec.depth, done.draft_seconds / speed)
            self._drafted += 1
            if self._unread and self._unread[0].spec != done.spec:
                self._learn()
            self._unread.append(done)
        if math.isinf(self._credit):
            self._credit = _MOST * plain
        earned = _ALLOWANCE * plain
        if self._expected:  # the round was a trial
            spent = self._passes.median(done.new_tokens)
            spent += (done.draft_seconds + done.read_seconds) / speed
            earned += self._expected * tokens / done.rows - spent
        # Debt is limited too: one very slow trial must not end all later ones.
        self._credit = min(max(self._credit + earned, -plain / 2), _MOST * plain)

    def _learn(self) -> None:
        """Updates the running means of every level from the rounds since the last time."""
        if not self._unread:
            return
        level = self._index[self._unread[0].spec]
        rows = 0
        accepted = np.zeros(len(self.levels))
        nodes = np.zeros(len(self.levels))
        for done in self._unread:
            rows += done.rows
            own = 0.0  # accepted tokens at this level
            for tree, path in done.drafted:
                own_accepted, own_nodes = smaller_parts(
                    tree, path, self._depths, self._budgets, self._most
                )
                accepted += own_accepted
                nodes += own_nodes
                own += float(own_accepted[level])
            # Recent rounds replace the mean where they differ from it by more than chance.
            off = own / done.rows - float(self._accepted[level])
            self._drift += (off - self._drift) / _RECENT
            self._variance += (off**2 - self._variance) / (4 * _RECENT)
        contained = self._contained[level]
        self._weight = np.minimum(self._weight + rows * contained, _WINDOW)
        seen = np.stack([accepted, nodes]) / rows  # [2, m] per row
        # What a level adds to its parent is learned, because chance in a round moves both alike.
        added = seen - seen[:, self._parents]
        rate = contained * np.minimum(rows / self._weight, 1)  # [m]
        self._added += (added - self._added) * rate
        self._usual_weight = np.minimum(self._usual_weight + rows * contained, _USUAL)
        self._usual += (added - self._usual) * (
            contained * np.minimum(rows / self._usual_weight, 1)
        )
        # An exponential mean over n rounds has the variance v / (2 n - 1).
        if self._drift**2 > _SURE**2 * self._variance / (2 * _RECENT - 1):
            mean = max(float(self._accepted[level]), 1e-3)
            self._added[0] *= min(max((mean + self._drift) / mean, 0.25), 4.0)
            self._weight = np.minimum(self._weight, _RECENT * rows / len(self._unread))
            self._drift = 0.0
        self._accepted, self._nodes = self._added @ self._sums.T  # [m] each
        self._unread = []

    def _return(self) -> None:
        """Moves the means towards the usual ones, by what the rounds between two decisions are worth."""
        share = _PERIOD / _RETURN * self._paid / _RETURN
        self._added += (self._usual - self._added) * share
        self._weight = np.minimum(self._weight, _RECENT)  # what is seen next counts
        self._accepted, self._nodes = self._added @ self._sums.T  # [m] each


def smaller_parts(
    tree: TokenTree,
    path: Sequence[int],
    depths: np.ndarray,
    budgets: np.ndarray,
    most: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """What smaller trees would have contained and accepted of a drafted tree.

    Args:
        path: the accepted nodes.
        depths, budgets, most: [m], limits of the smaller trees as in `TreeSpec`; the last are the
            largest.

    Returns:
        Accepted tokens and nodes, [m] each.
    """
    count = len(tree)
    sizes = int(depths[-1]) + 1
    limits = tree.depths  # least depth of a tree that contains each node
    for node in tree.matched:  # trees of any depth contain a match
        limits[node] = 1
    counts = np.bincount(limits, minlength=sizes)
    totals = counts.cumsum()[depths]  # [m] nodes within each tree's depth
    accepted = np.zeros(len(depths))
    if tree.log_probs is None:  # a chain or a tree without scores: only depth limits it
        scores = [0.0] * count
        budgets = totals
    else:
        scores = tree.log_probs.tolist()
        if len(tree.matched) == count:  # a match that is drafted alone
            likely = sum(score >= _LIKELY for score in scores)
            budgets = np.where(
                depths > 0,
                np.maximum(budgets, np.minimum(likely, most)),
                0,
            )
    for node in path:
        # A smaller tree takes higher scores first, and smaller indices among equal ones.
        own = (-scores[node], node)
        above = [limits[i] for i in range(count) if (-scores[i], i) < own]
        counts = np.bincount(above, minlength=sizes)
        ranks = counts.cumsum()[depths]  # [m] among contained nodes
        accepted += (ranks < budgets) & (limits[node] <= depths)
    return accepted, np.minimum(totals, budgets)
