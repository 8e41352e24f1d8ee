"""Two drafters at once: a training-free one's match is merged into the other's tree, within the same budget.

Language models repeat themselves and their prompts. Where an n-gram matches, its continuation is cheap and often long;
where none does, the whole budget is the other drafter's. Written `DRAFTER+ngram` wherever a drafter is named.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, Session, TreeSpec
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target


def merge(first: TokenTree, second: TokenTree) -> TokenTree:
    """The union of two trees: paths that begin alike share their nodes.

    Nodes of `first` keep their indices, and what they were drawn from; the others count as chosen by a rule.
    """
    parents = list(first.parents)
    tokens = first.tokens.tolist()
    place = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    where = {-1: -1}
    for node, (parent, token) in enumerate(zip(second.parents, second.tokens.tolist(), strict=True)):
        key = (where[parent], token)
        if key not in place:
            place[key] = len(tokens)
            parents.append(key[0])
            tokens.append(token)
        where[node] = place[key]
    drawn = first.proposal and replace(first.proposal, rows=first.proposal.rows + [-1] * (len(tokens) - len(first)))
    return TokenTree(torch.tensor(tokens, dtype=torch.long, device=first.tokens.device), parents, proposal=drawn)


class CombinedDrafter:
    """Drafts with `main` and merges the chain that `side` proposes.

    A dynamic tree gives the chain up to half of its budget. Chains and fan-outs have no room to share: there the match,
    if any, is drafted instead.
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
        return CombinedSession(self.main.start(prompt_ids, max_length), self.side.start(prompt_ids, max_length))


class CombinedSession:
    """Both sessions see everything that is committed."""

    def __init__(self, main: Session, side: Session):
        self.main, self.side = main, side

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        self.main.extend(tokens, features)
        self.side.extend(tokens, features)

    def propose(self, spec: TreeSpec, sampler: Sampler | None = None) -> TokenTree:
        length = spec.budget // 2 if spec.shape == "dynamic" else spec.depth
        if length < 1:
            return self.main.propose(spec, sampler)
        chain = self.side.propose(TreeSpec.parse(f"chain:{length}"))
        if len(chain) == 0:
            return self.main.propose(spec, sampler)
        if spec.shape != "dynamic":
            return chain
        return merge(self.main.propose(replace(spec, budget=spec.budget - len(chain)), sampler), chain)
