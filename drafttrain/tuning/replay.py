"""What tuning records and measures: replays of the trees that a drafter would draft, and costs.

Replay: what any smaller tree would have accepted, from one plain decoding run with generous trees.
A drafter's proposal depends only on the committed tokens. So one plain run that drafts a generous
tree at every position, and discards it, is enough: a smaller tree's rounds are replayed by walking
the recorded trees along the continuation. This is exact, not a model of acceptance: within a
*family* (a number of children per node) shallower and smaller trees are parts of the recorded one,
and a second drafter's matches are merged as in decoding. It holds for trees that are chosen by a
rule, under greedy and sampled decoding, since neither changes the text.

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
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, Session
from drafttrain.drafters.combined import WORTH, is_likely, match_spec, merge, parts_of
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.forwarding import ForwardingDrafter
from drafttrain.files import Json
from drafttrain.inference import Decoder, SamplingParams, Stats
from drafttrain.inference.adaptive import RoundReport
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target

DEPTH = 6
WIDTHS = (1, 4, 8)  # the families: children per node; 1 is the chain
MOST_NODES = 63
Part = TypeVar("Part")
_CHAIN = TreeSpec.parse(f"chain:{DEPTH}")


def _family(k: int) -> TreeSpec:
    """The recorded tree of a family, as large as its trees can be."""
    if k == 1:
        return _CHAIN
    return TreeSpec.parse(f"dynamic:{DEPTH},{k},{k + (DEPTH - 1) * k * k}")


def _match_of(k: int) -> TreeSpec:
    """The second drafter's share: as many nodes as the largest tree may hold."""
    shape = "chain:1" if k == 1 else f"dynamic:1,{k},1"
    return match_spec(TreeSpec.parse(f"{shape}@match={MOST_NODES}"))


FAMILIES = {k: _family(k) for k in WIDTHS}
_MATCHES = {k: _match_of(k) for k in WIDTHS}


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
        self.deepest = max(self.depths, default=0)
        self.scores = [0.0] * len(tree)
        if tree.log_probs is not None:
            self.scores = tree.log_probs.tolist()
        # The rank of a node is its place in the order by score.
        order = np.argsort(-np.array(self.scores), kind="stable")
        self.ranks: list[int] = np.argsort(order).tolist()
        self._child = tree.places()
        self._merged: dict[tuple[int, float, bool], tuple[_Recorded, int]] = {}

    def path(self, tokens: Sequence[int]) -> list[int]:
        """Nodes along the given tokens, until the first token that the tree lacks."""
        nodes: list[int] = []
        last = -1
        for token in tokens:
            if (last, token) not in self._child:
                break
            last = self._child[last, token]
            nodes.append(last)
        return nodes

    def merged(
        self,
        match: _Recorded,
        depth: int,
        floor: float,
        matches: bool,
    ) -> tuple[_Recorded, int]:
        """The union of a part of the tree with a match, and the part's drafted depth.

        The part goes down to `depth`, without children of nodes below `floor`.
        """
        key = (depth, floor, matches)
        if key not in self._merged:
            kept = []
            for node, parent in enumerate(self.parents):
                above = 0.0
                if parent >= 0:
                    above = self.scores[parent]
                if self.depths[node] <= depth and above >= floor:
                    kept.append(node)
            part = self.tree.part(kept)
            union = part
            if matches and match.tokens:
                union = merge(part, match.tree, len(kept) + len(match.tokens))
            self._merged[key] = (_Recorded(union), part.drafted_depth)
        return self._merged[key]

    def sibling_rank(self, node: int) -> int:
        """Rank of a node among its siblings by score; of equal ones the first is ahead."""
        siblings = [i for i, parent in enumerate(self.parents) if parent == self.parents[node]]
        siblings.sort(key=lambda i: -self.scores[i])  # stable
        return siblings.index(node)


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
    """A replayed round.

    Attributes:
        committed: tokens. nodes: verified ones. depth: drawn by the main drafter; 0 if it did not
            draft.
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
    """Drafts every family at every position and keeps the trees.

    It proposes nothing, so that decoding stays plain.
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
        side = None
        if self.side is not None:
            side = self.side.start(prompt_ids, max_length)
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
        spec: TreeSpec,
        samplers: Sequence[Sampler | None],
    ) -> list[TokenTree]:
        count = len(sessions)
        mains = [session.main for session in sessions]
        sides = [session.side for session in sessions]
        for session in sessions:
            session.track.trees.append({})
            session.track.matches.append({})
        for k, family in FAMILIES.items():
            trees = self.main.propose_all(mains, family, samplers)
            matches = [TokenTree.empty()] * count
            if self.side is not None:
                matches = self.side.propose_all(sides, _MATCHES[k], samplers)
            for session, tree, match in zip(sessions, trees, matches, strict=True):
                session.track.trees[-1][k] = _Recorded(tree)
                session.track.matches[-1][k] = _Recorded(match)
        self._advance()
        return [TokenTree.empty(trees[0].tokens.device)] * count


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
    """The rounds of decoding with a tree.

    Args:
        spec: `none`, a chain to DEPTH, or a dynamic tree of a recorded width within DEPTH and
            MOST_NODES.
    """
    rounds: list[Replayed] = []
    position = 0
    last = len(track.tokens) - 1
    usual = spec.depth
    if spec.shape == "dynamic":
        usual = spec.budget
    # Trees that differ in their number of nodes only share their positions.
    key = (spec.shape, spec.top_k, spec.depth, spec.stop, spec.cut, spec.alone, spec.matches)
    seen = track._seen[key]
    while position < last:
        accepted = 0
        nodes = 0
        depth = 0
        deepest = track.limit - position - 2  # decoding cuts trees at the token limit
        if spec.shape != "none" and position < len(track.trees) and deepest > 0:
            if position not in seen:
                seen[position] = _position(track, position, spec)
            at = seen[position]
            budget = usual
            if at.likely is not None:
                budget = max(usual, min(at.likely, spec.most))
            budget = min(budget, at.verified)  # ranks are by score
            accepted = sum(rank < budget for rank in at.ranks[:deepest])
            nodes = budget
            depth = at.drafted
            if at.tree.deepest > deepest:
                nodes = 0
                for rank, below in zip(at.tree.ranks, at.tree.depths, strict=True):
                    nodes += rank < budget and below <= deepest
        committed = min(accepted + 1, last - position)  # and the bonus token
        rounds.append(Replayed(committed, nodes, depth))
        position += committed
    return rounds


