"""Which drafted tokens the target would have produced itself.

Both rules walk from the root: the target chooses the next token, and if a child carries it the walk goes on from that
child, else the token is the bonus that ends the round. Greedy: the choice is the argmax. Sampled: the choice is a draw
from the target's distribution p.

Why the draw is speculative sampling. Children of a deterministic tree are one-hot proposals. Speculative sampling
(Leviathan et al. 2023, arXiv 2211.17192; several candidates: Miao et al. 2024, arXiv 2305.09781) tries them in turn:
accept x1 with probability p(x1), else remove x1 and renormalise, accept x2 with probability p(x2) / (1 - p(x1)), ...,
and if none is accepted sample the residual. Child x_i is thus accepted with probability p(x_i), and a token outside the
children comes out with its own p(x): exactly what one draw from p gives. The draw costs one number per token, and it
spends the generator's numbers as plain decoding does, so that a seed gives the same text with any drafter and tree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.ops.sampling import SamplingParams, draw, probabilities


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


def verify_greedy(tree: TokenTree, logits: Tensor, eos_ids: Collection[int]) -> Verdict:
    """Accepts the path whose every token is the target's argmax.

    Args:
        tree: n nodes.
        logits: [n+1, v], the target's at the root and at each node.
        eos_ids: tokens that end the sequence, also inside the path.
    """
    numbers = torch.cat((logits.argmax(dim=-1), tree.tokens)).tolist()
    choices, drafted = numbers[: len(tree) + 1], numbers[len(tree) + 1 :]
    return _walk(tree, drafted, lambda row: choices[row], eos_ids)


def verify_sampled(
    tree: TokenTree, logits: Tensor, eos_ids: Collection[int], sampling: SamplingParams, generator: torch.Generator
) -> Verdict:
    """Accepts a path so that the committed tokens are distributed exactly as the target's own samples.

    Args: as `verify_greedy`; distributions are formed only for the rows that the walk visits.
    """
    drafted = tree.tokens.tolist()
    return _walk(tree, drafted, lambda row: int(draw(probabilities(logits[row], sampling), generator)), eos_ids)


def _walk(tree: TokenTree, drafted: list[int], choose: Callable[[int], int], eos_ids: Collection[int]) -> Verdict:
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, drafted, strict=True))}
    path: list[int] = []
    tokens: list[int] = []
    node: int | None = -1
    while node is not None:
        token = choose(node + 1)
        tokens.append(token)
        node = children.get((node, token))
        if node is not None:
            path.append(node)
        if token in eos_ids:
            return Verdict(path, tokens, True)
    return Verdict(path, tokens, False)
