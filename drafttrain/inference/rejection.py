"""Sampled verification where the host does not walk: rejection of drawn children, and choices at
all nodes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

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
    numbers begin behind those of its ancestors. The generators stay where they are.

    Args:
        generators: each sequence's. drawn_below: each tree's drawn children, by node. logits: [N,
            v] at roots and nodes.
    """
    # [N, v]
    device = logits.device
    p = probabilities(logits, sampling).double()
    numbers: list[list[float]] = []  # per node: of the choice, then of its drawn children
    below: list[list[int]] = []  # per node: its drawn children's places among all drafted tokens
    sources: list[int] = []  # per node with drawn children: its q among all rows of all proposals
    begin = row = 0
    for generator, tree, drawn in zip(generators, trees, drawn_below, strict=True):
        begins = [0]
        for parent in tree.parents:
            begins.append(begins[parent + 1] + 1 + len(drawn.get(parent, ())))
        spent = [1 + len(drawn.get(node, ())) for node in range(-1, len(tree))]
        state = generator.get_state()
        most = max(at + count for at, count in zip(begins, spent, strict=True))
        drawing = torch.rand(most, dtype=torch.float64, generator=generator).tolist()
        generator.set_state(state)
        numbers += [drawing[at : at + count] for at, count in zip(begins, spent, strict=True)]
        nodes = [drawn.get(node, []) for node in range(-1, len(tree))]
        below += [[begin + child for child in own] for own in nodes]
        if tree.proposal is not None:
            sources += [row + tree.proposal.rows[own[0]] for own in nodes if own]
            row += len(tree.proposal.probs)
        begin += len(tree)
    tried = [i for i, own in enumerate(below) if own]
    if tried:
        width = max(map(len, below))
        padded = [[*below[i], *[-1] * (width - len(below[i]))] for i in tried]
        places = torch.tensor([*tried, *sources, *chain(*padded)]).to(device, non_blocking=True)
        at, rows, children = places.split([len(tried), len(tried), len(tried) * width])
        tokens = torch.cat([tree.tokens for tree in trees])
        children = children.view(-1, width)
        children = tokens[children.clamp_min(0)].masked_fill(children < 0, -1)  # [m, w]
        proposals = [tree.proposal for tree in trees if tree.proposal is not None]
        q = torch.cat([proposal.probs for proposal in proposals])[rows]  # [m, d]
        kept = proposals[0].kept_ids
        if kept is None:
            full = q
        else:
            full = q.new_zeros(len(q), p.shape[1]).index_copy_(1, kept, q)
        full = F.pad(full, (0, p.shape[1] - full.shape[1]))
        uniforms = [numbers[i][1:] + [0.0] * (width + 1 - len(numbers[i])) for i in tried]
        p[at] = try_drawn(
            p[at],
            full.double(),
            children,
            torch.tensor(uniforms, dtype=torch.float64).to(device, non_blocking=True),
        )
    return pick(
        p,
        torch.tensor([own[0] for own in numbers], dtype=torch.float64).to(
            device,
            non_blocking=True,
        ),
    )


def try_drawn(p: Tensor, q: Tensor, drawn: Tensor, uniforms: Tensor) -> Tensor:
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
    open_ = torch.ones_like(
        drawn[:, :1],
        dtype=torch.bool,
    )  # [m, 1], rows where every child so far was rejected
    for i in range(drawn.shape[1]):
        open_ = open_ & (drawn[:, i : i + 1] >= 0)
        child = drawn[:, i : i + 1].clamp_min(0)
        mass = q.sum(-1, keepdim=True)
        accepted = open_ & (
            uniforms[:, i : i + 1] * q.gather(-1, child) < p.gather(-1, child) * mass
        )
        left = (p - q / mass).clamp_min(0)  # [m, v]
        total = left.sum(-1, keepdim=True)
        # An empty residual means p = q. Then only rounding can reject, and p itself is the answer.
        p = torch.where(open_ & ~accepted & (total > 0), left / total, p)
        p = torch.where(accepted, torch.zeros_like(p).scatter_(-1, child, 1.0), p)
        q = q.scatter(-1, child, 0.0)
        open_ = open_ & ~accepted
    return p
