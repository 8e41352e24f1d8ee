"""Two drafters in one: one drafter's tree and the match of a kind without weights share a budget.

Language models repeat themselves and their prompts. A match that is likely to continue is drafted
alone: it is long, and costs no pass of the other drafter. Otherwise both draft, and the likeliest
nodes of the two trees are verified. Written `DRAFTER+ngram` wherever a drafter is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, Predictions, Session
from drafttrain.drafters.common.rows import JointSession, Steps
from drafttrain.drafters.common.static_draft import DraftSteps
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.ops.graphs import GraphPool
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target

# A match with at least this probability of its first token is drafted alone: the other drafter's
# pass costs more than it adds.
_SURE = 0.75
# The same for chains and fan-outs, where one drafter's tree replaces the other's.
_LIKELY = 0.5
# A match that is drafted alone may exceed the tree's budget by nodes at least this likely.
WORTH = 0.1


def merge(first: TokenTree, second: TokenTree, budget: int) -> TokenTree:
    """The `budget` likeliest nodes of the union of two trees.

    Equal paths share their nodes, at the higher probability. Nodes keep the order of the trees,
    `first` before `second`. Sampled trees cannot be merged: their q would be lost.
    """
    parents = list(first.parents)
    tokens = first.tokens.tolist()
    scores = _scores(first)
    place = {}  # node of each (parent, token)
    for node, edge in enumerate(zip(parents, tokens, strict=True)):
        place[edge] = node
    where = {-1: -1}  # node of the union of each node of `second`
    entries = zip(second.parents, second.tokens.tolist(), _scores(second), strict=True)
    for node, (parent, token, score) in enumerate(entries):
        key = (where[parent], token)
        # The same token after the same path: the more certain drafter's probability counts.
        if key in place:
            scores[place[key]] = max(scores[place[key]], score)
        else:
            place[key] = len(tokens)
            parents.append(key[0])
            tokens.append(token)
            scores.append(score)
        where[node] = place[key]
    # Nodes behind `first` come from the match alone; results count them apart.
    matched = frozenset(range(len(first), len(tokens)))
    return TokenTree.likeliest(
        budget,
        tokens,
        parents,
        scores,
        first.tokens.device,
        matched,
    )


def _scores(tree: TokenTree) -> list[float]:
    """Log-probabilities of paths; 0 for a drafter that computes none."""
    if tree.log_probs is None:
        return [0.0] * len(tree)
    return tree.log_probs.tolist()


class CombinedDrafter(Drafter):
    """Drafts with `main`, with `side` or with both, by the probability of the side's match.

    A dynamic tree holds the likeliest nodes of both. Chains, fan-outs and sampled trees cannot be
    merged: there a likely match replaces the tree.
    """

    def __init__(self, main: Drafter, side: Drafter):
        self.main = main
        self.side = side
        self.kind = f"{main.kind}+{side.kind}"
        self.feature_layers = main.feature_layers
        self.probes = main.probes + side.probes
        self.predictions = max(main.predictions, side.predictions)

    def __repr__(self) -> str:
        return f"{self.main!r} + {self.side!r}"

    def bind(self, target: Target) -> None:
        self.main.bind(target)
        self.side.bind(target)

    def start(self, prompt_ids: Tensor, max_length: int) -> CombinedSession:
        return CombinedSession(
            self,
            self.main.start(prompt_ids, max_length),
            self.side.start(prompt_ids, max_length),
        )

    def rewind(
        self,
        session: Session,
        prompt_ids: Tensor,
        read: int,
        max_length: int,
    ) -> CombinedSession | None:
        assert isinstance(session, CombinedSession)
        main = self.main.rewind(session.main, prompt_ids, read, max_length)
        if main is None:
            return None
        side = self.side.rewind(session.side, prompt_ids, read, max_length)
        # One that went back alone would read features twice.
        if side is None:
            return None
        return CombinedSession(self, main, side)

    def open_steps(
        self,
        pool: GraphPool,
        capacity: int,
        rows: int,
        spec: TreeSpec,
        last: DraftSteps | None,
    ) -> DraftSteps | None:
        return self.main.open_steps(pool, capacity, rows, spec, last)

    def extend_all(
        self,
        sessions: Sequence[CombinedSession],
        tokens: Sequence[Tensor],
        features: Sequence[Tensor],
    ) -> None:
        self.main.extend_all([session.main for session in sessions], tokens, features)
        self.side.extend_all([session.side for session in sessions], tokens, features)

    def propose_all(
        self,
        sessions: Sequence[CombinedSession],
        spec: TreeSpec,
        samplers: Sequence[Sampler | None],
    ) -> list[TokenTree]:
        sides = [session.side for session in sessions]
        found = self.side.propose_all(sides, match_spec(spec), samplers)

        # Likely matches are drafted alone; the other rows need a pass of the main drafter.
        trees: dict[int, TokenTree] = {}
        rows = []
        for row, tree in enumerate(found):
            if self.side.drafts_alone and is_likely(tree, spec):
                trees[row] = alone(tree, spec)
            else:
                rows.append(row)
        if rows:
            drafted = self.main.propose_all(
                [sessions[row].main for row in rows],
                spec,
                [samplers[row] for row in rows],
            )
            trees |= zip(rows, drafted, strict=True)
            # An empty match has nothing to merge.
            both = [row for row in rows if spec.shape == "dynamic" and len(found[row])]
            if both:
                trees |= self._merged(both, trees, found, spec.budget)
        return [trees[row] for row in range(len(sessions))]

    def _merged(
        self,
        rows: list[int],
        trees: Mapping[int, TokenTree],
        found: Sequence[TokenTree],
        budget: int,
    ) -> dict[int, TokenTree]:
        """The trees of `rows` merged with their matches; one transfer each way for all of them."""
        device = trees[rows[0]].tokens.device
        # The merge walks nodes one by one, which needs them on the host.
        parts = [trees[row] for row in rows] + [found[row] for row in rows]
        parts = TokenTree.moved(parts, torch.device("cpu"))
        pairs = zip(parts[: len(rows)], parts[len(rows) :], strict=True)
        merged = [merge(tree, match, budget) for tree, match in pairs]
        return dict(zip(rows, TokenTree.moved(merged, device), strict=True))


def parts_of(drafter: Drafter) -> tuple[Drafter, Drafter | None]:
    """The drafter that grows trees, and the one whose matches are merged into them, if any."""
    if isinstance(drafter, CombinedDrafter):
        return (drafter.main, drafter.side)
    return (drafter, None)


@cache
def match_spec(spec: TreeSpec) -> TreeSpec:
    """The tree that the second drafter may propose.

    In a dynamic tree its paths may be as long as the budget.
    """
    if not spec.matches or spec.shape == "none":
        return TreeSpec.parse("none")
    if spec.shape == "dynamic":
        return replace(
            spec,
            depth=spec.most,
            budget=spec.most,
            stop=0.0,
            cut=0.0,
        )
    return TreeSpec.parse(f"chain:{max(spec.depth, spec.match)}")


def is_likely(match: TokenTree, spec: TreeSpec) -> bool:
    """True if the match is likely enough to skip the other drafter."""
    bar = spec.alone
    if not bar:
        bar = _LIKELY
        if spec.shape == "dynamic":
            bar = _SURE
    # The first node's score is the log-probability of the match's first token.
    return len(match) > 0 and math.exp(_scores(match)[0]) >= bar


def alone(match: TokenTree, spec: TreeSpec) -> TokenTree:
    """The nodes of a match that is drafted alone.

    They are the tree's usual number of nodes, and further likely ones.
    """
    scores = _scores(match)
    usual = spec.depth
    if spec.shape == "dynamic":
        usual = spec.budget
    kept = set(TokenTree.best_nodes(scores, usual))
    kept.update(node for node in range(len(match)) if scores[node] >= math.log(WORTH))
    if len(kept) < len(match):
        match = match.part(sorted(kept))
    return replace(match, matched=frozenset(range(len(kept))))


class CombinedSession(JointSession):
    """Both drafters' sessions of one sequence."""

    def __init__(self, drafter: CombinedDrafter, main: Session, side: Session):
        self.drafter = drafter
        self.main = main
        self.side = side
        self.probe_counts: list[int] = []  # probes of each part in this round

    def place(self, steps: Steps, row: int) -> None:
        self.main.place(steps, row)

    def probe(self) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        self.probe_counts = []
        for part in (self.main, self.side):
            ids, above = part.probe()
            before = len(tokens)
            for parent in above:
                # Parents count within a part; -1 is the last committed token in both.
                if parent >= 0:
                    parent += before
                parents.append(parent)
            tokens += ids
            self.probe_counts.append(len(ids))
        return tokens, parents

    def observe(self, chosen: list[int]) -> None:
        # The root's choice comes first and concerns both; the parts' own probes follow in turn.
        begin = 1
        for part, count in zip((self.main, self.side), self.probe_counts, strict=True):
            part.observe(chosen[:1] + chosen[begin : begin + count])
            begin += count

    def read_predictions(self, tree: TokenTree, predictions: list[Predictions]) -> None:
        for part, drafter in ((self.main, self.drafter.main), (self.side, self.drafter.side)):
            width = drafter.predictions
            # Rows hold as many predictions as the part that asks for most.
            if width:
                own = [(ids[:width], shares[:width]) for ids, shares in predictions]
                part.read_predictions(tree, own)
