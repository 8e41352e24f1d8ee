"""What any smaller tree would have accepted, read off one plain decoding run with generous trees.

A drafter proposes from what is committed, however that came about. So one plain run that asks it for a generous tree at every
position, and throws the tree away, holds all that is needed: a smaller tree's rounds are played back by walking the recorded
tree along the continuation that followed. This is exact, not a model of acceptance: within a *family* (a number of children
per node) shallower and narrower trees are parts of the recorded one, and matches merged from a second drafter are prefixes of
the recorded match. It holds for trees that are chosen by a rule, greedy or sampled, since neither changes the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.decode import Decoder, SamplingParams
from drafttrain.drafters.base import Drafter, TreeSpec
from drafttrain.drafters.combined import CombinedDrafter
from drafttrain.target import Target

DEPTH = 6
WIDTHS = (1, 4, 8)  # the families: children per node; 1 is the chain
MOST_NODES = 48
FAMILIES = {
    k: TreeSpec.parse(f"chain:{DEPTH}" if k == 1 else f"dynamic:{DEPTH},{k},{k + (DEPTH - 1) * k * k}") for k in WIDTHS
}


def parts_of(drafter: Drafter) -> tuple[Drafter, Drafter | None]:
    """The drafter that grows trees, and the one whose matches are merged into them, if any."""
    return (drafter.main, drafter.side) if isinstance(drafter, CombinedDrafter) else (drafter, None)


class _Recorded:
    """A recorded tree and its way along the true continuation."""

    def __init__(self, tree: TokenTree):
        self.tokens, self.parents = tree.tokens.tolist(), tree.parents
        self.depths = np.array(tree.depths, dtype=int)
        self.scores = np.zeros(len(tree)) if tree.log_probs is None else tree.log_probs.double().numpy()
        above = [self.scores[parent] if parent >= 0 else 0.0 for parent in tree.parents]
        self.above = np.array(above, dtype=float)  # score of each node's parent: it was opened if that is high enough
        self._child = {key: node for node, key in enumerate(zip(tree.parents, self.tokens, strict=True))}
        self._cuts: dict[tuple[int, float], tuple[np.ndarray, int, int]] = {}

    def way(self, tokens: Sequence[int]) -> list[int]:
        """Nodes along the given tokens, as far as they go."""
        nodes: list[int] = []
        for token in tokens:
            node = self._child.get((nodes[-1] if nodes else -1, token))
            if node is None:
                break
            nodes.append(node)
        return nodes

    def cut(self, depth: int, floor: float) -> tuple[np.ndarray, int, int]:
        """Each node's place when a tree of such a depth keeps its likeliest nodes, the nodes in all, the depth drafted."""
        if (depth, floor) not in self._cuts:
            there = (self.depths <= depth) & (self.above >= floor)
            order = np.lexsort((np.arange(len(there)), -self.scores, ~there))
            places = np.full(len(there), len(there) + MOST_NODES)
            places[order] = np.where(there[order], np.arange(len(there)), places)
            deepest = int(self.depths[there].max()) if there.any() else 0
            self._cuts[depth, floor] = places, int(there.sum()), deepest
        return self._cuts[depth, floor]

    def rank(self, node: int) -> int:
        """Which of its siblings the node is, the likeliest first."""
        siblings = [i for i, parent in enumerate(self.parents) if parent == self.parents[node]]
        return sorted(siblings, key=lambda i: (-self.scores[i], i)).index(node)


@dataclass
class Track:
    """A recorded continuation.

    Attributes:
        prompt_tokens: its prompt's length. limit: most new tokens.
        tokens: [m] what was generated. trees: per position i the families' trees below tokens[i], which tokens[i+1:] follow.
        matches: per position the second drafter's chain; empty lists without one.
    """

    prompt_tokens: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    trees: list[dict[int, _Recorded]] = field(default_factory=list)
    matches: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Replayed:
    """A round played back: tokens it committed, nodes it verified, depth that the main drafter drew (0: not asked)."""

    committed: int
    nodes: int
    depth: int


class _Recorder(Drafter):
    """Asks for every family at every position, keeps the trees, and hands out none, so that decoding stays plain."""

    trainable = False

    def __init__(self, drafter: Drafter, tracks: dict[tuple[int, ...], Track], advance: Callable[[], None]):
        self.main, self.side = parts_of(drafter)
        self.kind, self.feature_layers = f"recorded {drafter.kind}", drafter.feature_layers
        self._tracks, self._advance = tracks, advance

    def bind(self, target: Target) -> None:
        """Its parts are bound already."""

    def start(self, prompt_ids: Tensor, max_length: int) -> Any:
        side = self.side.start(prompt_ids, max_length) if self.side is not None else None
        return self._tracks[tuple(prompt_ids.tolist())], self.main.start(prompt_ids, max_length), side

    def extend_all(self, sessions: Sequence[Any], tokens: Sequence[Tensor], features: Sequence[Tensor]) -> None:
        self.main.extend_all([main for _, main, _ in sessions], tokens, features)
        if self.side is not None:
            self.side.extend_all([side for _, _, side in sessions], tokens, features)

    def propose_all(
        self, sessions: Sequence[Any], specs: Sequence[TreeSpec], samplers: Sequence[Any]
    ) -> list[TokenTree]:
        tracks, mains, sides = zip(*sessions, strict=True)
        count = len(sessions)
        each = {k: self.main.propose_all(mains, [family] * count, samplers) for k, family in FAMILIES.items()}
        chains = [TokenTree.empty()] * count
        if self.side is not None:
            chains = self.side.propose_all(sides, [TreeSpec.parse(f"chain:{MOST_NODES}")] * count, samplers)
        for row, track in enumerate(tracks):
            track.trees.append({k: _Recorded(trees[row]) for k, trees in each.items()})
            track.matches.append(chains[row].tokens.tolist())
        self._advance()
        return [TokenTree.empty(each[1][0].tokens.device)] * count


