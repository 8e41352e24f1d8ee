"""Trees that grow on a device, as functions of tensors of fixed shapes that a CUDA graph can hold.

Device counterpart of `GrowingTree`:

    depth          1            2                   3
    candidates     k            k x k               k x k              children of the opened nodes, all of them
    opened         k likeliest  k likeliest of the depth               as many in every round
    tree           the `budget` likeliest candidates                   chosen once at the end

The host's growth opens fewer nodes where the rest cannot reach the tree, and stops early. What it
leaves out is never chosen, so both give the same nodes in the same order. Candidates below nodes
that `@stop` ends score -inf, and no tree holds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from drafttrain.drafters.common.tree_growth import Children
from drafttrain.drafters.common.tree_spec import TreeSpec, ranks_below
from drafttrain.ops.sampling import SamplingParams, pick, probabilities, top_log_probs

# (depth of the nodes to open, from 1; their drafter ids [R, m]; their parents [R, m] among the
# nodes that were opened before) -> their children, [R * m, .], or [R, .] for all of a tree
Ask = Callable[[int, Tensor, Tensor], Children]
_DEAD = -math.inf


class Grown(NamedTuple):
    """The trees of R sequences, at most n nodes each."""

    tokens: Tensor  # [R, n] int64 drafter ids
    parents: Tensor  # [R, n] int64, -1 below the root
    scores: Tensor  # [R, n] float64, log-probability of the path
    counts: Tensor  # [R] int64, number of nodes; later entries are padding
    proposals: Tensor | None  # [R, n, d] float32, q of sampled chains


class _Level(NamedTuple):
    """A depth of the trees: the candidates below its opened nodes, and which are opened next.

    The tensors are those of a fixed shape; None where scores decide.
    """

    width: int  # children per opened node
    candidates: int  # of all opened nodes
    taken: Tensor | None  # [c] int64, opened node * width + rank of each candidate
    nodes: Tensor | None  # [c] int64, opened node of each candidate
    opened: Tensor | None  # [m] int64, the candidates that are opened next


class TensorGrowth:
    """The growth of a spec's trees.

    Args:
        spec: `TensorGrowth.serves` it. vocabulary: d. max_depth: the deepest node that the drafter
            can predict; None for any.

    Attributes:
        opens: number of nodes that are opened at depths 1, 2, ... per tree. nodes: most of a tree.
        parents: of each node, where they are known beforehand; None where they depend on scores.
    """

    def __init__(
        self,
        spec: TreeSpec,
        vocabulary: int,
        max_depth: int | None,
        device: torch.device,
    ):
        self.spec = spec
        self.device = device
        self.depth = spec.depth
        if max_depth:
            self.depth = min(spec.depth, max_depth)
        self.floor = spec.floor if spec.floor > -math.inf else None
        self.levels: list[_Level] = []
        self.opens: list[int] = []
        self.parents: list[int] = []
        dynamic = spec.shape == "dynamic"
        if dynamic:
            total = self._plan_dynamic(vocabulary)
        else:
            total = self._plan_fixed(vocabulary)
        self.nodes = min(total, spec.budget)
        self.fixed = not dynamic and self.floor is None

    def _plan_dynamic(self, vocabulary: int) -> int:
        """Lists the levels of a dynamic tree; returns the number of all candidates."""
        width = min(self.spec.top_k, vocabulary)
        count = 1  # opened nodes
        total = 0
        for depth in range(self.depth):
            made = count * width
            self.levels.append(_Level(width, made, None, None, None))
            total += made
            count = min(self.spec.top_k, made)
            if depth + 1 < self.depth:
                self.opens.append(count)
        return total

    def _plan_fixed(self, vocabulary: int) -> int:
        """Lists the levels of a tree whose shape is known; returns the number of its nodes."""
        level: list[tuple[int, tuple[int, ...]]] = [(-1, ())]  # opened nodes: number and path
        total = 0
        for depth in range(self.depth):
            wanted = [self._ranks(path) for _, path in level]
            width = min(1 + max(map(max, wanted)), vocabulary)
            # Per candidate: its place in [opened nodes, width], its opened node, its path.
            taken = []
            nodes = []
            paths = []
            for i, (number, path) in enumerate(level):
                for rank in wanted[i]:
                    if rank < width:
                        taken.append(i * width + rank)
                        nodes.append(i)
                        paths.append((*path, rank))
                        self.parents.append(number)
            opened = []  # candidates with children
            if depth + 1 < self.depth:
                opened = [i for i, path in enumerate(paths) if self._ranks(path)]
            self.levels.append(
                _Level(
                    width,
                    len(taken),
                    torch.tensor(taken, device=self.device),
                    torch.tensor(nodes, device=self.device),
                    torch.tensor(opened, device=self.device),
                )
            )
            level = [(total + i, paths[i]) for i in opened]
            total += len(taken)
            if not opened:
                break
            self.opens.append(len(opened))
        return total

    @staticmethod
    def serves(spec: TreeSpec) -> bool:
        """Whether all shapes follow from the spec, as in greedy trees and drawn chains."""
        if spec.sampled:
            return spec.shape == "chain" and spec.stop == 0
        return spec.shape != "none"

    def _ranks(self, path: tuple[int, ...]) -> range | list[int]:
        """Ranks of a node's children."""
        if self.spec.shape == "paths":
            return ranks_below(self.spec.paths).get(path, [])
        return range(self.spec.fanout[len(path)])

    def grow(
        self,
        first: Children,
        ask: Ask,
        params: SamplingParams | None = None,
        uniforms: Tensor | None = None,
    ) -> Grown:
        """Grows R trees.

        Args:
            first: of the roots' children, [R, .].
            params, uniforms: for sampled chains: the distribution, and a number [R, depth] float64
                per token.
        """
        children = first
        rows = len(first.scores)
        # Score and number of each opened node, [R, m].
        above = torch.zeros(rows, 1, dtype=torch.float64, device=self.device)
        numbers = torch.full((rows, 1), -1, device=self.device)
        # Of all candidates, per depth [R, c].
        all_tokens = []
        all_scores = []
        all_parents = []
        proposals = []
        begin = 0  # number of the level's first candidate
        for depth, level in enumerate(self.levels):
            # The children of the opened nodes, [R, m, width].
            if uniforms is not None and params is not None:
                tokens, values, q = _drawn(children, params, uniforms[:, depth])
                proposals.append(q)
            else:
                values, tokens = _top(children, level.width, above)
            tokens, scores, parents = _candidates(level, tokens, values, above, numbers)
            all_tokens.append(tokens)
            all_scores.append(scores)
            all_parents.append(parents)
            if depth == len(self.opens):
                break

            # The nodes to open next, and their children.
            chosen, above = self._choose(level, scores, self.opens[depth])
            numbers = chosen + begin
            # The parents [R, m] of candidates among the opened nodes.
            above_nodes = chosen // level.width if level.nodes is None else level.nodes[chosen]
            begin += level.candidates
            children = ask(depth + 1, tokens.gather(1, chosen), above_nodes)
        return self._finish(
            torch.cat(all_tokens, dim=1),
            torch.cat(all_scores, dim=1),
            torch.cat(all_parents, dim=1),
            proposals,
        )

    def _choose(
        self,
        level: _Level,
        scores: Tensor,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        """The nodes to open of a level's candidates, ascending [R, m], and their scores."""
        if self.floor is None:
            live = scores
        else:
            live = scores.masked_fill(scores < self.floor, _DEAD)
        if level.opened is not None:
            chosen = level.opened.expand(len(scores), -1)
        else:
            # Stable sorts, so that equal scores keep their order, as on the host.
            best = live.sort(
                dim=1,
                descending=True,
                stable=True,
            ).indices
            chosen = best[:, :count].sort(dim=1).values
        return chosen, live.gather(1, chosen)

    def _finish(
        self,
        tokens: Tensor,
        scores: Tensor,
        parents: Tensor,
        proposals: list[Tensor],
    ) -> Grown:
        """The likeliest nodes of all candidates [R, c], in the candidates' order."""
        rows, total = tokens.shape
        q = None
        if proposals:
            q = torch.stack(proposals, dim=1)  # [R, n, d]
        if self.fixed or (self.floor is None and total <= self.nodes):
            counts = torch.full((rows,), total, device=self.device)
            return Grown(tokens, parents, scores, counts, q)

        best = scores.sort(
            dim=1,
            descending=True,
            stable=True,
        )
        live = best.values[:, : self.nodes] > _DEAD  # [R, n] bool
        counts = live.sum(dim=1)
        # [R, n] candidates in their order; dead ones come last, as padding
        kept = best.indices[:, : self.nodes].masked_fill(~live, total)
        kept = kept.sort(dim=1).values.clamp(max=total - 1)

        # The place of each candidate among the nodes. The last column stands for the root, and
        # takes the padding.
        place = torch.full((rows, total + 1), -1, device=self.device)
        order = torch.arange(self.nodes, device=self.device).expand(rows, -1)
        used = order < counts[:, None]  # [R, n]
        place.scatter_(1, torch.where(used, kept, total), torch.where(used, order, -1))
        above = parents.gather(1, kept)
        above = place.gather(1, above.masked_fill(above < 0, total))
        return Grown(tokens.gather(1, kept), above, scores.gather(1, kept), counts, q)


def _top(children: Children, width: int, above: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (times confidences) and drafter ids of the likeliest children.

    Both [R, m, width], of the nodes of `above` [R, m].
    """
    assert children.logits is not None, "all logits were asked for"
    values, ids = top_log_probs(children.logits, width)
    rows, count = above.shape
    values = children.trusted(values).double().unflatten(0, (rows, -1)).expand(-1, count, -1)
    return values, ids.unflatten(0, (rows, -1)).expand(-1, count, -1)


def _drawn(
    children: Children,
    params: SamplingParams,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws a chain's next token: ids and log-probabilities [R, 1, 1], and q [R, d]."""
    assert children.logits is not None
    q = probabilities(children.logits, params)  # [R, d]
    tokens = pick(q, uniforms)[:, None]  # [R, 1]
    values = children.trusted(q.gather(1, tokens).log())
    return tokens[:, None], values.double()[:, None], q


def _candidates(
    level: _Level,
    tokens: Tensor,
    values: Tensor,
    above: Tensor,
    numbers: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, scores and parents [R, c] of a level's candidates, those taken of [R, m, width]."""
    scores = (above[:, :, None] + values).flatten(1)
    parents = numbers[:, :, None].expand_as(tokens).flatten(1)
    tokens = tokens.flatten(1)
    # All children are taken, or a fixed tree's selection of them.
    if level.taken is None or level.candidates == tokens.shape[1]:
        return tokens, scores, parents
    return tokens[:, level.taken], scores[:, level.taken], parents[:, level.taken]
