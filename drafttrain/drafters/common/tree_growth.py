"""Growth of token trees by steps of a drafter.

Fixed shapes open every node that has children. Dynamic trees (EAGLE-2, arXiv 2406.16858) open the
`top_k` likeliest paths of each depth and keep the `budget` likeliest nodes at the end. The
probability of a path never rises with depth, so the kept nodes form a tree, and paths that can no
longer be among them are not continued.

`spec.stop` decides whether a node is opened before its children are known, so it does not bias
sampled trees: the children of every opened node are drawn from its own q, and all of them stay.
Dropping children by their outcome, as dynamic trees and `spec.cut` do (`TokenTree.prune`), would.

A drafter may return a confidence with a node's logits: the share of q that it expects the target to
accept, sum min(p, q). It multiplies the probabilities of the children. What is drawn is drawn from
q alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafttrain.batch import Proposal, TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec, ranks_below
from drafttrain.ops.sampling import Sampler, draw_distinct, probabilities, top_log_probs


class Children(NamedTuple):
    """What the children of n nodes are drafted from: all logits, or the top tokens alone.

    Attributes:
        logits: [n, d].
        ids, log_probs: [n, w] int64 drafter ids and float32, descending; a tree that draws nothing
            needs no more.
        confidence: [n], see above. reads: [n, h] the head's input, if tokens may join the
            vocabulary.
        shared: row i belongs to all nodes of sequence i, instead of to node i.
    """

    logits: Tensor | None = None
    ids: Tensor | None = None
    log_probs: Tensor | None = None
    confidence: Tensor | None = None
    reads: Tensor | None = None
    shared: bool = False

    @property
    def scores(self) -> Tensor:
        """[n, d or w] the logits, or what is there in their place."""
        if self.logits is not None:
            return self.logits
        assert self.log_probs is not None
        return self.log_probs

    def trusted(self, log_probs: Tensor) -> Tensor:
        """Log-probabilities [n, .] of the children, times their confidence."""
        if self.confidence is None:
            return log_probs
        return log_probs + self.confidence.log()[:, None]

    def part(self, where: slice) -> Children:
        """Those of some of the nodes."""
        tensors = {}
        for name, value in self._asdict().items():
            if isinstance(value, Tensor):
                tensors[name] = value[where]
        return self._replace(**tensors)  # type: ignore[arg-type]

    def every(self, count: int, depth: int) -> Children:
        """Those of a depth, of `count` depths that stand together for each sequence."""
        return self.part(slice(depth, None, count))


class GrowingTree:
    """One sequence's tree while it grows.

    `tokens` and `parents` are the nodes to open next; `grow` takes their children.

    Args:
        root: of the root's children, one row.
        kept_ids: [d] target id of each drafter id; None if the vocabularies are the same.
        sampler: draws the tokens if `spec.sampled`. q is the drafter's distribution under the
            target's temperature, top-k, top-p and min-p; it ignores the repetition penalty, which
            costs acceptance only.
        max_depth: the deepest node that the drafter can predict; None for any.
        row: the sequence's index, for the caller.

    Attributes:
        done: no node is left to open.
        tokens: [m] int64 drafter ids of the nodes to open. above: their parents among the nodes that
            were opened last (the root at first).
        opened: parents of all nodes opened so far, those to open included, counted among them; -1
            for the root.
        place: for the caller, the number of the first node that was opened last among those of all
            trees; the root's is `row`.
    """

    def __init__(
        self,
        spec: TreeSpec,
        root: Children,
        kept_ids: Tensor | None = None,
        sampler: Sampler | None = None,
        max_depth: int | None = None,
        row: int = 0,
    ):
        assert sampler is not None or not spec.sampled, "sampled trees need a sampler"
        self.spec = spec
        self.kept_ids = kept_ids
        self.sampler = sampler if spec.sampled else None
        self.row = row
        self.place = row
        self.device = root.scores.device
        self.done = False
        self.opened: list[int] = []
        self._begin = -1  # number of the first node that was opened last
        self._depths_left = spec.depth
        if max_depth:
            self._depths_left = min(spec.depth, max_depth)
        self._floor = spec.floor
        # Per candidate: drafter id, parent, log-probability and ranks of its path, row of q.
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._paths: list[tuple[int, ...]] = []
        self._rows: list[int] = []
        self._q: list[Tensor] = []  # [., d] each
        self._level = [-1]  # nodes whose children come next; the root
        if self._depths_left:
            self.grow(root)
        else:
            self.done = True

    def grow(self, children: Children) -> None:
        """Adds the children of the nodes just opened, and selects the nodes to open next."""
        level = self._add_children(self._level, children)
        self._depths_left -= 1
        if not self._depths_left:
            self.done = True
            return
        # Nodes that are likely enough and have children.
        level = [node for node in level if self._scores[node] >= self._floor and self._ranks(node)]
        if self.spec.shape == "dynamic":
            scores = [self._scores[node] for node in level]
            level = [level[i] for i in TokenTree.best_nodes(scores, self.spec.top_k)]
            # No child of a node that scores below the budget-th candidate can be in the tree.
            if len(self._scores) >= self.spec.budget:
                bar = sorted(self._scores, reverse=True)[self.spec.budget - 1]
                level = [node for node in level if self._scores[node] > bar]
        self.done = not level
        if level:
            self._open(level)

    @property
    def target_ids(self) -> Tensor:
        """[m] int64 target ids of the nodes to open."""
        if self.kept_ids is None:
            return self.tokens
        return self.kept_ids[self.tokens]

    def finish(self) -> TokenTree:
        """The tree, in target ids."""
        if not self._tokens:
            return TokenTree.empty(self.device)
        tree = TokenTree.likeliest(
            self.spec.budget,
            self._tokens,
            self._parents,
            self._scores,
            self.device,
        )
        if self.kept_ids is not None:
            tree.tokens = self.kept_ids[tree.tokens]
        if self._q:  # never a dynamic tree, so all candidates are there
            tree.proposal = Proposal(torch.cat(self._q), self._rows, self.kept_ids)
        return tree

    def _ranks(self, node: int) -> Sequence[int]:
        """Ranks of a node's children among its likeliest (or drawn) tokens."""
        path = self._path(node)
        if self.spec.shape == "paths":
            return ranks_below(self.spec.paths).get(path, ())
        if self.spec.shape == "dynamic":
            return range(self.spec.top_k)
        return range(self.spec.fanout[len(path)])

    def _path(self, node: int) -> tuple[int, ...]:
        """The ranks from the root to a node."""
        if node < 0:
            return ()
        return self._paths[node]

    def _add_children(self, parents: list[int], children: Children) -> list[int]:
        """Adds candidates below the nodes `parents`, from [m or 1, .]; returns their numbers."""
        full = children.logits
        size = children.scores.shape[-1]
        wanted = [self._ranks(parent) for parent in parents]
        highest = max(map(max, wanted))  # rank of any child
        width = min(1 + highest, size)
        first_row = sum(map(len, self._q))  # of this depth's q among all rows
        if self.sampler is None:
            if full is not None:
                scores, tokens = top_log_probs(full, width)  # [m or 1, width] each
            else:
                assert children.ids is not None
                scores, tokens = children.scores, children.ids
            if scores.shape[0] < len(parents):
                scores = scores.expand(len(parents), -1)
                tokens = tokens.expand(len(parents), -1)
        else:
            assert full is not None, "tokens are drawn from a full q"
            q = probabilities(full, self.sampler.params).expand(len(parents), -1)  # [m, d]
            # [m, width], -1 where q has no more tokens
            tokens = draw_distinct(q, width, self.sampler.generator)
            scores = q.gather(-1, tokens.clamp_min(0)).log()
            self._q.append(q)
        scores = children.trusted(scores)

        # One transfer from the device, then lists.
        first = len(self._tokens)
        rows = zip(parents, tokens.tolist(), scores.tolist(), strict=True)
        for row, (parent, ids, values) in enumerate(rows):
            above = self._scores[parent] if parent >= 0 else 0.0
            path = self._path(parent)
            # Ranks that exist: a small vocabulary, or a q with few tokens, has fewer.
            ranks = [rank for rank in wanted[row] if rank < width and ids[rank] >= 0]
            self._tokens += [ids[rank] for rank in ranks]
            self._parents += [parent] * len(ranks)
            self._paths += [(*path, rank) for rank in ranks]
            self._scores += [above + values[rank] for rank in ranks]
            self._rows += [first_row + row] * len(ranks)
        return list(range(first, len(self._tokens)))

    def _open(self, level: list[int]) -> None:
        """Makes candidates the nodes to open next."""
        place = {node: i for i, node in enumerate(self._level)}  # of the nodes opened last
        self.tokens = torch.tensor([self._tokens[node] for node in level], device=self.device)
        self.above = [place[self._parents[node]] for node in level]
        begin = len(self.opened)
        self.opened = self.opened + [self._begin + i for i in self.above]
        self._begin = begin
        self._level = level


def widest(spec: TreeSpec) -> int | None:
    """The most top tokens that any node of a tree needs; None if tokens are drawn, of all logits."""
    if spec.sampled:
        return None
    if spec.paths:
        return 1 + max(map(max, spec.paths))
    return max(1, spec.top_k)  # of `none`, too


def grow_trees(
    trees: Sequence[GrowingTree], step: Callable[[list[GrowingTree], int], Sequence[Children]]
) -> list[TokenTree]:
    """Grows the trees of several sequences together, one drafter step per depth.

    Args:
        step: (trees that are not done, depth of their nodes' children, from 1) -> each tree's
            children.
    """
    growing = [tree for tree in trees if not tree.done]
    depth = 0
    while growing:  # small trees end before deep ones
        depth += 1
        for tree, children in zip(growing, step(growing, depth), strict=True):
            tree.grow(children)
        growing = [tree for tree in growing if not tree.done]
    return [tree.finish() for tree in trees]
