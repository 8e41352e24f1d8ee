"""Blocks whose logits are corrected by the path before, with a product of low rank.

    logits at depth k below token y  =  head(block state at k) + correction(bend(block state at k, y, the path's state))

A `MarkovBlock` bends a row of `markov_in` per token y; its correction is `markov_out`.

The block's pass still happens once; a node costs one such product. It makes the children of
siblings differ: a block alone may draft "New of" from "New York" and "bank of". The last row of
`markov_in` stands for committed tokens outside the drafter's vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafttrain.drafters.common.block import BlockDrafter, Paths
from drafttrain.drafters.common.configs import BlockConfig
from drafttrain.drafters.common.tree_growth import Children
from drafttrain.losses import Aligned, linear_divergence
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


class CorrectedBlock(BlockDrafter):
    """The block-parallel backbone with a correction.

    A kind defines `bend`, which training and decoding share, and `correction` [d, r].
    """

    corrected = True

    @property
    def correction(self) -> nn.Linear:
        raise NotImplementedError

    def bend(self, at: Paths) -> tuple[Tensor, Tensor | None]:
        """Input of `correction` [n, r], and the states of the paths up to the parents."""
        raise NotImplementedError

    def readout_of_blocks(
        self,
        reads: Tensor,
        ids: Tensor,
        roots: Tensor,
        live: Tensor,
    ) -> tuple[Tensor, Tensor]:
        block = reads.new_zeros(*live.shape, reads.shape[1])  # [m, depth, h]
        block[live] = reads
        states = self.first_states(len(live))
        bent = []
        for depth, read in enumerate(block.unbind(1)):
            # The data's tokens stand for drafted ones. Behind the last text there are none, nor
            # predictions that count.
            parents = ids[(roots + depth).clamp(max=len(ids) - 1)]
            each, states = self.bend(Paths(read, parents, depth, states))
            bent.append(each)
        # Both products in one: [d, h + r], and [t, h + r] below.
        head = torch.cat((self.head.weight.to(reads.dtype), self.correction.weight), dim=1)
        return torch.cat((reads, torch.stack(bent, dim=1)[live]), dim=-1), head

    def own_loss(self, hidden: Tensor, aligned: Aligned) -> Tensor:
        """The block's own loss, without the correction; hidden: as of `other_loss`."""
        reads = hidden[:, : self.config.hidden_size]  # the rest is the correction's
        head = self.head.weight.to(reads.dtype)
        return linear_divergence(reads, head, *aligned, self.config.loss).loss

    def conditional(self, logits: Tensor, at: Paths) -> tuple[Children, Tensor | None]:
        bent, states = self.bend(at)
        return Children(logits + self.correction(bent).to(logits.dtype)), states


class MarkovBlock(CorrectedBlock):
    """The block-parallel backbone with the correction.

    A kind sets the scale of `markov_in` and calls `post_init`.
    """

    config: MarkovConfig

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

    @property
    def correction(self) -> nn.Linear:
        return self.markov_out

    def bend(self, at: Paths) -> tuple[Tensor, Tensor | None]:
        return self.embedded(at.parents), at.states
