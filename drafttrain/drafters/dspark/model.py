"""DSpark: DFlash's block with a correction by the previous token and a confidence per prediction.

    logits at depth k below token y  =  head(block state at k) + V U[y]           U: [d+1, r], V: [d, r]
    confidence there                 =  sigmoid(w . (block state, U[y]))           an estimate of sum min(p, q)

The block's pass still happens once; the correction is a product of low rank per node. It makes the children of siblings
differ: a block alone may draft "New of" from "New York" and "bank of". The last row of U stands for committed tokens outside
the drafter's vocabulary. For `@stop` and dynamic trees a node's probability is confidence times q (see
common/tree_growth.py); what is drawn is drawn from q alone.

Source: DSpark; the loss is 0.1 CE + 0.9 L1(p, q) + BCE(confidence, acceptance), and L1 is twice the total variation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.drafters.common.block import BlockDrafter
from drafttrain.drafters.common.configs import BlockConfig
from drafttrain.drafters.common.tree_growth import Logits
from drafttrain.target import Target
from drafttrain.values import Count, PositiveAmount


class DSparkConfig(BlockConfig):
    """Config of a DSpark drafter.

    Attributes:
        markov_rank: r of the correction; at most the hidden size. confidence_weight: of the confidence's loss.
        markov_all: U has a row for each of the target's tokens, as published checkpoints do.
    """

    model_type = "drafttrain_dspark"
    recipe_keys = (*BlockConfig.recipe_keys, "confidence_weight")
    loss: str = "0.1*ce+1.8*tv"
    markov_rank: Count = 256
    markov_all: bool = False
    confidence_weight: PositiveAmount = 1.0

    def check(self) -> None:
        super().check()
        self.markov_rank = min(self.markov_rank, self.hidden_size)


class DSpark(BlockDrafter):
    """A DSpark drafter: the block-parallel backbone with both heads."""

    config_class = DSparkConfig
    kind = "dspark"
    measures = ("confidence",)
    config: DSparkConfig

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        rank = config.markov_rank
        rows = config.vocab_size if config.markov_all else config.draft_vocab_size + 1
        self.markov_in = nn.Embedding(rows, rank)
        self.markov_out = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.confidence = nn.Linear(config.hidden_size + rank, 1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.01)  # the correction starts near zero

    def bind(self, target: Target) -> None:
        """As the backbone; also builds own_ids [v], the row of U of each target id."""
        super().bind(target)
        self.own_ids = self.markov_rows().to(target.device)

    def markov_rows(self) -> Tensor:
        """[v] int64, the row of U of each target id."""
        v, kept = self.config.vocab_size, self.kept_ids.cpu()
        if self.config.markov_all:
            return torch.arange(v)
        rows = torch.full((v,), len(kept))
        rows[kept] = torch.arange(len(kept))
        return rows

    def copy_from(self, target: Target) -> list[str]:
        """As the backbone; the confidence starts as one half."""
        self.confidence.weight.mul_(0.01)
        self.confidence.bias.zero_()
        return super().copy_from(target)

    def conditional(self, logits: Tensor, reads: Tensor, parents: Tensor) -> Logits:
        before = self.markov_in(self.own_ids[parents])
        confidence = F.logsigmoid(self.confidence(torch.cat((reads, before), dim=-1)).float()).squeeze(-1).exp()
        return logits + self.markov_out(before).to(logits.dtype), confidence

    def readout(self, reads: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        head = torch.cat((self.head.weight.to(reads.dtype), self.markov_out.weight), dim=1)
        return torch.cat((reads, self.markov_in(self.own_ids[parents])), dim=-1), head

    def other_loss(self, hidden: Tensor, alpha: Tensor | None, weight: Tensor) -> tuple[Tensor | float, list[Tensor]]:
        """Cross-entropy of the confidence with the acceptance rate that it predicts."""
        assert alpha is not None
        guess = self.confidence(hidden).squeeze(-1).float()
        loss = F.binary_cross_entropy_with_logits(guess, alpha.float(), reduction="none")
        return self.config.confidence_weight * (loss * weight).sum(), [guess.detach().sigmoid()]


KIND = DSpark
