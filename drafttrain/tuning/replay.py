"""What tuning records and measures: the trees that a drafter would draft, replayed exactly, and the
costs of a round.

Replay: what any smaller tree would have accepted, from one plain decoding run with generous trees.
    A drafter's proposal
depends only on the committed tokens. So one plain run that drafts a generous tree at every
    position, and discards it, is
enough: a smaller tree's rounds are replayed by walking the recorded trees along the continuation.
    This is exact, not a model of
acceptance: within a *family* (a number of children per node) shallower and smaller trees are parts
    of the recorded one, and a
second drafter's matches are merged as in decoding. It holds for trees that are chosen by a rule,
    under greedy and sampled
decoding, since neither changes the text.

Costs: the decoder runs with a pace that picks another tree every round, in shuffled order, so that
a slow moment of the machine affects all trees alike. Verification is measured with made-up trees of
known size, drafting with the drafter's own trees by depth. Every figure is a median.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, Session
from drafttrain.drafters.combined import WORTH, is_likely, match_spec, merge, parts_of
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.files import Json
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.inference.adaptive import RoundReport
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target

DEPTH = 6
WIDTHS = (1, 4, 8)  # the families: children per node; 1 is the chain
MOST_NODES = 63
_CHAIN = TreeSpec.parse(f"chain:{DEPTH}")
FAMILIES = {
    k: _CHAIN if k == 1 else TreeSpec.parse(f"dynamic:{DEPTH},{k},{k + (DEPTH - 1) * k * k}")
    for k in WIDTHS
}
# The second drafter's share: as many nodes as the largest tree may hold.
_MATCHES = {
    k: match_spec(
        TreeSpec.parse(f"{'chain:1' if k == 1 else f'dynamic:1,{k},1'}@match={MOST_NODES}")
    )
    for k in WIDTHS
}


class _Recorded:
    """A recorded tree.

    Attributes:
        scores: log-probability of each path. ranks: each node's rank by score; a budget of n keeps
            ranks below n.
    """

    def __init__(self, tree: TokenTree):
        self.tree = tree
        self.tokens = tree.tokens.tolist()
        self.parents = tree.parents
        self.depths = tree.depths
        if tree.log_probs is None:
            self.scores = [0.0] * len(tree)
        else:
            self.scores = tree.log_probs.tolist()
        self.deepest = max(self.depths, default=0)
        self._child = {
            key: node for node, key in enumerate(zip(tree.parents, self.tokens, strict=True))
        }
        order = np.argsort(-np.array(self.scores), kind="stable")
        self.ranks: list[int] = np.argsort(order).tolist()
        self._merged: dict[tuple[int, float, bool], tuple[_Recorded, int]] = {}

    def path(self, tokens: Sequence[int]) -> list[int]:
        """Nodes along the given tokens, until the first token that the tree lacks."""
        nodes: list[int] = []
        for token in tokens:
            node = self._child.get((nodes[-1] if nodes else -1, token))
            if node is None:
                break
            nodes.append(node)
        return nodes

    def merged(
        self,
        match: _Recorded,
        depth: int,
        floor: float,
        matches: bool,
    ) -> tuple[_Recorded, int]:
        """The union of the tree down to `depth`, without children of nodes below `floor`, with a
        match; and the drafted depth.
        """
        key = depth, floor, matches
        if key not in self._merged:
            above = [self.scores[parent] if parent >= 0 else 0.0 for parent in self.parents]
            kept = [
                i for i in range(len(self.tokens)) if self.depths[i] <= depth and above[i] >= floor
            ]
            part = self.tree.part(kept)
            if matches and match.tokens:
                union = merge(part, match.tree, len(kept) + len(match.tokens))
            else:
                union = part
            self._merged[key] = _Recorded(union), part.drafted_depth
        return self._merged[key]

    def sibling_rank(self, node: int) -> int:
        """Rank of a node among its siblings by score."""
        siblings = [i for i, parent in enumerate(self.parents) if parent == self.parents[node]]
        return sorted(siblings, key=lambda i: (-self.scores[i], i)).index(node)


@dataclass
class Track:
    """A recorded continuation of one prompt.

    Attributes:
        prompt_tokens: length of the prompt. limit: most new tokens.
        tokens: [m] the generated tokens. trees: at position i, per family, the tree below
            tokens[i]; tokens[i+1:] follow it.
        matches: per position and family the second drafter's tree; empty without one.
    """

    prompt_tokens: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    trees: list[dict[int, _Recorded]] = field(default_factory=list)
    matches: list[dict[int, _Recorded]] = field(default_factory=list)
    _seen: defaultdict[tuple[object, ...], dict[int, _Position]] = field(
        default_factory=lambda: defaultdict(dict)
    )


class Replayed(NamedTuple):
    """A replayed round: committed tokens, verified nodes, and the depth drawn by the main drafter
    (0: it did not draft).
    """

    committed: int
    nodes: int
    depth: int


class _Position(NamedTuple):
    """What all trees of a position share that differ in their number of nodes only.

    Attributes:
        tree: the largest of them. ranks: of the nodes that are accepted. drafted: depth drawn by
            the main drafter.
        likely: nodes of a match that is drafted alone, as far as they are likely; None for other
            trees.
        verified: nodes that `spec.cut` leaves.
    """

    tree: _Recorded
    ranks: list[int]
    drafted: int
    likely: int | None
    verified: int


@dataclass
class _RecordingSession(Session):
    track: Track
    main: Session
    side: Session | None


class _Recorder(Drafter):
    """Drafts every family at every position, keeps the trees and proposes nothing, so that decoding
    stays plain.
    """

    def __init__(
        self,
        drafter: Drafter,
        tracks: dict[tuple[int, ...], Track],
        advance: Callable[[], None],
    ):
        self.main, self.side = parts_of(drafter)
        self.kind = f"recorded {drafter.kind}"
        self.feature_layers = drafter.feature_layers
        self._tracks = tracks
        self._advance = advance

    def start(self, prompt_ids: Tensor, max_length: int) -> _RecordingSession:
        if self.side is not None:
            side = self.side.start(prompt_ids, max_length)
        else:
            side = None
        track = self._tracks[tuple(prompt_ids.tolist())]
        return _RecordingSession(track, self.main.start(prompt_ids, max_length), side)

    def extend_all(
        self,
        sessions: Sequence[_RecordingSession],
        tokens: Sequence[Tensor],
        features: Sequence[Tensor],
    ) -> None:
        self.main.extend_all([session.main for session in sessions], tokens, features)
        if self.side is not None:
            self.side.extend_all([session.side for session in sessions], tokens, features)

    def propose_all(
        self,
        sessions: Sequence[_RecordingSession],
        specs: Sequence[TreeSpec],
        samplers: Sequence[Sampler | None],
    ) -> list[TokenTree]:
        count = len(sessions)
        mains = [session.main for session in sessions]
        sides = [session.side for session in sessions]
        trees = {
            k: self.main.propose_all(mains, [family] * count, samplers)
            for k, family in FAMILIES.items()
        }
        matches = {k: [TokenTree.empty()] * count for k in FAMILIES}
        if self.side is not None:
            matches = {
                k: self.side.propose_all(sides, [_MATCHES[k]] * count, samplers) for k in FAMILIES
            }
        for row, session in enumerate(sessions):
            session.track.trees.append({k: _Recorded(each[row]) for k, each in trees.items()})
            session.track.matches.append({k: _Recorded(each[row]) for k, each in matches.items()})
        self._advance()
        return [TokenTree.empty(trees[1][0].tokens.device)] * count


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
        prompts: token ids, at least one prompt; equal prompts count once. advance: called after
            every round.
    """
    tracks = {tuple(prompt): Track(len(prompt), max_new_tokens) for prompt in prompts}
    prompts = list(map(list, tracks))
    recorder = _Recorder(drafter, tracks, advance)
    decoder = Decoder(target, recorder, spec=_CHAIN, sampling=sampling, max_rows=len(prompts))
    generations = decoder.generate(prompts, max_new_tokens=max_new_tokens)
    for track, generation in zip(tracks.values(), generations, strict=True):
        track.tokens = generation.tokens
    return list(tracks.values())


