"""Two drafters at once: a training-free one's match is merged into the other's tree, within the same budget.

Language models repeat themselves and their prompts. Where an n-gram matches, its continuation is cheap and often long;
where none does, the whole budget is the other drafter's. Written `DRAFTER+ngram` wherever a drafter is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, Session, TreeSpec
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target


def merge(first: TokenTree, second: TokenTree) -> TokenTree:
    """The union of two trees: paths that begin alike share their nodes.

    Nodes of `first` keep their indices, and what they were drawn from; the others count as chosen by a rule. Those of
    `second` count as certain (log-probability 0), since they have their share of the budget in any case.
    """
    parents = list(first.parents)
    tokens = first.tokens.tolist()
    place = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    scores = first.log_probs.tolist() if first.log_probs is not None else [0.0] * len(first)
    where = {-1: -1}
    for node, (parent, token) in enumerate(zip(second.parents, second.tokens.tolist(), strict=True)):
        key = (where[parent], token)
        if key not in place:
            place[key] = len(tokens)
            parents.append(key[0])
            tokens.append(token)
            scores.append(0.0)
        where[node] = place[key]
        scores[place[key]] = 0.0
    drawn = first.proposal and replace(first.proposal, rows=first.proposal.rows + [-1] * (len(tokens) - len(first)))
    log_probs = None if first.log_probs is None else torch.tensor(scores)
    return TokenTree(
        torch.tensor(tokens, dtype=torch.long, device=first.tokens.device), parents, log_probs, proposal=drawn
    )


class CombinedDrafter(Drafter):
    """Drafts with `main` and merges the chain that `side` proposes.

    A dynamic tree gives the chain up to half of its budget (`@match=S`: that share). Chains and fan-outs have no room to
    share: there the match, if any, is drafted instead, unless S is 0.
    """

    trainable = False

    def __init__(self, main: Drafter, side: Drafter):
        self.main, self.side = main, side
        self.kind = f"{main.kind}+{side.kind}"
        self.feature_layers = main.feature_layers

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
        chains = self.side.propose_all(sides, [_room(spec) for spec in specs], samplers)
        trees = dict(enumerate(chains))
        # What the chain leaves of the budget; without a match, all of it.
        asked = {
            row: replace(spec, budget=spec.budget - len(chain)) if len(chain) else spec
            for row, (spec, chain) in enumerate(zip(specs, chains, strict=True))
            if spec.shape == "dynamic" or len(chain) == 0
        }
        drafted: list[TokenTree] = []
        if asked:
            mains = [sessions[row].main for row in asked]
            drafted = self.main.propose_all(mains, list(asked.values()), [samplers[row] for row in asked])
        for row, tree in zip(asked, drafted, strict=True):
            trees[row] = merge(tree, chains[row]) if len(chains[row]) else tree
        return [trees[row] for row in range(len(sessions))]


def _room(spec: TreeSpec) -> TreeSpec:
    """The chain that the side drafter may propose."""
    length = int(spec.budget * spec.match) if spec.shape == "dynamic" else spec.depth * (spec.match > 0)
    return TreeSpec.parse(f"chain:{length}" if length else "none")


class CombinedSession:
    """Both sessions see everything that is committed."""

    def __init__(self, drafter: CombinedDrafter, main: Session, side: Session):
        self.drafter, self.main, self.side = drafter, main, side

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        self.main.extend(tokens, features)
        self.side.extend(tokens, features)

    def propose(self, spec: TreeSpec, sampler: Sampler | None = None) -> TokenTree:
        return self.drafter.propose_all([self], [spec], [sampler])[0]
