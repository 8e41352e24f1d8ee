"""DSpark: DFlash's block with a correction by the previous token and a confidence per prediction.

    logits at depth k below token y  =  head(block state at k) + V U[y]           U: [d+1, r], V: [d, r]; common/markov.py
    confidence there                 =  sigmoid(w . (block state, U[y]))           an estimate of sum min(p, q)

For `@stop` and dynamic trees a node's probability is confidence times q (see
common/tree_growth.py); what is drawn is drawn from q alone.

Source: DSpark; the loss is 0.1 CE + 0.9 L1(p, q) + BCE(confidence, acceptance), and L1 is twice the
total variation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.drafters.common.block import Aligned
from drafttrain.drafters.common.markov import MarkovBlock, MarkovConfig
from drafttrain.drafters.common.tree_growth import Logits
from drafttrain.target import Target
from drafttrain.values import PositiveAmount


class DSparkConfig(MarkovConfig):
    """Config of a DSpark drafter.

    Attributes:
        confidence_weight: of the confidence's loss.
    """

    model_type = "drafttrain_dspark"
    recipe_keys = (*MarkovConfig.recipe_keys, "confidence_weight")
    loss: str = "0.1*ce+1.8*tv"
    confidence_weight: PositiveAmount = 1.0


class DSpark(MarkovBlock):
    """A DSpark drafter: the block-parallel backbone with both heads."""

    config_class = DSparkConfig
    kind = "dspark"
    measures = ("confidence",)
    config: DSparkConfig

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.confidence = nn.Linear(config.hidden_size + config.markov_rank, 1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.01)  # the correction starts near zero

    def copy_from(self, target: Target) -> list[str]:
        """As the backbone; the confidence starts as one half."""
        self.confidence.weight.mul_(0.01)
        self.confidence.bias.zero_()
        return super().copy_from(target)

    def conditional(self, logits: Tensor, reads: Tensor, parents: Tensor) -> Logits:
        before = self.corrections(reads, parents)  # [n, r]
        guess = self.confidence(torch.cat((reads, before), dim=-1)).float()  # [n, 1]
        confidence = F.logsigmoid(guess).squeeze(-1).exp()
        return logits + self.markov_out(before).to(logits.dtype), confidence

    def other_loss(
        self,
        hidden: Tensor,
        aligned: Aligned,
        alpha: Tensor | None,
    ) -> tuple[Tensor | float, list[Tensor]]:
        """Cross-entropy of the confidence with the acceptance rate that it predicts."""
        assert alpha is not None
        guess = self.confidence(hidden).squeeze(-1).float()  # [t], before the sigmoid
        loss = F.binary_cross_entropy_with_logits(guess, alpha.float(), reduction="none")
        total = (loss * aligned.weight).sum()
        return self.config.confidence_weight * total, [guess.detach().sigmoid()]


KIND = DSpark