def _position(track: Track, position: int, spec: TreeSpec) -> _Position:
    recorded = track.trees[position][spec.top_k]
    match = track.matches[position][spec.top_k]
    likely = None
    if spec.matches and is_likely(match.tree, spec):
        tree = match  # for a chain it is a chain itself, as deep as was recorded
        drafted = 0
        likely = sum(score >= math.log(WORTH) for score in match.scores)
    else:
        merges = spec.matches and spec.shape == "dynamic"
        tree, drafted = recorded.merged(match, spec.depth, spec.floor, merges)
    verified = len(tree.scores)
    if spec.cut:
        least = math.log(spec.cut)
        verified = sum(score >= least for score in tree.scores)
    path = tree.path(track.tokens[position + 1 :])
    return _Position(tree, [tree.ranks[node] for node in path], drafted, likely, verified)


def _positions(tracks: Sequence[Track]) -> Iterator[tuple[dict[int, _Recorded], list[int]]]:
    """The trees of every position, and the tokens that follow."""
    for track in tracks:
        for position, trees in enumerate(track.trees, 1):
            yield trees, track.tokens[position : position + DEPTH]


def recall(tracks: Sequence[Track], tops: Sequence[int] = (1, 2, 4, 8)) -> dict[str, list[float]]:
    """Share of positions whose true token is among the drafter's top tokens, by depth.

    Returns:
        Per entry of `tops` a share per depth, along the true continuation. A depth counts if the
        recorded tree holds the true path down to it.
    """
    width = max(WIDTHS)
    tried = np.zeros(DEPTH)
    found = {top: np.zeros(DEPTH) for top in tops}
    for trees, continuation in _positions(tracks):
        tree = trees[width]
        path = tree.path(continuation)
        expanded = {-1, *tree.parents}
        above = -1  # the true path's node of the depth before
        for depth in range(len(continuation)):
            if depth > len(path) or above not in expanded:
                break
            tried[depth] += 1
            rank = width  # behind all top tokens
            if depth < len(path):
                above = path[depth]
                rank = tree.sibling_rank(above)
            for top in tops:
                found[top][depth] += rank < top
    return {str(top): _shares(found[top], tried) for top in tops}