def replay(track: Track, spec: TreeSpec) -> list[Replayed]:
    """The rounds of decoding with `none`, a chain to DEPTH, or a dynamic tree of a recorded width
    within DEPTH and MOST_NODES.
    """
    rounds: list[Replayed] = []
    position = 0
    last = len(track.tokens) - 1
    usual = spec.budget if spec.shape == "dynamic" else spec.depth
    seen = track._seen[
        spec.shape, spec.top_k, spec.depth, spec.stop, spec.cut, spec.alone, spec.matches
    ]
    while position < last:
        accepted = nodes = depth = 0
        deepest = track.limit - position - 2  # decoding cuts trees at the token limit
        if spec.shape != "none" and position < len(track.trees) and deepest > 0:
            if (at := seen.get(position)) is None:
                at = seen[position] = _position(track, position, spec)
            if at.likely is None:
                budget = usual
            else:
                budget = max(usual, min(at.likely, spec.most))
            budget = min(budget, at.verified)  # ranks are by score
            accepted = sum(rank < budget for rank in at.ranks[:deepest])
            nodes = budget
            depth = at.drafted
            if at.tree.deepest > deepest:
                places = zip(at.tree.ranks, at.tree.depths, strict=True)
                nodes = sum(rank < budget and below <= deepest for rank, below in places)
        rounds.append(Replayed(min(accepted + 1, last - position), nodes, depth))
        position += rounds[-1].committed
    return rounds


