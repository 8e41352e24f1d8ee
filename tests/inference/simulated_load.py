"""A load with a simulated machine and drafter: costs and acceptance are numbers here, so results do not depend on a clock.

A round's seconds are noisy: 5 % on each, now and then a slow one, and phases in which the machine is slower. A tree's worth is
counted without that noise: expected seconds over expected tokens of the trees that were chosen.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from drafttrain.batch import TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.inference.adaptive import Adaptive, RoundReport

_WIDTH = 4
# plain passes, by depth and per round
_DRAFT = 0.1
_READ = 0.03


@functools.cache
def drafted(spec: TreeSpec, accept: float) -> tuple[TokenTree, dict[tuple[int, ...], int], float]:
    """The tree of a drafter that is right with `accept` at its first choice, and with falling shares of the rest at further
    ones: the tree, its nodes by ranks, and the tokens expected of it, without the bonus token."""
    shares = (
        [accept, *(0.35 * (1 - accept) * 0.5**rank for rank in range(1, _WIDTH))]
        if accept
        else [1e-9] * _WIDTH
    )
    layer = {(): 1.0}
    nodes = dict[tuple[int, ...], float]()
    width = 1 if spec.shape == "chain" else _WIDTH
    for _ in range(spec.depth):
        layer = {
            (*path, rank): s * shares[rank] for path, s in layer.items() for rank in range(width)
        }
        layer = dict(sorted(layer.items(), key=lambda item: -item[1])[: spec.budget])
        nodes |= layer
    best = sorted(nodes, key=lambda path: (-nodes[path], len(path)))[: spec.budget]
    place = {
        path: i for i, path in enumerate(sorted(best, key=lambda path: (len(path), -nodes[path])))
    }
    parents = [place.get(path[:-1], -1) for path in place]
    scores = torch.tensor([math.log(nodes[path]) for path in place])
    return (
        TokenTree(torch.arange(len(place)), parents, scores),
        place,
        sum(nodes[path] for path in place),
    )


@dataclass
class Load:
    """A number of rows, an acceptance and a cost of passes. curve: plain passes by new tokens."""

    rows: int
    accept: float
    curve: Callable[[int], float]

    def seconds(self, spec: TreeSpec) -> float:
        """Expected seconds per token and row of a fixed tree, in plain passes of one row."""
        if spec.shape == "none":
            return self.curve(self.rows)
        tree, _, tokens = drafted(spec, self.accept)
        return (self.curve(self.rows * (1 + len(tree))) + _DRAFT * spec.depth + _READ) / (
            1 + tokens
        )

    def best(self, specs: Sequence[TreeSpec]) -> float:
        return min(map(self.seconds, specs))


def play(pace: Adaptive, loads: Sequence[Load], rounds: int, seed: int) -> list[float]:
    """Decodes `rounds` rounds of each load; returns how near the chosen trees came to the best fixed tree of each."""
    dice = random.Random(seed)
    behind = 0
    speed = 1.0
    # All chains and dynamic trees within the given one, not only those that the pace chooses from.
    last = pace.levels[-1]
    text = "chain:{0}" if last.shape == "chain" else f"dynamic:{{0}},{_WIDTH},{{1}}"
    sizes = [(d, n) for d in range(1, last.depth + 1) for n in range(d, last.budget + 1)]
    fixed = [TreeSpec.parse("none"), *(TreeSpec.parse(text.format(*size)) for size in sizes)]
    reached = []
    for load in loads:
        spent = tokens = 0.0
        shares = [load.accept, *(0.35 * (1 - load.accept) * 0.5**rank for rank in range(1, _WIDTH))]
        shares = shares if load.accept else [0.0] * _WIDTH
        for _ in range(rounds):
            speed = dice.choice((1.0, 1.0, 1.5)) if dice.random() < 0.005 else speed
            shake = speed * math.exp(dice.gauss(0, 0.05)) * (2 if dice.random() < 0.02 else 1)
            spec = pace.choose(load.rows, behind)
            made = []
            size = load.rows
            expected = 1.0
            draft = 0.0
            read = 0.0
            if spec.shape != "none":
                tree, place, more = drafted(spec, load.accept)
                for _ in range(load.rows):
                    ranks = dice.choices(
                        [*range(_WIDTH), -1], [*shares, 1 - sum(shares)], k=spec.depth
                    )
                    paths = (place.get(tuple(ranks[:depth])) for depth in range(1, spec.depth + 1))
                    path: list[int] = []
                    for node in paths:
                        if node is None:
                            break
                        path.append(node)
                    made.append((tree, path))
                size = load.rows * (1 + len(tree))
                expected = 1 + more
                draft = _DRAFT * spec.depth
                read = _READ
            seconds = load.curve(size) + draft + read
            pace.observe(
                RoundReport(
                    spec,
                    load.rows,
                    size,
                    shake * seconds,
                    shake * draft,
                    behind if made else 0,
                    shake * read,
                    made,
                )
            )
            behind = (0 if made else behind) + load.rows + sum(len(path) for _, path in made)
            spent = spent + seconds
            tokens = tokens + expected
        reached.append(load.best(fixed) / (spent / tokens))
    return reached
