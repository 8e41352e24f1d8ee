"""Two drafters at once: a training-free one's match is merged into the other's tree, within the same budget.

Language models repeat themselves and their prompts. Where a match is likely to go on, its continuation is cheap and long: it
is drafted alone, and the other drafter spared its work. Elsewhere both draft, and the likeliest nodes of the two trees are
verified. Written `DRAFTER+ngram` wherever a drafter is named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, JointSession, Session
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target

# A match this likely to go on is drafted alone: what the other drafter could add is worth less than the time it takes.
_SURE = 0.75
# In a chain or a fan-out, where one drafter's tree takes the other's place, a match goes first from here on.
_LIKELY = 0.5
# Of a match that is drafted alone and may be longer than the tree, nodes less likely than this cost more than they bring.
_WORTH = 0.1


def merge(first: TokenTree, second: TokenTree, budget: int) -> TokenTree:
    """The `budget` likeliest nodes of the union of two trees; paths that begin alike share their nodes.

    A shared node is as likely as the more confident tree thinks. Nodes keep the order of the trees, `first` before
    `second`. What tokens were drawn from goes lost: drawn trees are not for merging.
    """
    parents = list(first.parents)
    tokens = first.tokens.tolist()
    scores = _scores(first)
    place = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    where = {-1: -1}
    entries = zip(second.parents, second.tokens.tolist(), _scores(second), strict=True)
    for node, (parent, token, score) in enumerate(entries):
        key = (where[parent], token)
        if key in place:
            scores[place[key]] = max(scores[place[key]], score)
        else:
            place[key] = len(tokens)
            parents.append(key[0])
            tokens.append(token)
            scores.append(score)
        where[node] = place[key]
    return TokenTree.likeliest(budget, tokens, parents, scores, first.tokens.device)


def _scores(tree: TokenTree) -> list[float]:
    """Log-probabilities of paths; a drafter that knows none counts as sure of what it found."""
    return [0.0] * len(tree) if tree.log_probs is None else tree.log_probs.tolist()


class CombinedDrafter(Drafter):
    """Drafts with `main`, with `side` or with both, as the likelihood of the side's match says.

    A dynamic tree holds the likeliest nodes of both. Chains and fan-outs have no room to share, and drawn trees none to
    choose: there a likely match is drafted instead.
    """

    def __init__(self, main: Drafter, side: Drafter):
        self.main, self.side = main, side
        self.kind = f"{main.kind}+{side.kind}"
        self.feature_layers = main.feature_layers
        self.probes = main.probes + side.probes

    def bind(self, target: Target) -> None:
        self.main.bind(target)
        self.side.bind(target)

    def start(self, prompt_ids: Tensor, max_length: int) -> CombinedSession:
        return CombinedSession(self, self.main.start(prompt_ids, max_length), self.side.start(prompt_ids, max_length))

    def extend_all(
        self, sessions: Sequence[CombinedSession], tokens: Sequence[Tensor], features: Sequence[Tensor]
    ) -> None:
        self.main.extend_all([session.main for session in sessions], tokens, features)
        self.side.extend_all([session.side for session in sessions], tokens, features)

    def propose_all(
        self, sessions: Sequence[CombinedSession], specs: Sequence[TreeSpec], samplers: Sequence[Sampler | None]
    ) -> list[TokenTree]:
        sides = [session.side for session in sessions]
        found = self.side.propose_all(sides, [match_spec(spec) for spec in specs], samplers)
        sure = [drafts_alone(tree, spec) for tree, spec in zip(found, specs, strict=True)]
        trees = {row: alone(found[row], specs[row]) for row in range(len(sessions)) if sure[row]}
        rows = [row for row in range(len(sessions)) if not sure[row]]
        if rows:
            mains = [sessions[row].main for row in rows]
            drafted = self.main.propose_all(mains, [specs[row] for row in rows], [samplers[row] for row in rows])
            for row, tree in zip(rows, drafted, strict=True):
                both = specs[row].shape == "dynamic" and len(found[row])
                trees[row] = merge(tree, found[row], specs[row].budget) if both else tree
        return [trees[row] for row in range(len(sessions))]


@cache
def match_spec(spec: TreeSpec) -> TreeSpec:
    """What the second drafter may propose: in a dynamic tree paths as long as the budget, for they cost nothing to find."""
    if not spec.matches or spec.shape == "none":
        return TreeSpec.parse("none")
    if spec.shape == "dynamic":
        return replace(spec, depth=spec.most, budget=spec.most, stop=0.0)
    return TreeSpec.parse(f"chain:{max(spec.depth, spec.match)}")


def drafts_alone(match: TokenTree, spec: TreeSpec) -> bool:
    """Whether the match is so likely to go on that the other drafter is not asked."""
    return len(match) > 0 and math.exp(_scores(match)[0]) >= (
        spec.alone or (_SURE if spec.shape == "dynamic" else _LIKELY)
    )


def alone(match: TokenTree, spec: TreeSpec) -> TokenTree:
    """The part of a match that is verified if it is drafted alone."""
    scores = _scores(match)
    order = sorted(range(len(match)), key=lambda node: -scores[node])
    usual = spec.budget if spec.shape == "dynamic" else spec.depth
    kept = [node for rank, node in enumerate(order) if rank < usual or scores[node] >= math.log(_WORTH)]
    return match if len(kept) == len(match) else match.part(sorted(kept))


class CombinedSession(JointSession):
    """Both sessions see everything that is committed."""

    def __init__(self, drafter: CombinedDrafter, main: Session, side: Session):
        self.drafter, self.main, self.side = drafter, main, side
        self.asked: list[int] = []  # probes of each part that has any

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        self.main.extend(tokens, features)
        self.side.extend(tokens, features)

    def probe(self) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        self.asked = []
        for part in (self.main, self.side):
            ids, above = part.probe()
            parents += [parent + len(tokens) if parent >= 0 else -1 for parent in above]
            tokens += ids
            self.asked.append(len(ids))
        return tokens, parents

    def observe(self, chosen: list[int]) -> None:
        begin = 1
        for part, count in zip((self.main, self.side), self.asked, strict=True):
            part.observe([chosen[0], *chosen[begin : begin + count]])
            begin += count