def _shares(found: np.ndarray, tried: np.ndarray) -> list[float]:
    return [round(float(share), 4) for share in found / np.maximum(tried, 1)]


def chances(tracks: Sequence[Track]) -> list[float]:
    """Conditional acceptance of the greedy chain by depth.

    The share of positions correct at a depth, given that all before were.
    """
    right = np.zeros(DEPTH)
    tried = np.zeros(DEPTH)
    for trees, continuation in _positions(tracks):
        reached = len(trees[1].path(continuation))
        right[:reached] += 1
        tried[: min(reached + 1, len(continuation))] += 1
    return _shares(right, tried)


# -- costs -----------------------------------------------------------------------------------------

# Numbers of nodes whose verification is measured; with the root they fill the row tiles of kernels.
NODES = (1, 2, 4, 8, 11, 15, 23, 31, 47, MOST_NODES)
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
        prompt: the target reads a token of a prompt.
    """

    verify: dict[int, float]
    draft: dict[tuple[int, int], float]
    match: float = 0.0
    read: float = 0.0
    read_prompt: float = 0.0
    around: float = 0.0
    prompt: float = 0.0

    def round(self, spec: TreeSpec, nodes: int, depth: int) -> float:
        """Seconds of a round that drafts to `depth` and verifies `nodes` nodes."""
        if spec.shape == "none":
            return self.verify[0]
        seconds = _interpolate(self.verify, nodes) + self.read
        if spec.matches:
            seconds += self.match
        if depth:
            by_depth = {d: cost for (k, d), cost in self.draft.items() if k == spec.top_k}
            seconds += _interpolate(by_depth, depth)
        if nodes:
            seconds += self.around
        return seconds

    def affordable(self, factor: float) -> int:
        """Most nodes, of those measured, whose pass costs at most `factor` plain ones; else 0."""
        most = 0
        for nodes, seconds in self.verify.items():
            if seconds <= factor * self.verify[0]:
                most = max(most, nodes)
        return most

    def averaged(self, other: CostModel) -> CostModel:
        """The mean of two measurements of the same parts."""

        def means(one: dict[Part, float], two: dict[Part, float]) -> dict[Part, float]:
            # A size may be missing in one: near the token limit trees are cut.
            return {part: (one[part] + two[part]) / 2 for part in one if part in two}

        single = means(self.single, other.single)
        return CostModel(
            means(self.verify, other.verify),
            means(self.draft, other.draft),
            **single,
        )

    @property
    def single(self) -> dict[str, float]:
        """The parts that are one number each."""
        return {name: cost for name, cost in vars(self).items() if isinstance(cost, float)}

    def table(self) -> Json:
        """The costs in milliseconds, for JSON."""
        verification = {}
        for nodes, seconds in self.verify.items():
            verification[str(nodes)] = round(1000 * seconds, 3)
        drafting: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (k, depth), seconds in self.draft.items():
            drafting[str(k)][str(depth)] = round(1000 * seconds, 3)
        found: Json = {"verification_ms": verification, "drafting_ms": dict(drafting)}
        for name, seconds in self.single.items():
            found[f"{name}_ms"] = round(1000 * seconds, 4)
        return found


def _interpolate(known: dict[int, float], at: float) -> float:
    """Piecewise linear, extrapolated."""
    keys = sorted(known)
    if len(keys) == 1:
        return known[keys[0]]
    above = min(max(bisect_left(keys, at), 1), len(keys) - 1)
    left = keys[above - 1]
    right = keys[above]
    return known[left] + (known[right] - known[left]) * (at - left) / (right - left)


class _ProbeTrees(ForwardingDrafter):
    """The drafter, except for trees that measure verification: those hold made-up tokens, almost
    never accepted.
    """

    def __init__(self, drafter: Drafter, target: Target):
        super().__init__(drafter)
        self.target = target
        self.probes = 0  # passes have the sizes that are measured

    def propose_all(
        self,
        sessions: Sequence[Session],
        spec: TreeSpec,
        samplers: Sequence[Sampler | None],
    ) -> list[TokenTree]:
        if spec.shape != "paths":
            return self.inner.propose_all(sessions, spec, samplers)
        nodes = spec.budget
        # Multiples of a prime, which look random.
        tokens = [7919 * node % self.target.vocab_size for node in range(1, nodes + 1)]
        # A binary tree: node n follows node (n - 1) // 2.
        parents = [-1]
        for node in range(1, nodes):
            parents.append((node - 1) // 2)
        return [TokenTree(torch.tensor(tokens, device=self.target.device), parents)]


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
    sizes = []
    for nodes in NODES:
        sizes.append(TreeSpec.parse("paths:" + ",".join(map(str, range(nodes)))))
    drafts = []
    for k in WIDTHS:
        drafts += [_draft_spec(k, depth) for depth in DEPTHS]
    matched = []
    if parts_of(drafter)[1] is not None:
        matched.append(TreeSpec.parse("dynamic:3,4,8@alone=0.999"))
    specs = [TreeSpec.parse("none"), *sizes, *drafts, *matched]

    schedule = _Schedule(specs, advance)
    decoder = Decoder(
        target,
        _ProbeTrees(drafter, target),
        spec=max(specs, key=lambda spec: spec.budget),
        sampling=sampling,
        eos_ids=(),
        pace=schedule,
    )
    wanted = (cycles + WARM_UP) * len(specs)
    answers: list[Stats] = []
    turns = itertools.cycle(prompts)
    while len(schedule.rounds) < wanted:
        answers.append(Stats())
        stream = decoder.stream([next(turns)], max_new_tokens=max_new_tokens, stats=answers[-1:])
        with closing(stream):
            for _ in stream:
                if len(schedule.rounds) >= wanted:
                    break
    model = _fit(schedule.rounds[WARM_UP * len(specs) :], drafts, matched)
    seconds = sum(each.prefill_seconds for each in answers)
    model.prompt = seconds / sum(each.prompt_tokens for each in answers)
    return model


def _draft_spec(k: int, depth: int) -> TreeSpec:
    shape = f"chain:{depth}" if k == 1 else f"dynamic:{depth},{k},8"
    return TreeSpec.parse(f"{shape}@nomatch")


def _fit(
    rounds: Sequence[RoundReport],
    drafts: Sequence[TreeSpec],
    matched: Sequence[TreeSpec],
) -> CostModel:
    verify: defaultdict[int, list[float]] = defaultdict(list)
    draft: defaultdict[TreeSpec, list[float]] = defaultdict(list)
    reads = []  # seconds of reading what a round committed
    prompt_seconds = 0.0  # of reading prompts, and their tokens
    prompt_tokens = 0
    for done in rounds:
        if done.spec.shape in ("none", "paths"):
            verify[done.new_tokens - 1].append(_pass_seconds(done))
        elif done.drafted:
            draft[done.spec].append(done.draft_seconds)
        if done.read > _PREFILL:
            prompt_seconds += done.read_seconds
            prompt_tokens += done.read
        elif done.read > 0:
            reads.append(done.read_seconds)

    model = CostModel({}, {})
    for nodes in (0, *NODES):
        if nodes in verify:
            model.verify[nodes] = median(verify[nodes])
    for spec in drafts:
        # A drafter that finds nothing to draft takes no time worth counting.
        model.draft[spec.top_k, spec.depth] = median(draft.get(spec, [0.0]))
    if matched and draft[matched[0]]:
        alone = median(draft[_draft_spec(4, 3)])
        model.match = max(0.0, median(draft[matched[0]]) - alone)
    if reads:
        model.read = median(reads)
    if prompt_tokens:
        model.read_prompt = prompt_seconds / prompt_tokens

    # What passes of drafted trees cost beyond those of made-up trees of their size.
    extra = []
    for done in rounds:
        if done.drafted and done.spec.shape != "paths":
            expected = _interpolate(model.verify, done.new_tokens - 1)
            extra.append(_pass_seconds(done) - expected)
    if extra:
        model.around = max(0.0, median(extra))
    return model


def _pass_seconds(done: RoundReport) -> float:
    """Seconds of a round without drafting and reading."""
    return done.seconds - done.draft_seconds - done.read_seconds
