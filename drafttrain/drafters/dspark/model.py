"""DSpark: DFlash's block, corrected by the token chosen before, and told how far to trust it.

    logits at depth k below token y  =  head(block state at k) + V U[y]           U: [d+1, r], V: [d, r]
    confidence there                 =  sigmoid(w . (block state, U[y]))           an estimate of sum min(p, q)

The block's pass is the expensive part and still happens once; the correction is a product of low rank per node. So siblings'
children differ, as they should: a block alone may say "New of" from "New York" and "bank of". The last row of U stands for
committed tokens that the drafter's vocabulary lacks. `@stop` and dynamic trees read a node's probability as confidence
times q (see `expand.grow`); what is drawn is drawn from q alone.

Source: DSpark; the loss is 0.1 CE + 0.9 L1(p, q) + BCE(confidence, acceptance), and L1 is twice the total variation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.drafters.common.block import BlockDrafter
from drafttrain.drafters.common.block_config import BlockConfig
from drafttrain.drafters.common.expand import Said
from drafttrain.errors import UserError
from drafttrain.target import Target


class DSparkConfig(BlockConfig):
    """As `BlockConfig`, and:

    Attributes:
        markov_rank: r of the correction; at most the hidden size. confidence_weight: of the confidence's loss.
    """

    model_type = "drafttrain_dspark"
    recipe_keys = (*BlockConfig.recipe_keys, "confidence_weight")

    def __init__(
        self, markov_rank: int = 256, confidence_weight: float = 1.0, loss: str = "0.1*ce+1.8*tv", **kwargs: Any
    ):
        super().__init__(loss=loss, **kwargs)
        if markov_rank < 1 or confidence_weight <= 0:
            raise UserError(
                f"markov_rank={markov_rank} must be at least 1 and confidence_weight={confidence_weight} above 0; without both "
                "this is kind=dflash"
            )
        self.markov_rank = min(markov_rank, self.hidden_size)
        self.confidence_weight = confidence_weight


class DSpark(BlockDrafter):
    """The backbone with both heads."""

    config_class = DSparkConfig
    kind = "dspark"
    measures = ("confidence",)
    config: DSparkConfig

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        rank = config.markov_rank
        self.markov_in = nn.Embedding(config.draft_vocab_size + 1, rank)
        self.markov_out = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.confidence = nn.Linear(config.hidden_size + rank, 1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.01)  # the correction starts near nothing

    def bind(self, target: Target) -> None:
        """As for the backbone; also learns which of its ids a target's token has."""
        super().bind(target)
        self.own_ids = torch.full((target.vocab_size,), len(self.kept_ids))
        self.own_ids[self.kept_ids.cpu()] = torch.arange(len(self.kept_ids))
        self.own_ids = self.own_ids.to(target.device)

    def initialize(self, target: Target, kept_ids: Tensor) -> list[str]:
        """As the backbone; the confidence starts as one half."""
        with torch.no_grad():
            self.confidence.weight.mul_(0.01)
            self.confidence.bias.zero_()
        return super().initialize(target, kept_ids)

    def conditional(self, logits: Tensor, reads: Tensor, parents: Tensor) -> Said:
        before = self.markov_in(self.own_ids[parents])
        confidence = F.logsigmoid(self.confidence(torch.cat((reads, before), dim=-1)).float()).squeeze(-1).exp()
        return logits + self.markov_out(before).to(logits.dtype), confidence

    def readout(self, reads: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        head = torch.cat((self.head.weight.to(reads.dtype), self.markov_out.weight), dim=1)
        return torch.cat((reads, self.markov_in(self.own_ids[parents])), dim=-1), head

    def beside(self, hidden: Tensor, alpha: Tensor | None, weight: Tensor) -> tuple[Tensor | float, list[Tensor]]:
        """The confidence's cross-entropy with the acceptance rate that it foretells."""
        assert alpha is not None
        guess = self.confidence(hidden).squeeze(-1).float()
        loss = F.binary_cross_entropy_with_logits(guess, alpha.float(), reduction="none")
        return self.config.confidence_weight * (loss * weight).sum(), [guess.detach().sigmoid()]


KIND = DSpark
