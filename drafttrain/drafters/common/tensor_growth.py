"""Trees that grow on a device: `GrowingTree` as functions of tensors of fixed shapes, which a CUDA
graph can hold.

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

from drafttrain.drafters.common.tree_growth import Logits
from drafttrain.drafters.common.tree_spec import TreeSpec, ranks_below
from drafttrain.ops.sampling import SamplingParams, pick, probabilities, top_log_probs

# (depth of the nodes to open, from 1; their drafter ids [R, m]; their parents [R, m] among the nodes that were opened before) ->
# logits [R, m, d] of their children, or [R, 1, d] for all of them; perhaps with confidences [R, m]
Ask = Callable[[int, Tensor, Tensor], Logits]
_DEAD = -math.inf


class Grown(NamedTuple):
    """The trees of R sequences, at most n nodes each.

    Attributes:
        tokens: [R, n] int64 drafter ids. parents: [R, n] int64, -1 below the root. scores: [R, n]
            float64, log-probability of the path. counts: [R] int64 nodes; what follows them is no
            node. proposals: [R, n, d] float32, q of sampled chains.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    counts: Tensor
    proposals: Tensor | None


class _Level(NamedTuple):
    """A depth. Opened nodes have `width` children each. A fixed shape takes some, `taken` (opened
    node * width + rank), below the opened nodes `nodes`, and opens those in `opened` next.
    """

    width: int
    candidates: int
    taken: Tensor | None
    nodes: Tensor | None
    opened: Tensor | None


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
        self.spec, self.device, self.depth = spec, device, min(spec.depth, max_depth or spec.depth)
        self.floor = spec.floor if spec.floor > -math.inf else None
        self.levels: list[_Level] = []
        self.opens: list[int] = []
        dynamic = spec.shape == "dynamic"
        self.parents = list[int]()
        level: list[tuple[int, tuple[int, ...]]] = [
            (-1, ())
        ]  # candidates to open: their numbers and paths
        count = 1
        total = 0
        for depth in range(self.depth):
            wanted = [range(spec.top_k)] if dynamic else [self._ranks(path) for _, path in level]
            width = min(1 + max(map(max, wanted)), vocabulary)
            if dynamic:
                made = count * width
                opened = min(spec.top_k, count * width)
                self.levels.append(_Level(width, made, None, None, None))
            else:
                below = [
                    (i, rank) for i, ranks in enumerate(wanted) for rank in ranks if rank < width
                ]
                self.parents += [level[i][0] for i, _ in below]
                paths = [(*level[i][1], rank) for i, rank in below]
                more = [
                    i
                    for i, path in enumerate(paths)
                    if depth + 1 < self.depth and self._ranks(path)
                ]
                indices = [i * width + rank for i, rank in below], [i for i, _ in below], more
                self.levels.append(
                    _Level(
                        width,
                        len(below),
                        *(torch.tensor(part, device=device) for part in indices),
                    )
                )
                level = [(total + i, paths[i]) for i in more]
                made = len(below)
                opened = len(more)
            total += made
            count = opened
            if not opened or depth + 1 == self.depth:
                break
            self.opens.append(opened)
        self.total, self.nodes = total, min(total, spec.budget)
        self.fixed = not dynamic and self.floor is None

    @staticmethod
    def serves(spec: TreeSpec) -> bool:
        """Whether all shapes follow from the spec: of any tree by rule, and of drawn chains (a
        number per depth).
        """
        return spec.shape != "none" and not (
            spec.sampled and (spec.shape != "chain" or spec.stop > 0)
        )

    def _ranks(self, path: tuple[int, ...]) -> range | list[int]:
        if self.spec.shape == "paths":
            return ranks_below(self.spec.paths).get(path, [])
        return range(self.spec.fanout[len(path)])

    def grow(
        self,
        first: Logits,
        ask: Ask,
        params: SamplingParams | None = None,
        uniforms: Tensor | None = None,
    ) -> Grown:
        """Grows R trees.

        Args:
            first: logits [R, 1, d] of the roots' children, perhaps with confidences [R, 1].
            params, uniforms: for sampled chains: the distribution, and a number [R, depth] float64
                per token.
        """
        logits = first
        rows = len(first[0] if isinstance(first, tuple) else first)
        above = torch.zeros(
            rows,
            1,
            dtype=torch.float64,
            device=self.device,
        )  # score of each opened node
        numbers = torch.full((rows, 1), -1, device=self.device)  # which candidate it is
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        begin = 0
        proposals = []
        for depth, level in enumerate(self.levels):
            if uniforms is not None and params is not None:
                tokens, values, q = _drawn(logits, params, uniforms[:, depth])
                proposals.append(q)
            else:
                values, tokens = _top(logits, level.width, above.shape[1])  # [R, m, width]
            tokens, scores, parents = _candidates(level, tokens, values, above, numbers)
            parts.append((tokens, scores, parents))
            if depth == len(self.opens):
                break
            chosen, above = self._choose(level, scores, self.opens[depth])
            numbers = chosen + begin
            above_nodes = self._nodes_of(level, chosen)
            begin += level.candidates
            logits = ask(depth + 1, tokens.gather(1, chosen), above_nodes)
        made = [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]
        return self._finish(made[0], made[1], made[2], proposals)

    def _choose(self, level: _Level, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The nodes to open of a level's candidates, ascending [R, m], and their scores."""
        if self.floor is None:
            live = scores
        else:
            live = scores.masked_fill(scores < self.floor, _DEAD)
        if level.opened is not None:
            chosen = level.opened.expand(len(scores), -1)
        else:
            chosen = (
                live.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
            )
        return chosen, live.gather(1, chosen)

    @staticmethod
    def _nodes_of(level: _Level, chosen: Tensor) -> Tensor:
        """The parents [R, m] of candidates among the opened nodes."""
        if level.nodes is None:
            return chosen // level.width
        return level.nodes[chosen]

    def _finish(
        self,
        tokens: Tensor,
        scores: Tensor,
        parents: Tensor,
        proposals: list[Tensor],
    ) -> Grown:
        """The likeliest nodes of all candidates [R, c], in the candidates' order."""
        rows, total = tokens.shape
        if proposals:
            q = torch.stack(proposals, dim=1)
        else:
            q = None
        if self.fixed or (self.floor is None and total <= self.nodes):
            return Grown(tokens, parents, scores, torch.full((rows,), total, device=self.device), q)
        best = scores.sort(dim=1, descending=True, stable=True)
        live = best.values[:, : self.nodes] > _DEAD
        kept = best.indices[:, : self.nodes]
        kept = (
            kept.masked_fill(~live, total).sort(dim=1).values.clamp(max=total - 1)
        )  # what is no node comes last
        place = torch.full((rows, total + 1), -1, device=self.device)
        order = torch.arange(self.nodes, device=self.device).expand(rows, -1)
        counts = live.sum(dim=1)
        # The last column stands for the root, and takes what is no node.
        place.scatter_(
            1,
            torch.where(order < counts[:, None], kept, total),
            torch.where(order < counts[:, None], order, -1),
        )
        above = parents.gather(1, kept)
        above = place.gather(1, above.masked_fill(above < 0, total))
        return Grown(tokens.gather(1, kept), above, scores.gather(1, kept), counts, q)


def _top(logits: Logits, width: int, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities (times confidences) and drafter ids, [R, m, width] each, of the likeliest
    children of m nodes.
    """
    if isinstance(logits, tuple):
        logits, confidence = logits
    else:
        logits = logits
        confidence = None
    values, ids = (
        part.unflatten(0, logits.shape[:2]) for part in top_log_probs(logits.flatten(0, 1), width)
    )
    if confidence is None:
        values = values.double()
    else:
        values = (values + confidence.log()[:, :, None]).double()
    return values.expand(-1, count, -1), ids.expand(-1, count, -1)


def _drawn(
    logits: Logits,
    params: SamplingParams,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws a chain's next token: ids and log-probabilities [R, 1, 1], and q [R, d]."""
    if isinstance(logits, tuple):
        logits, confidence = logits
    else:
        logits = logits
        confidence = None
    q = probabilities(logits[:, 0], params)
    tokens = pick(q, uniforms)[:, None]
    values = q.gather(1, tokens).log()
    if confidence is not None:
        values = values + confidence.log()
    return tokens[:, None], values.double()[:, None], q


def _candidates(
    level: _Level,
    tokens: Tensor,
    values: Tensor,
    above: Tensor,
    numbers: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, scores and parents [R, c] of a level's candidates: the taken ones of [R, m, width]."""
    scores = above[:, :, None] + values
    parents = numbers[:, :, None].expand_as(tokens)
    tokens, scores, parents = (part.flatten(1) for part in (tokens, scores, parents))
    if level.taken is None or level.candidates == tokens.shape[1]:
        return tokens, scores, parents
    return tokens[:, level.taken], scores[:, level.taken], parents[:, level.taken]
