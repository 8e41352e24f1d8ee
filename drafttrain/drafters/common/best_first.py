"""Best-first growth of trees, for kinds that know each child's probability without a pass."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import count as counting
from itertools import islice
from typing import TypeVar

import torch

from drafttrain.batch import TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec

S = TypeVar("S")
# Children of a node with this state and path probability, the likeliest first: token, probability
# of its path, its state.
Children = Callable[[S, float], Iterator[tuple[int, float, S]]]


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
    orders = counting()
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
