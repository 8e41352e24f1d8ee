"""A tree of several guessed continuations, which kinds without weights share."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

from drafttrain.batch import TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec

# Paths less likely than this are not followed: no budget has room for them.
_FLOOR = 0.01


def match_tree(
    spec: TreeSpec, guesses: Iterable[tuple[Iterable[int], Callable[[int], float]]], device: torch.device
) -> TokenTree:
    """The likeliest nodes of the guesses' union, as far as `spec` has room.

    A chain follows the first guess only. Trees branch where further guesses go on differently: at most the spec's children per
    node and nodes in all.

    Args:
        guesses: the best first; tokens that may come next, endless if you like, and the probability that the token at a step
            (0: the first) is right if those before it are. What a node's first child leaves of it is for the others.
    """
    if spec.shape == "none":
        return TokenTree.empty(device)
    widths = (spec.top_k,) * spec.depth if spec.shape == "dynamic" else spec.fanout
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    children: defaultdict[int, dict[int, int]] = defaultdict(dict)
    left: defaultdict[int, float] = defaultdict(lambda: 1.0)  # what a node's children leave of its probability
    for continuation, chance in guesses:
        node, above = -1, 1.0
        for step, (width, token) in enumerate(zip(widths, continuation, strict=False)):
            below = children[node]
            if token not in below:
                share = left[node] * chance(step)
                if len(below) == width or above * share < max(_FLOOR, spec.stop):
                    break
                left[node] -= share
                below[token] = len(tokens)
                tokens.append(token)
                parents.append(node)
                scores.append(above * share)
            node = below[token]
            above = scores[node]
        if spec.shape == "chain":
            break
    return TokenTree.likeliest(spec.budget, tokens, parents, [math.log(p) for p in scores], device)
