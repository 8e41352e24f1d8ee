"""What any smaller tree would have accepted, read off one plain decoding run with generous trees.

A drafter proposes from what is committed, however that came about. So one plain run that asks it for a generous tree at every
position, and throws the tree away, holds all that is needed: a smaller tree's rounds are played back by walking the recorded
tree along the continuation that followed. This is exact, not a model of acceptance: within a *family* (a number of children
per node) shallower and smaller trees are parts of the recorded one, and so are a second drafter's matches, which are merged as
decoding merges them. It holds for trees that are chosen by a rule, greedy or sampled, since neither changes the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.combined import alone, drafts_alone, match_spec, merge, parts_of
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.target import Target

DEPTH = 6
WIDTHS = (1, 4, 8)  # the families: children per node; 1 is the chain
MOST_NODES = 48
FAMILIES = {
    k: TreeSpec.parse(f"chain:{DEPTH}" if k == 1 else f"dynamic:{DEPTH},{k},{k + (DEPTH - 1) * k * k}") for k in WIDTHS
}
# What the second drafter is asked for: as much as the largest tree could hold.
_MATCHES = {
    k: match_spec(TreeSpec.parse(f"chain:{DEPTH}" if k == 1 else f"dynamic:1,{k},{MOST_NODES}")) for k in WIDTHS
}


class _Recorded:
    """A recorded tree and its way along the true continuation."""

    def __init__(self, tree: TokenTree):
        self.tree = tree
        self.tokens, self.parents, self.depths = tree.tokens.tolist(), tree.parents, tree.depths
        self.scores = [0.0] * len(tree) if tree.log_probs is None else tree.log_probs.tolist()
        self._child = {key: node for node, key in enumerate(zip(tree.parents, self.tokens, strict=True))}
        order = sorted(range(len(tree)), key=lambda i: -self.scores[i])
        self.places = [0] * len(tree)  # each node's rank by score: it is kept by budgets above
        for place, node in enumerate(order):
            self.places[node] = place
        self._merged: dict[tuple[int, float, bool], tuple[_Recorded, int]] = {}

    def likeliest(self, count: int) -> list[int]:
        """The nodes that such a budget keeps."""
        return [node for node, place in enumerate(self.places) if place < count]

    def way(self, tokens: Sequence[int]) -> list[int]:
        """Nodes along the given tokens, as far as they go."""
        nodes: list[int] = []
        for token in tokens:
            node = self._child.get((nodes[-1] if nodes else -1, token))
            if node is None:
                break
            nodes.append(node)
        return nodes

    def merged(self, match: _Recorded, depth: int, floor: float, matches: bool) -> tuple[_Recorded, int]:
        """The whole union of a shallower tree with a match, of which budgets keep the likeliest nodes; the depth drafted.

        Args:
            depth: of this tree. floor: log-probability below which its nodes are not opened. matches: False leaves the match out.
        """
        key = depth, floor, matches
        if key not in self._merged:
            above = [self.scores[parent] if parent >= 0 else 0.0 for parent in self.parents]
            kept = [i for i in range(len(self.tokens)) if self.depths[i] <= depth and above[i] >= floor]
            part = self.tree.part(kept)
            whole = merge(part, match.tree, len(kept) + len(match.tokens)) if matches and match.tokens else part
            self._merged[key] = _Recorded(whole), part.drafted_depth
        return self._merged[key]

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
        matches: per position and family what the second drafter found; empty trees without one.
    """

    prompt_tokens: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    trees: list[dict[int, _Recorded]] = field(default_factory=list)
    matches: list[dict[int, _Recorded]] = field(default_factory=list)


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
        found = {k: [TokenTree.empty()] * count for k in FAMILIES}
        if self.side is not None:
            found = {k: self.side.propose_all(sides, [_MATCHES[k]] * count, samplers) for k in FAMILIES}
        for row, track in enumerate(tracks):
            track.trees.append({k: _Recorded(trees[row]) for k, trees in each.items()})
            track.matches.append({k: _Recorded(trees[row]) for k, trees in found.items()})
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
    trees: dict[int, _Recorded], matches: dict[int, _Recorded], follow: Sequence[int], spec: TreeSpec, deepest: int
) -> tuple[int, int, int]:
    """Accepted tokens, nodes and drafted depth of a tree. follow: the true continuation; deepest: nodes that count."""
    match = matches[spec.top_k]
    if spec.matches and drafts_alone(match.tree, spec):
        # A match for a chain is a chain itself, as deep as was recorded.
        tree, drafted = match, 0
        most = len(alone(match.tree.part(match.likeliest(spec.most)), spec))
    else:
        floor = math.log(spec.stop) if spec.stop else -math.inf
        shared = spec.matches and spec.shape == "dynamic"
        tree, drafted = trees[spec.top_k].merged(match, spec.depth, floor, shared)
        most = spec.budget
    nodes = sum(place < most and depth <= deepest for place, depth in zip(tree.places, tree.depths, strict=True))
    way = tree.way(follow[:deepest])
    return next((i for i, node in enumerate(way) if tree.places[node] >= most), len(way)), nodes, drafted


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