def _position(track: Track, position: int, spec: TreeSpec) -> _Position:
    tree = track.trees[position][spec.top_k]
    match = track.matches[position][spec.top_k]
    drafted = 0
    likely = None
    if spec.matches and is_likely(match.tree, spec):
        tree = match  # for a chain it is a chain itself, as deep as was recorded
        likely = sum(score >= math.log(WORTH) for score in match.scores)
    else:
        tree, drafted = tree.merged(
            match,
            spec.depth,
            spec.floor,
            spec.matches and spec.shape == "dynamic",
        )
    path = tree.path(track.tokens[position + 1 :])
    if spec.cut:
        least = math.log(spec.cut)
    else:
        least = -math.inf
    verified = sum(score >= least for score in tree.scores)
    return _Position(tree, [tree.ranks[node] for node in path], drafted, likely, verified)


def _positions(tracks: Sequence[Track]) -> Iterator[tuple[dict[int, _Recorded], list[int]]]:
    """The trees of every position, and the tokens that follow."""
    for track in tracks:
        for position, trees in enumerate(track.trees, 1):
            yield trees, track.tokens[position : position + DEPTH]


def recall(tracks: Sequence[Track], tops: Sequence[int] = (1, 2, 4, 8)) -> dict[str, list[float]]:
    """Share of positions whose true token is among the drafter's top tokens, by depth, along the
    true continuation.

    Returns:
        Per entry of `tops` a share per depth. A depth counts if the recorded tree holds the true
        path down to it.
    """
    width = max(WIDTHS)
    tried = np.zeros(DEPTH)
    found = {top: np.zeros(DEPTH) for top in tops}
    for trees, continuation in _positions(tracks):
        tree = trees[width]
        path = trees[width].path(continuation)
        expanded = {-1, *tree.parents}
        for depth in range(len(continuation)):
            if depth > len(path) or (path[depth - 1] if depth else -1) not in expanded:
                break
            tried[depth] += 1
            if depth < len(path):
                rank = tree.sibling_rank(path[depth])
            else:
                rank = width
            for top in tops:
                found[top][depth] += rank < top
    return {
        str(top): [round(float(x), 4) for x in found[top] / np.maximum(tried, 1)] for top in tops
    }


def chances(tracks: Sequence[Track]) -> list[float]:
    """Conditional acceptance of the greedy chain by depth: share of positions correct at a depth,
    given all before were.
    """
    right = np.zeros(DEPTH)
    tried = np.zeros(DEPTH)
    for trees, continuation in _positions(tracks):
        reached = len(trees[1].path(continuation))
        right[:reached] += 1
        tried[: min(reached + 1, len(continuation))] += 1
    return [round(float(x), 4) for x in right / np.maximum(tried, 1)]


# -- costs -----------------------------------------------------------------------------------------

