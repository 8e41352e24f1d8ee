"""Growth of trees for kinds that know each child's probability without a pass.

`grow_best_first` opens the likeliest paths; `grow_guesses` gives it the union of guessed continuations.
`HitRates` estimates the probabilities from what was right so far.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count as counting
from itertools import islice
from typing import NamedTuple, TypeVar

import torch

from drafttrain.batch import TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec

S = TypeVar("S")
# Children of a node with this state and path probability, the likeliest first: token, probability
# of its path, its state.
Children = Callable[[S, float], Iterator[tuple[int, float, S]]]


# Guessed paths less likely than this are dropped: no budget reaches them.
_FLOOR = 0.01


class Guess(NamedTuple):
    """A guessed continuation.

    Attributes:
        token: the token at a step, from 0; None behind its end.
        chance: probability that it is right if all before it are.
    """

    token: Callable[[int], int | None]
    chance: Callable[[int], float]


class HitRates:
    """How often children were right, by kind of child.

    Args:
        belief: weight, in observations, of what is believed of a kind before any.
        recent: observations after which old ones fade. ranks: children that are counted apart.
    """

    def __init__(
        self,
        belief: float,
        recent: float = math.inf,
        ranks: int = 1,
    ):
        self.belief = belief
        self.recent = recent
        self.ranks = ranks
        self.seen: dict[Hashable, list[float]] = {}  # observations, then hits of each rank

    def chance(
        self,
        kind: Hashable,
        believed: float,
        rank: int = 0,
    ) -> float:
        """Probability that a child of a kind is right."""
        counts = self.seen.get(kind)
        if counts is None:
            return believed
        return (counts[1 + rank] + self.belief * believed) / (counts[0] + self.belief)

    def add(self, kind: Hashable, rank: int | None) -> None:
        """Counts an observation. rank: of the child that was right; None for none of them."""
        counts = self.seen.setdefault(kind, [0.0] * (1 + self.ranks))
        if counts[0] > self.recent:
            for i, count in enumerate(counts):
                counts[i] = count * (1 - 1 / self.recent)
        counts[0] += 1
        if rank is not None:
            counts[1 + rank] += 1


def grow_guesses(spec: TreeSpec, guesses: Sequence[Guess], device: torch.device) -> TokenTree:
    """Grows a tree of the likeliest nodes of the union of guesses.

    A chain follows the first guess only. Trees branch where guesses differ.

    Args:
        guesses: best first. Later ones share the probability that a node's first children leave.
    """
    floor = max(_FLOOR, spec.stop)
    if spec.shape == "chain":
        guesses = guesses[:1]

    def children(
        state: tuple[int, Sequence[Guess]], path: float
    ) -> Iterator[tuple[int, float, tuple[int, Sequence[Guess]]]]:
        step, going = state
        groups: dict[int, list[Guess]] = {}  # guesses that agree on the next token
        for guess in going:
            token = guess.token(step)
            if token is not None:
                groups.setdefault(token, []).append(guess)
        left = 1.0
        for token, group in groups.items():
            share = left * group[0].chance(step)
            if path * share > floor:
                left -= share
                yield token, path * share, (step + 1, group)

    tree = grow_best_first(spec, floor, (0, guesses), children, device)
    if not len(tree):  # without log-probabilities, so that probes below it get none
        return TokenTree.empty(device)
    return tree


def grow_best_first(
    spec: TreeSpec,
    floor: float,
    root: S,
    children: Children[S],
    device: torch.device,
) -> TokenTree:
    """Grows a tree of the likeliest paths: the likeliest path found so far is opened next.

    The tree has at most the spec's children per node, depth and nodes in all.

    Args:
        floor: paths that are not likelier are left out. root: state of the root.
        children: asked once for every node that is opened.
    """
    if spec.shape == "none":
        return TokenTree.empty(device)
    widths = spec.fanout or (spec.top_k,) * spec.depth
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    orders = counting()  # of equal paths the one found first; states are never compared
    # A heap of candidates: minus the probability of the path, order found, parent, token, depth,
    # state.
    found: list[tuple[float, int, int, int, int, S]] = []
    # The node to open: probability of its path, its number, depth and state.
    opened: tuple[float, int, int, S] | None = (1.0, -1, 0, root)
    while True:
        if opened is not None:
            path, node, depth, state = opened
            for token, p, below in islice(children(state, path), widths[depth]):
                if p > floor:
                    heapq.heappush(found, (-p, next(orders), node, token, depth + 1, below))
        if not found or len(tokens) == spec.budget:
            return TokenTree.likeliest(spec.budget, tokens, parents, scores, device)
        negative, _, parent, token, depth, below = heapq.heappop(found)
        tokens.append(token)
        parents.append(parent)
        scores.append(math.log(-negative))
        if depth < len(widths):
            opened = (-negative, len(tokens) - 1, depth, below)
        else:
            opened = None
