"""DSpark: DFlash's block with a correction by the previous token and a confidence per prediction.

    logits at depth k below token y  =  head(z) + V c                   z: the block's state at k; V: [d, r]; common/markov.py
    confidence there                 =  sigmoid(w . (z, U[y]))           an estimate of sum min(p, q); U: [d+1, r]

Of the correction there are three forms (`markov_head_type`):

    vanilla   c = U[y]
    gated     c = sigmoid(gate_proj(z, U[y])) * U[y]
    rnn       c = tanh(o),  g, n, o = joint_proj(s, U[y], z)             s: the path's state, 0 at first;
              then s = sigmoid(g) s + (1 - sigmoid(g)) tanh(n)

For `@stop` and dynamic trees a node's probability is confidence times q (see
common/tree_growth.py); what is drawn is drawn from q alone.

The loss is 0.1 CE + 0.9 L1(p, q) + BCE(confidence, acceptance), and L1 is twice the total variation.

Sources: DSpark; deepseek-ai/DeepSpec modeling/dspark/markov_head.py (June 2026).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.drafters.common.block import OtherLoss, Paths
from drafttrain.drafters.common.markov import MarkovBlock, MarkovConfig
from drafttrain.drafters.common.tree_growth import Children
from drafttrain.errors import UserError
from drafttrain.losses import Aligned
from drafttrain.target import Target
from drafttrain.values import PositiveAmount


class DSparkConfig(MarkovConfig):
    """Config of a DSpark drafter.

    Attributes:
        confidence_weight: of the confidence's loss.
        markov_head_type: of the correction. `vanilla` reads the token before, `gated` also the
            block's state, `rnn` the whole path; vLLM drafts with the first alone.
    """

    model_type = "drafttrain_dspark"
    recipe_keys = (*MarkovConfig.recipe_keys, "confidence_weight")
    loss: str = "0.1*ce+1.8*tv"
    confidence_weight: PositiveAmount = 1.0
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"

    def check(self) -> None:
        super().check()
        if self.markov_head_type == "rnn" and not self.sample_from_anchor:
            raise UserError(
                "markov_head_type='rnn' needs sample_from_anchor=true: trainers and engines disagree on whether its state reads "
                "the block's first token otherwise"
            )


class DSpark(MarkovBlock):
    """A DSpark drafter: the block-parallel backbone with both heads."""

    config_class = DSparkConfig
    kind = "dspark"
    measures = ("confidence",)
    config: DSparkConfig

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        h = config.hidden_size
        r = config.markov_rank
        self.confidence = nn.Linear(h + r, 1)
        self.gate_proj: nn.Linear | None = None
        self.joint_proj: nn.Linear | None = None
        if config.markov_head_type == "gated":
            self.gate_proj = nn.Linear(h + r, r)
        if config.markov_head_type == "rnn":
            self.joint_proj = nn.Linear(2 * r + h, 3 * r)
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

    def bend(self, at: Paths) -> tuple[Tensor, Tensor | None]:
        states = at.states
        before = self.embedded(at.parents)  # [n, r]
        if self.gate_proj is not None:
            gate = self.gate_proj(torch.cat((at.reads, before), dim=-1))
            return torch.sigmoid(gate) * before, states
        if self.joint_proj is None or states is None:
            return before, states
        parts = self.joint_proj(torch.cat((states, before, at.reads), dim=-1))
        gate, new, shown = parts.chunk(3, dim=-1)  # [n, r] each
        new = torch.tanh(new)
        return torch.tanh(shown), new + torch.sigmoid(gate) * (states - new)

    def first_states(self, count: int) -> Tensor | None:
        if self.joint_proj is None:
            return None
        return self.joint_proj.weight.new_zeros(count, self.config.markov_rank)

    def conditional(self, logits: Tensor, at: Paths) -> tuple[Children, Tensor | None]:
        corrected, states = super().conditional(logits, at)
        confidence = torch.sigmoid(self.confide(at.reads, at.parents))
        return corrected._replace(confidence=confidence), states

    def confide(self, reads: Tensor, parents: Tensor) -> Tensor:
        """[n] float32, the confidence before the sigmoid, from reads [n, h] and parents [n]."""
        both = torch.cat((reads, self.embedded(parents)), dim=-1)
        return self.confidence(both).squeeze(-1).float()

    def other_loss(
        self,
        hidden: Tensor,
        aligned: Aligned,
        alpha: Tensor | None,
        parents: Tensor,
    ) -> OtherLoss:
        """Cross-entropy of the confidence with the acceptance rate that it predicts."""
        assert alpha is not None
        guess = self.confide(hidden[:, : self.config.hidden_size], parents)
        loss = F.binary_cross_entropy_with_logits(guess, alpha.float(), reduction="none")
        total = (loss * aligned.weight).sum()
        return self.config.confidence_weight * total, [guess.detach().sigmoid()]


KIND = DSpark