NODES = (
    1,
    2,
    4,
    8,
    11,
    15,
    23,
    31,
    47,
    MOST_NODES,
)  # with the root they fill the row tiles of kernels
DEPTHS = (1, 3, DEPTH)
CYCLES = 9
WARM_UP = 1
_PREFILL = 16  # a drafter that reads more tokens at once reads a prompt


@dataclass
class CostModel:
    """Seconds of the parts of a round.

    Attributes:
        verify: by number of nodes; 0 is a round of plain decoding, with the target's pass and all
            overhead.
        draft: by (children per node, depth).
        match: added by a second drafter's match. read: the drafter reads what a round committed.
        read_prompt: the same per token of a prompt. around: added by accepted nodes, such as moving
            their keys.
    """

    verify: dict[int, float]
    draft: dict[tuple[int, int], float]
    match: float = 0.0
    read: float = 0.0
    read_prompt: float = 0.0
    around: float = 0.0

    def round(self, spec: TreeSpec, nodes: int, depth: int) -> float:
        """Seconds of a round that drafts to `depth` and verifies `nodes` nodes."""
        if spec.shape == "none":
            return self.verify[0]
        seconds = _interpolate(self.verify, nodes) + self.read + self.match * spec.matches
        if depth:
            seconds += _interpolate(
                {d: cost for (k, d), cost in self.draft.items() if k == spec.top_k}, depth
            )
        return seconds + self.around * (nodes > 0)

    def affordable(self, factor: float) -> int:
        """Most nodes, of those measured, whose pass costs at most `factor` plain ones; 0 if one
        costs more.
        """
        return max(
            (nodes for nodes, seconds in self.verify.items() if seconds <= factor * self.verify[0]),
            default=0,
        )

    def table(self) -> Json:
        """The costs in milliseconds, for JSON."""
        draft: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (k, depth), seconds in self.draft.items():
            draft[str(k)][str(depth)] = round(1000 * seconds, 3)
        parts = {
            "match": self.match,
            "read": self.read,
            "read_prompt": self.read_prompt,
            "around": self.around,
        }
        return {
            "verification_ms": {
                str(nodes): round(1000 * seconds, 3) for nodes, seconds in self.verify.items()
            },
            "drafting_ms": dict(draft),
            **{f"{name}_ms": round(1000 * seconds, 4) for name, seconds in parts.items()},
        }


def _interpolate(known: dict[int, float], at: float) -> float:
    """Piecewise linear, extrapolated."""
    keys = sorted(known)
    if len(keys) == 1:
        return known[keys[0]]
    above = min(max(bisect_left(keys, at), 1), len(keys) - 1)
    left = keys[above - 1]
    right = keys[above]
    return known[left] + (known[right] - known[left]) * (at - left) / (right - left)


