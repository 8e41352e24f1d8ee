"""Blocks whose logits are corrected by the token before, with a product of low rank.

    logits at depth k below token y  =  head(block state at k) + markov_out(markov_in[y] * gate(block state at k))

The block's pass still happens once; a node costs one such product. It makes the children of
siblings differ: a block alone may draft "New of" from "New York" and "bank of". The last row of
`markov_in` stands for committed tokens outside the drafter's vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafttrain.drafters.common.block import BlockDrafter
from drafttrain.drafters.common.configs import BlockConfig
from drafttrain.target import Target
from drafttrain.values import Count


class MarkovConfig(BlockConfig):
    """Config of a corrected block.

    Attributes:
        markov_rank: r of the correction; at most the hidden size.
        markov_all: `markov_in` has a row for each of the target's tokens, as published checkpoints
            do.
    """

    markov_rank: Count = 256
    markov_all: bool = False

    def check(self) -> None:
        super().check()
        self.markov_rank = min(self.markov_rank, self.hidden_size)


class MarkovBlock(BlockDrafter):
    """The block-parallel backbone with the correction.

    A kind sets the scale of `markov_in` and calls `post_init`.
    """

    config: MarkovConfig
    corrected = True

    def __init__(self, config: MarkovConfig):
        super().__init__(config)
        if config.markov_all:
            rows = config.vocab_size
        else:
            rows = config.draft_vocab_size + 1
        self.markov_in = nn.Embedding(rows, config.markov_rank)
        self.markov_out = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def bind(self, target: Target) -> None:
        """As the backbone; also builds own_ids [v], the row of `markov_in` of each target id."""
        super().bind(target)
        self.own_ids = self.markov_rows().to(target.device)

    def markov_rows(self) -> Tensor:
        """[v] int64, the row of `markov_in` of each target id."""
        v = self.config.vocab_size
        if self.config.markov_all:
            return torch.arange(v)
        kept = self.kept_ids.cpu()
        rows = torch.full((v,), len(kept))  # tokens that are not kept share the last row
        rows[kept] = torch.arange(len(kept))
        return rows

    def file_rows(self) -> Tensor:
        """[tokens of a file] int64, the row of `markov_in` of each token in an engine's file."""
        rows = self.markov_rows()
        if self.mask is None:
            return rows
        # A file has a learned mask as a further token. It is never the token before: any row fits.
        return torch.cat((rows, torch.tensor([len(self.markov_in.weight) - 1])))

    def embedded(self, parents: Tensor) -> Tensor:
        """[t] int64 target ids -> [t, r], their rows of `markov_in`."""
        return self.markov_in(self.own_ids[parents])

    def corrections(self, reads: Tensor, parents: Tensor) -> Tensor:
        """Input of `markov_out`, [t, r].

        Args:
            reads: [t, h] block states. parents: [t] int64 target ids, the tokens before.
        """
        return self.embedded(parents)

    def joined(self, reads: Tensor, corrections: Tensor) -> tuple[Tensor, Tensor]:
        """Both products in one: [t, h] and [t, r] -> [t, h + r], and the rows [d, h + r]."""
        head = torch.cat((self.head.weight.to(reads.dtype), self.markov_out.weight), dim=1)
        return torch.cat((reads, corrections), dim=-1), head

    def readout(self, reads: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        return self.joined(reads, self.corrections(reads, parents))
