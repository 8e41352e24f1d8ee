"""Growing a token tree from a drafter that can be stepped one depth at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import TreeSpec

# nodes to open: their own tokens [m], and their parents' order among all opened nodes so far
Nodes = tuple[Tensor, list[int]]
Advance = Callable[[Tensor, list[int]], Tensor]  # nodes to open -> logits [m, d]


class _Grower:
    """Candidates found so far. `opened[i]` is the order in which candidate i was given to `advance`, -1 if it was not."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self.opened: list[int] = []
        self.opened_count = 0

    def add_children(self, parents: list[int], logits: Tensor, width: int) -> list[int]:
        """Adds each parent's `width` likeliest tokens; scores are log-probabilities of whole paths."""
        top = torch.log_softmax(logits.float(), dim=-1).topk(min(width, logits.shape[-1]), dim=-1)
        new: list[int] = []
        for parent, tokens, scores in zip(parents, top.indices.tolist(), top.values.tolist(), strict=True):
            above = self.scores[parent] if parent >= 0 else 0.0
            for token, score in zip(tokens, scores, strict=True):
                new.append(len(self.tokens))
                self.tokens.append(token)
                self.parents.append(parent)
                self.scores.append(above + score)
                self.opened.append(-1)
        return new

    def open(self, nodes: list[int], device: torch.device) -> Nodes:
        parents = [self.opened[self.parents[i]] if self.parents[i] >= 0 else -1 for i in nodes]
        for i in nodes:
            self.opened[i] = self.opened_count
            self.opened_count += 1
        return torch.tensor([self.tokens[i] for i in nodes], device=device), parents

    def best(self, nodes: list[int], count: int) -> list[int]:
        """The likeliest paths; equal scores keep the older node first, so a parent never loses to its child."""
        return sorted(nodes, key=lambda i: (-self.scores[i], i))[:count]


def expand(spec: TreeSpec, first: Tensor, advance: Advance, kept_ids: Tensor | None = None) -> TokenTree:
    """Drafts a tree of the asked shape for one sequence; see `grow`.

    Args:
        advance: runs the drafter one step on given nodes.
    """
    growth = grow(spec, first, kept_ids)
    try:
        nodes = next(growth)
        while True:
            nodes = growth.send(advance(*nodes))
    except StopIteration as done:
        return done.value


def grow(spec: TreeSpec, first: Tensor, kept_ids: Tensor | None = None) -> Generator[Nodes, Tensor, TokenTree]:
    """Grows a tree of the asked shape: yields the nodes to open next and is sent their logits; returns the tree.

    A generator, so that the trees of several sequences can grow together, one drafter step per depth for all of them.

    Chains and fan-outs open every node of a level; dynamic trees open the `top_k` likeliest paths of each level and keep
    the `budget` likeliest nodes at the end. A path's probability never rises with depth, so the kept set is closed under
    parents.

    Args:
        spec: the shape; `none` gives an empty tree.
        first: [d] logits of the root's children.
        kept_ids: [d] target id of each drafter id; None if the vocabularies are the same.

    Source: EAGLE-2, arXiv 2406.16858.
    """
    if spec.shape == "none":
        return TokenTree.empty(first.device)
    grower = _Grower()
    widths = spec.fanout if spec.shape != "dynamic" else (spec.top_k,) * spec.depth
    level = grower.add_children([-1], first[None], widths[0])
    for width in widths[1:]:
        if spec.shape == "dynamic":
            level = grower.best(level, spec.top_k)
        level = grower.add_children(level, (yield grower.open(level, first.device)), width)
    keep = list(range(len(grower.tokens)))
    if spec.shape == "dynamic":
        keep = sorted(grower.best(keep, spec.budget))
    place = {old: new for new, old in enumerate(keep)}
    tokens = torch.tensor([grower.tokens[i] for i in keep], device=first.device)
    return TokenTree(
        kept_ids[tokens] if kept_ids is not None else tokens,
        [place[grower.parents[i]] if grower.parents[i] >= 0 else -1 for i in keep],
        torch.tensor([grower.scores[i] for i in keep]),
    )
