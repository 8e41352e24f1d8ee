"""Which drafted tokens the target would have produced itself.

The walk starts at the root. At each node the target chooses the next token; if a child carries it the walk goes on from
that child, else the token is the bonus that ends the round. Greedy: the choice is the argmax. Sampled: the choice is
distributed as the target's p, by one of two rules, whichever fits how the children came about.

Children chosen by a rule (the drafter's likeliest, a match): the choice is a draw from p. This is speculative sampling
with one-hot proposals (Leviathan et al. 2023, arXiv 2211.17192): accept x1 with probability p(x1), else remove x1 and
renormalise, accept x2 with probability p(x2) / (1 - p(x1)), ..., and if none is accepted sample the residual. Child x_i is
thus accepted with probability p(x_i), and a token outside the children comes out with its own p(x): exactly what one draw
from p gives. It spends the generator's numbers as plain decoding does, so a seed gives the same text with any such tree.

Children drawn from the drafter's q (`TokenTree.proposal`): multi-round rejection, see `try_drawn`. With one child it
accepts with probability sum_x min(p(x), q(x)), where one draw from p would hit the child with sum_x p(x) q(x) only.

A node may have both (a match merged into a drawn tree): the drawn ones are tried first, and where all are rejected the
token is drawn from what is left of p, and compared with the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.ops.sampling import Sampler, SamplingParams, argmax, argmax_at, penalise, pick, probabilities


@dataclass
class Verdict:
    """The outcome of a round.

    Attributes:
        path: accepted node indices, from the root down.
        tokens: what the round commits: the path's tokens and, unless the path ends in EOS, the bonus token.
        ended: the last token is EOS.
    """

    path: list[int]
    tokens: list[int]
    ended: bool


class Verifier:
    """Judges the rounds of one sequence, the prefill's first token (an empty tree) included.

    Args:
        sampling: how the target chooses.
        eos_ids: tokens that end the sequence, also inside a path.
        generator: the sequence's own, on the CPU; its output then does not depend on what shares a batch with it.
        prompt: [L] int64, what the repetition penalty knows at the start. What the rounds commit it learns by itself.

    Attributes:
        sampler: what a drafter that draws its tokens needs; it shares the generator.
    """

    def __init__(self, sampling: SamplingParams, eos_ids: Collection[int], generator: torch.Generator, prompt: Tensor):
        self.sampler = Sampler(sampling, generator)
        self.eos_ids = eos_ids
        self.prompt = prompt
        self._seen: Tensor | None = None

    def seen(self, vocab_size: int) -> Tensor:
        """[v] bool, the tokens that stand in the text so far."""
        if self._seen is None:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=self.prompt.device)
            self._seen[self.prompt[self.prompt < vocab_size]] = True
        return self._seen

    def verify(self, tree: TokenTree, logits: Tensor) -> Verdict:
        """Accepts a path of the tree.

        Args:
            tree: n nodes.
            logits: [n+1, v], the target's at the root and at each node.
        """
        return verify_batch([self], [tree], logits)[0]


def verify_batch(
    verifiers: Sequence[Verifier], trees: Sequence[TokenTree], logits: Tensor, choices: Tensor | None = None
) -> list[Verdict]:
    """Verifies the trees of many sequences in lockstep, one depth at a time.

    Args:
        verifiers: one per sequence, all with the same sampling.
        trees: one per sequence.
        logits: [N, v], each sequence's root and nodes in turn: N is the sum of len(tree) + 1.
        choices: [N] int64, the logits' `argmax` where it is known already.
    """
    sampling = verifiers[0].sampler.params
    assert all(verifier.sampler.params == sampling for verifier in verifiers)
    starts = [0, *accumulate(len(tree) + 1 for tree in trees)]
    plain = sampling.greedy and sampling.repetition_penalty == 1
    # From a device all nodes' choices come over in one transfer, with the tokens. On a CPU they are looked for where a walk
    # comes by: most of a tree's nodes are on no path.
    if plain and choices is None and not logits.is_cpu:
        choices = argmax(logits)
    known = [choices] if plain and choices is not None else []
    parts = known + [tree.tokens for tree in trees if len(tree)]
    numbers = (parts[0] if len(parts) == 1 else torch.cat(parts)).tolist() if parts else []
    drafted = numbers[starts[-1] :] if known else numbers
    walks = []
    for i, (verifier, tree) in enumerate(zip(verifiers, trees, strict=True)):
        walks.append(_Walk(verifier, tree, drafted[starts[i] - i : starts[i + 1] - i - 1], starts[i]))
    going = walks
    while going:
        rows = [walk.start + 1 + walk.node for walk in going]
        if known:
            tokens = [numbers[row] for row in rows]
        else:
            tokens = argmax_at(logits, rows) if plain else _choose(going, logits[rows], sampling)
        for walk, token in zip(going, tokens, strict=True):
            walk.take(token)
        going = [walk for walk in going if walk.going]
    return [Verdict(walk.path, walk.tokens, walk.ended) for walk in walks]


class _Walk:
    """One sequence's way down its tree."""

    def __init__(self, verifier: Verifier, tree: TokenTree, drafted: list[int], start: int):
        self.verifier, self.tree, self.drafted, self.start = verifier, tree, drafted, start
        offered = len(tree) - tree.probes
        pairs = zip(tree.parents[:offered], drafted[:offered], strict=True)
        self.children = {key: node for node, key in enumerate(pairs)}
        self.drawn: dict[int, list[int]] = {}
        for node, row in enumerate(tree.proposal.rows if tree.proposal is not None else ()):
            if row >= 0:
                self.drawn.setdefault(tree.parents[node], []).append(node)
        self.path: list[int] = []
        self.tokens: list[int] = []
        self.node, self.going, self.ended = -1, True, False

    def take(self, token: int) -> None:
        """The target has chosen: to the child with this token, or the end."""
        self.tokens.append(token)
        self.ended = token in self.verifier.eos_ids
        node = self.children.get((self.node, token))
        if node is not None:
            self.path.append(node)
            self.node = node
        self.going = node is not None and not self.ended


