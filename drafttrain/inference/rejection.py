"""Sampled verification without a walk on the host: rejection of drawn children, choices ahead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.ops.sampling import SamplingParams, pick, probabilities


def choices_ahead(
    generators: Sequence[torch.Generator],
    trees: Sequence[TokenTree],
    drawn_below: Sequence[dict[int, list[int]]],
    logits: Tensor,
    sampling: SamplingParams,
) -> Tensor:
    """The token [N] that a walk would choose at each node, from the numbers that it would spend
    there.

    A walk spends a number at each node that it visits and one more per drawn child, so a node's
    numbers begin behind those of its ancestors. The generators' states do not change.

    Args:
        generators: each sequence's.
        drawn_below: each tree's drawn children, by node.
        logits: [N, v] at roots and nodes.
    """
    device = logits.device
    p = probabilities(logits, sampling).double()  # [N, v]
    numbers: list[float] = []  # per node, for its choice
    # Per node with drawn children:
    tried: list[int] = []  # its index among all roots and nodes
    sources: list[int] = []  # the row of its q among those of all proposals
    below: list[list[int]] = []  # its children's indices among all drafted tokens
    uniforms: list[list[float]] = []  # a number for each child
    drafted = 0  # tokens of earlier trees
    rows_before = 0  # rows of earlier proposals
    for generator, tree, drawn in zip(generators, trees, drawn_below, strict=True):
        # Where each node's numbers begin, the root first; the last of them bound what is drawn.
        begins = [0]
        for parent in tree.parents:
            begins.append(begins[parent + 1] + 1 + len(drawn.get(parent, ())))
        most = 0
        for node, begin in enumerate(begins, -1):
            most = max(most, begin + 1 + len(drawn.get(node, ())))
        state = generator.get_state()
        drawing = torch.rand(most, dtype=torch.float64, generator=generator).tolist()
        generator.set_state(state)

        for node, begin in enumerate(begins, -1):
            own = drawn.get(node)
            if own and tree.proposal is not None:
                tried.append(len(numbers))
                sources.append(rows_before + tree.proposal.rows[own[0]])
                below.append([drafted + child for child in own])
                uniforms.append(drawing[begin + 1 : begin + 1 + len(own)])
            numbers.append(drawing[begin])
        if tree.proposal is not None:
            rows_before += len(tree.proposal.probs)
        drafted += len(tree)

    if tried:
        width = max(len(own) for own in below)
        flat = tried + sources  # one upload
        for own, spent in zip(below, uniforms, strict=True):
            missing = width - len(own)
            flat += own + [-1] * missing
            spent += [0.0] * missing
        places = torch.tensor(flat).to(device, non_blocking=True)
        at, rows, children = places.split([len(tried), len(tried), len(tried) * width])
        tokens = torch.cat([tree.tokens for tree in trees])
        children = children.view(-1, width)
        children = tokens[children.clamp_min(0)].masked_fill(children < 0, -1)  # [m, w]
        proposals = [tree.proposal for tree in trees if tree.proposal is not None]
        q = torch.cat([proposal.probs for proposal in proposals])[rows]  # [m, d]
        kept = proposals[0].kept_ids
        if kept is not None:
            q = q.new_zeros(len(q), p.shape[1]).index_copy_(1, kept, q)
        q = F.pad(q, (0, p.shape[1] - q.shape[1])).double()  # [m, v]
        given = torch.tensor(uniforms, dtype=torch.float64).to(device, non_blocking=True)
        p[at] = try_drawn(p[at], q, children, given)
    chosen = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
    return pick(p, chosen)


def try_drawn(
    p: Tensor,
    q: Tensor,
    drawn: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """Multi-round rejection of children that were drawn without replacement.

    Child x is accepted with probability min(1, p(x) / q(x)). A rejection leaves p <- norm(max(p -
    q, 0)), the residual that the accepted share min(p, q) leaves of p, and q <- q without x,
    renormalized, from which the next child was drawn. Every round is the same problem again, so by
    induction the outcome is distributed as p.

    Args:
        p: [m, v] float64, the target's distributions.
        q: [m, v] float64, proposal distribution of each row's first child.
        drawn: [m, w] int64, children's tokens in the order they were drawn, then -1.
        uniforms: [m, w] float64.

    Returns:
        [m, v] float64: all mass on the accepted child, or the residual from which the bonus token
            is drawn.

    Source: SpecInfer, arXiv 2305.09781; without replacement: arXiv 2402.14160 and Sequoia, arXiv
    2402.12374.
    """
    p = p / p.sum(-1, keepdim=True)
    # [m, 1] bool, rows where every child so far was rejected
    open_ = torch.ones_like(drawn[:, :1], dtype=torch.bool)
    for i in range(drawn.shape[1]):
        open_ = open_ & (drawn[:, i : i + 1] >= 0)
        child = drawn[:, i : i + 1].clamp_min(0)  # [m, 1]
        uniform = uniforms[:, i : i + 1]  # [m, 1]
        mass = q.sum(-1, keepdim=True)
        # uniform < p(x) / (q(x) / mass), without a division
        accepted = open_ & (uniform * q.gather(-1, child) < p.gather(-1, child) * mass)
        left = (p - q / mass).clamp_min(0)  # [m, v]
        total = left.sum(-1, keepdim=True)
        # An empty residual means p = q. Then only rounding can reject, and p itself is the answer.
        p = torch.where(open_ & ~accepted & (total > 0), left / total, p)
        p = torch.where(
            accepted,
            torch.zeros_like(p).scatter_(-1, child, 1.0),
            p,
        )
        q = q.scatter(-1, child, 0.0)
        open_ = open_ & ~accepted
    return p