def record(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    max_new_tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Track]:
    """Decodes all prompts plainly, as one batch, and records the drafter's trees at every position.

    Args:
        prompts: token ids, at least one.
        advance: called after every round.
    """
    tracks = {tuple(prompt): Track(len(prompt), max_new_tokens) for prompt in prompts}  # equal prompts count once
    prompts = list(map(list, tracks))
    spec = TreeSpec.parse(f"chain:{DEPTH}")
    decoder = Decoder(target, _Recorder(drafter, tracks, advance), spec=spec, sampling=sampling, max_rows=len(prompts))
    made = decoder.generate(prompts, max_new_tokens=max_new_tokens)
    for track, generation in zip(tracks.values(), made, strict=True):
        track.tokens = generation.tokens
    return list(tracks.values())


def replay(track: Track, spec: TreeSpec) -> list[Replayed]:
    """The rounds that decoding with a tree would have taken.

    Args:
        spec: `none`, a chain of at most DEPTH, or a dynamic tree of a recorded width and at most DEPTH and MOST_NODES.
    """
    rounds: list[Replayed] = []
    place = 0
    while place + 1 < len(track.tokens):
        follow = track.tokens[place + 1 :]
        accepted = nodes = depth = 0
        room = track.limit - place - 2  # trees are cut where the limit leaves no more room
        if spec.shape != "none" and place < len(track.trees) and room > 0:
            accepted, nodes, depth = _accepted(track.trees[place], track.matches[place], follow, spec, room)
        rounds.append(Replayed(min(accepted + 1, len(follow)), nodes, depth))
        place += rounds[-1].committed
    return rounds


def _accepted(
    trees: dict[int, _Recorded], match: list[int], follow: Sequence[int], spec: TreeSpec, deepest: int
) -> tuple[int, int, int]:
    """Accepted tokens, nodes and drafted depth of a tree. follow: the true continuation; deepest: nodes that count."""
    dynamic = spec.shape == "dynamic"
    match = match[: int(spec.budget * spec.match) if dynamic else spec.depth * (spec.match > 0)]
    room = spec.budget - len(match)
    replaced = bool(match) and not dynamic
    match = match[:deepest]
    hit = next((i for i, (token, true) in enumerate(zip(match, follow, strict=False)) if token != true), None)
    hit = min(len(match), len(follow)) if hit is None else hit
    if replaced:
        return hit, len(match), 0
    tree = trees[spec.top_k]
    places, there, drafted = tree.cut(spec.depth, float(np.log(spec.stop)) if spec.stop else -np.inf)
    nodes = min(there, room)
    if deepest < spec.depth:
        nodes = int(((places < room) & (tree.depths <= deepest)).sum())
    way = tree.way(follow[: min(spec.depth, deepest)])
    own = next((i for i, node in enumerate(way) if places[node] >= room), len(way))
    shared = sum(places[node] < room for node in tree.way(match[: spec.depth]))
    return max(own, hit), nodes + len(match) - int(shared), drafted


def recall(tracks: Sequence[Track], tops: Sequence[int] = (1, 2, 4, 8)) -> dict[str, list[float]]:
    """Share of positions whose true token is among the drafter's likeliest, by depth, along the true continuation.

    Args:
        tops: numbers of likeliest tokens.

    Returns:
        By number, a share per depth. A depth counts where the recorded tree holds the true path down to it.
    """
    width = max(WIDTHS)
    tried = np.zeros(DEPTH)
    found = {top: np.zeros(DEPTH) for top in tops}
    for track in tracks:
        for place, trees in enumerate(track.trees):
            tree, follow = trees[width], track.tokens[place + 1 : place + 1 + DEPTH]
            way = tree.way(follow)
            opened = {-1, *tree.parents}
            for depth in range(len(follow)):
                if depth > len(way) or (way[depth - 1] if depth else -1) not in opened:
                    break
                tried[depth] += 1
                rank = tree.rank(way[depth]) if depth < len(way) else width
                for top in tops:
                    found[top][depth] += rank < top
    return {str(top): [round(float(x), 4) for x in found[top] / np.maximum(tried, 1)] for top in tops}


def chances(tracks: Sequence[Track]) -> list[float]:
    """Of the positions where a chain of the likeliest tokens was right so far, the share that was right at the next depth."""
    right, tried = np.zeros(DEPTH), np.zeros(DEPTH)
    for track in tracks:
        for place, trees in enumerate(track.trees):
            follow = track.tokens[place + 1 : place + 1 + DEPTH]
            reached = len(trees[1].way(follow))
            right[:reached] += 1
            tried[: min(reached + 1, len(follow))] += 1
    return [round(float(x), 4) for x in right / np.maximum(tried, 1)]