class _ProbeTrees(Drafter):
    """The drafter, except for trees that measure verification: those hold made-up tokens, almost
    never accepted.
    """

    def __init__(self, drafter: Drafter, target: Target):
        self.drafter = drafter
        self.target = target
        self.kind = drafter.kind
        self.feature_layers = drafter.feature_layers

    def start(self, prompt_ids: Tensor, max_length: int) -> Session:
        return self.drafter.start(prompt_ids, max_length)

    def extend_all(
        self,
        sessions: Sequence[Session],
        tokens: Sequence[Tensor],
        features: Sequence[Tensor],
    ) -> None:
        self.drafter.extend_all(sessions, tokens, features)

    def propose_all(
        self,
        sessions: Sequence[Session],
        specs: Sequence[TreeSpec],
        samplers: Sequence[Sampler | None],
    ) -> list[TokenTree]:
        if specs[0].shape != "paths":
            return self.drafter.propose_all(sessions, specs, samplers)
        nodes = specs[0].budget
        tokens = torch.tensor(
            [7919 * node % self.target.vocab_size for node in range(1, nodes + 1)]
        )  # [n]
        return [
            TokenTree(
                tokens.to(self.target.device),
                [(node - 1) // 2 if node else -1 for node in range(nodes)],
            )
        ]


class _Schedule:
    """A pace that goes through all trees in shuffled order, repeatedly, and keeps every round."""

    def __init__(self, specs: Sequence[TreeSpec], advance: Callable[[], None]):
        self.rounds: list[RoundReport] = []
        self._specs = self._order(list(specs))
        self._advance = advance

    @staticmethod
    def _order(specs: list[TreeSpec]) -> Iterator[TreeSpec]:
        shuffle = random.Random(0)
        while True:
            shuffle.shuffle(specs)
            yield from specs

    def choose(self, rows: int, behind: int) -> TreeSpec:
        return next(self._specs)

    def observe(self, done: RoundReport) -> None:
        self.rounds.append(done)
        self._advance()


def measure_costs(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    max_new_tokens: int,
    cycles: int = CYCLES,
    advance: Callable[[], None] = lambda: None,
) -> CostModel:
    """Decodes the prompts one by one until every tree was measured `cycles` times.

    Args:
        target: packed before the call, if it will be packed later. prompts: token ids, at least one
            prompt.
        advance: called after every round.
    """
    sizes = [TreeSpec.parse("paths:" + ",".join(map(str, range(nodes)))) for nodes in NODES]
    drafts = [_draft_spec(k, depth) for k in WIDTHS for depth in DEPTHS]
    if parts_of(drafter)[1] is not None:
        matched = [TreeSpec.parse("dynamic:3,4,8@alone=0.999")]
    else:
        matched = []
    specs = [TreeSpec.parse("none"), *sizes, *drafts, *matched]
    schedule = _Schedule(specs, advance)
    largest = max(specs, key=lambda spec: spec.budget)
    decoder = Decoder(
        target,
        _ProbeTrees(drafter, target),
        spec=largest,
        sampling=sampling,
        eos_ids=(),
        pace=schedule,
    )
    for prompt in itertools.cycle(prompts):
        for _ in decoder.stream([prompt], max_new_tokens=max_new_tokens):
            if len(schedule.rounds) >= (cycles + WARM_UP) * len(specs):
                return _fit(schedule.rounds[WARM_UP * len(specs) :], drafts, matched)
    raise AssertionError("prompts are never empty")


def _draft_spec(k: int, depth: int) -> TreeSpec:
    return TreeSpec.parse((f"chain:{depth}" if k == 1 else f"dynamic:{depth},{k},8") + "@nomatch")


def _fit(
    rounds: Sequence[RoundReport],
    drafts: Sequence[TreeSpec],
    matched: Sequence[TreeSpec],
) -> CostModel:
    verify: defaultdict[int, list[float]] = defaultdict(list)
    draft: defaultdict[TreeSpec, list[float]] = defaultdict(list)
    for done in rounds:
        if done.spec.shape in ("none", "paths"):
            verify[done.new_tokens - 1].append(_pass_seconds(done))
        elif done.drafted:
            draft[done.spec].append(done.draft_seconds)
    model = CostModel(
        {nodes: median(values) for nodes, values in sorted(verify.items()) if nodes in (0, *NODES)},
        {},
    )
    # A drafter that finds nothing to draft takes no time worth counting.
    model.draft = {(spec.top_k, spec.depth): median(draft.get(spec, [0.0])) for spec in drafts}
    if matched and draft[matched[0]]:
        model.match = max(0.0, median(draft[matched[0]]) - median(draft[_draft_spec(4, 3)]))
    reads = [done.read_seconds for done in rounds if 0 < done.read <= _PREFILL]
    if reads:
        model.read = median(reads)
    else:
        model.read = 0.0
    bulk = [done for done in rounds if done.read > _PREFILL]
    if bulk:
        model.read_prompt = sum(done.read_seconds for done in bulk) / sum(
            done.read for done in bulk
        )
    else:
        model.read_prompt = 0.0
    own = [done for done in rounds if done.drafted and done.spec.shape != "paths"]
    extra = [_pass_seconds(done) - _interpolate(model.verify, done.new_tokens - 1) for done in own]
    if extra:
        model.around = max(0.0, median(extra))
    else:
        model.around = 0.0
    return model


def _pass_seconds(done: RoundReport) -> float:
    """Seconds of a round without drafting and reading."""
    return done.seconds - done.draft_seconds - done.read_seconds