def _choose(walks: list[_Walk], logits: Tensor, sampling: SamplingParams) -> list[int]:
    """The next token of each walk; logits [m, v], those at the nodes they have reached."""
    seen: list[Tensor] = []
    if sampling.repetition_penalty != 1:
        seen = [walk.verifier.seen(logits.shape[-1]) for walk in walks]
        logits = penalise(logits, torch.stack(seen), sampling.repetition_penalty)
    tokens = argmax(logits) if sampling.greedy else _sample(walks, probabilities(logits, sampling).double())
    for mask, token in zip(seen, tokens, strict=False):
        mask[token] = True  # what a walk has chosen is exactly the path that its next node adds to the text
    return tokens.tolist()


def _sample(walks: list[_Walk], p: Tensor) -> Tensor:
    """Tokens [m] distributed as p [m, v] float64, so that drawn children are likely among them.

    Each walk spends as many random numbers as its own children need, whatever its neighbours need.
    """
    drawn = [walk.drawn.get(walk.node, []) for walk in walks]
    numbers = [
        torch.rand(1 + len(nodes), dtype=torch.float64, generator=walk.verifier.sampler.generator).tolist()
        for walk, nodes in zip(walks, drawn, strict=True)
    ]
    tried = [i for i, nodes in enumerate(drawn) if nodes]
    if tried:
        width = max(map(len, drawn))
        q = torch.zeros(len(tried), p.shape[-1], device=p.device)
        for row, i in zip(q, tried, strict=True):
            proposal = walks[i].tree.proposal
            assert proposal is not None
            probs = proposal.probs[proposal.rows[drawn[i][0]]]
            row[slice(len(probs)) if proposal.kept_ids is None else proposal.kept_ids] = probs
        tokens = [[walks[i].drafted[node] for node in drawn[i]] + [-1] * (width - len(drawn[i])) for i in tried]
        uniforms = [numbers[i][1:] + [0.0] * (width - len(drawn[i])) for i in tried]
        p[tried] = try_drawn(
            p[tried],
            q.double(),
            torch.tensor(tokens, device=p.device),
            torch.tensor(uniforms, dtype=torch.float64, device=p.device),
        )
    return pick(p, torch.tensor([row[0] for row in numbers], dtype=torch.float64, device=p.device))


def try_drawn(p: Tensor, q: Tensor, drawn: Tensor, uniforms: Tensor) -> Tensor:
    """Multi-round rejection of children that were drawn without replacement.

    Child x is accepted with probability min(1, p(x) / q(x)). Rejected, it leaves p <- norm(max(p - q, 0)), which is what
    the accepted share min(p, q) lacks of p, and q <- q without x, renormalised, which is what the next child was drawn
    from. So every round is the same problem again, and by induction the outcome is distributed as p.

    Args:
        p: [m, v] float64, the target's distributions.
        q: [m, v] float64, what each row's first child was drawn from.
        drawn: [m, w] int64, children's tokens in the order they were drawn, then -1.
        uniforms: [m, w] float64.

    Returns:
        [m, v] float64: all mass on the accepted child, or else what the bonus token is to be drawn from.

    Source: SpecInfer, arXiv 2305.09781; without replacement: arXiv 2402.14160 and Sequoia, arXiv 2402.12374.
    """
    p = p / p.sum(-1, keepdim=True)
    open_ = torch.ones_like(drawn[:, :1], dtype=torch.bool)
    for i in range(drawn.shape[1]):
        open_ = open_ & (drawn[:, i : i + 1] >= 0)
        child = drawn[:, i : i + 1].clamp_min(0)
        mass = q.sum(-1, keepdim=True)
        accepted = open_ & (uniforms[:, i : i + 1] * q.gather(-1, child) < p.gather(-1, child) * mass)
        left = (p - q / mass).clamp_min(0)
        total = left.sum(-1, keepdim=True)
        # Nothing left means p = q: then only rounding can reject, and p itself is the answer.
        p = torch.where(open_ & ~accepted & (total > 0), left / total, p)
        p = torch.where(accepted, torch.zeros_like(p).scatter_(-1, child, 1.0), p)
        q = q.scatter(-1, child, 0.0)
        open_ = open_ & ~accepted
    return p
