"""Growing a token tree from a drafter that can be stepped one depth at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import TreeSpec

# nodes to open: (their own tokens [m], their parents' order among all opened nodes so far) -> logits [m, d]
Advance = Callable[[Tensor, list[int]], Tensor]


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

    def open(self, nodes: list[int], advance: Advance, device: torch.device) -> Tensor:
        parents = [self.opened[self.parents[i]] if self.parents[i] >= 0 else -1 for i in nodes]
        for i in nodes:
            self.opened[i] = self.opened_count
            self.opened_count += 1
        return advance(torch.tensor([self.tokens[i] for i in nodes], device=device), parents)

    def best(self, nodes: list[int], count: int) -> list[int]:
        """The likeliest paths; equal scores keep the older node first, so a parent never loses to its child."""
        return sorted(nodes, key=lambda i: (-self.scores[i], i))[:count]


def expand(spec: TreeSpec, first: Tensor, advance: Advance, kept_ids: Tensor | None = None) -> TokenTree:
    """Drafts a tree of the asked shape.

    Chains and fan-outs open every node of a level; dynamic trees open the `top_k` likeliest paths of each level and keep
    the `budget` likeliest nodes at the end. A path's probability never rises with depth, so the kept set is closed under
    parents.

    Args:
        spec: the shape; `none` gives an empty tree.
        first: [d] logits of the root's children.
        advance: runs the drafter one step on given nodes.
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
        level = grower.add_children(level, grower.open(level, advance, first.device), width)
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
