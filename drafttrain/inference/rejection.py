"""How the target chooses the next token at a node: drawn from p, or by trying drawn children."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.batch import Proposal, TokenTree
from drafttrain.ops.sampling import SamplingParams, pick, probabilities


class Choice(NamedTuple):
    """A node at which the target chooses the next token, and the random numbers that this takes.

    Attributes:
        tree: of the node.
        drawn: the node's children that were drawn from q, in the order of drawing.
        numbers: uniform in [0, 1): one for the token itself, then one per drawn child.
    """

    tree: TokenTree
    drawn: Sequence[int]
    numbers: list[float]


def choose(
    choices: Sequence[Choice],
    logits: Tensor,
    sampling: SamplingParams,
) -> Tensor:
    """The token [m] of each choice, distributed as p, so that drawn children are likely.

    A choice depends on its own numbers alone. Nothing here waits for the device.

    Args:
        logits: [m, v], a row per choice.
    """
    p = probabilities(logits, sampling).double()  # [m, v]
    device = p.device
    tried = [i for i, choice in enumerate(choices) if choice.drawn]
    if tried:
        width = max(len(choices[i].drawn) for i in tried)
        places: list[int] = []  # per row of `below` the children, counted among all trees' tokens
        uniforms: list[list[float]] = []
        tokens: list[Tensor] = []
        sources: list[tuple[Proposal, int]] = []  # the row of q that the children were drawn from
        begin = 0  # tokens of earlier trees
        for i in tried:
            tree, drawn, numbers = choices[i]
            assert tree.proposal is not None
            missing = width - len(drawn)  # children fewer than the widest row has
            places += [begin + child for child in drawn] + [-1] * missing
            uniforms.append(numbers[1:] + [0.0] * missing)
            tokens.append(tree.tokens)
            # All children of a node were drawn from the same row of q.
            sources.append((tree.proposal, tree.proposal.rows[drawn[0]]))
            begin += len(tree)
        uploaded = torch.tensor(tried + places).to(device, non_blocking=True)  # one transfer
        at, below = uploaded.split([len(tried), len(places)])
        below = below.view(-1, width)
        every = torch.cat(tokens)  # tokens of all tried trees
        children = every[below.clamp_min(0)].masked_fill(below < 0, -1)  # [r, w]
        given = torch.tensor(uniforms, dtype=torch.float64).to(device, non_blocking=True)
        q = _proposed(sources, p.shape[1])  # [r, v]
        p[at] = try_drawn(p[at], q, children, given)
    chosen = torch.tensor([choice.numbers[0] for choice in choices], dtype=torch.float64)
    return pick(p, chosen.to(device, non_blocking=True))


def _proposed(sources: Sequence[tuple[Proposal, int]], v: int) -> Tensor:
    """[r, v] float64: one row of each proposal, over the target's vocabulary."""
    parts = []
    # Proposals of one vocabulary, mostly all of them, are joined at once.
    for _, alike in groupby(sources, key=lambda source: id(source[0].kept_ids)):
        group = list(alike)
        q = torch.stack([proposal.probs[row] for proposal, row in group])  # [k, d]
        kept = group[0][0].kept_ids
        if kept is None:
            # Ids are the target's own; its vocabulary may be padded.
            q = F.pad(q, (0, v - q.shape[1]))
        else:
            q = q.new_zeros(len(q), v).index_copy_(1, kept, q)
        parts.append(q)
    return torch.cat(parts).double()


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
        q = q.scatter(-1, child, 0.0)  # drawn without replacement
        open_ = open_ & ~accepted
    return p
