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

from drafttrain.drafters.common.block import Aligned
from drafttrain.drafters.common.markov import MarkovBlock, MarkovConfig
from drafttrain.drafters.common.tree_growth import Logits
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

    def bend(
        self,
        reads: Tensor,
        before: Tensor,
        states: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Input of `markov_out` [n, r], and the paths' states [n, r] behind the tokens.

        reads: [n, h]. before: [n, r], `embedded` tokens. states: before them.
        """
        if self.gate_proj is not None:
            gate = self.gate_proj(torch.cat((reads, before), dim=-1))
            return torch.sigmoid(gate) * before, states
        if self.joint_proj is None:
            return before, states
        assert states is not None
        parts = self.joint_proj(torch.cat((states, before, reads), dim=-1))
        gate, new, shown = parts.chunk(3, dim=-1)  # [n, r] each
        gate = torch.sigmoid(gate)
        return torch.tanh(shown), gate * states + (1 - gate) * torch.tanh(new)

    def corrections(self, reads: Tensor, parents: Tensor) -> Tensor:
        return self.bend(reads, self.embedded(parents), None)[0]

    def readout_of_blocks(
        self,
        reads: Tensor,
        ids: Tensor,
        roots: Tensor,
        live: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if self.joint_proj is None:
            return super().readout_of_blocks(reads, ids, roots, live)
        block_of, depth_of = live.nonzero(as_tuple=True)  # [t] each
        before = self.embedded(ids[roots[block_of] + depth_of])  # [t, r]
        # Predictions that do not count come last in their blocks: zeros stand for them.
        along = before.new_zeros(*live.shape, before.shape[1] + reads.shape[1])
        along[live] = torch.cat((before, reads), dim=-1).to(along.dtype)
        states = self.first_states(len(live))
        bent = []
        for each in along.unbind(1):
            own, read = each.split((before.shape[1], reads.shape[1]), dim=-1)
            shown, states = self.bend(read, own, states)
            bent.append(shown)
        return self.joined(reads, torch.stack(bent, dim=1)[live])

    def first_states(self, count: int) -> Tensor | None:
        if self.joint_proj is None:
            return None
        return self.joint_proj.weight.new_zeros(count, self.config.markov_rank)

    def conditional(
        self,
        logits: Tensor,
        reads: Tensor,
        parents: Tensor,
        depth: int,
        states: Tensor | None,
    ) -> tuple[Logits, Tensor | None]:
        before = self.embedded(parents)  # [n, r]
        guess = self.confidence(torch.cat((reads, before), dim=-1)).float()  # [n, 1]
        confidence = F.logsigmoid(guess).squeeze(-1).exp()
        bent, states = self.bend(reads, before, states)
        return (logits + self.markov_out(bent).to(logits.dtype), confidence), states

    def other_loss(
        self,
        hidden: Tensor,
        aligned: Aligned,
        alpha: Tensor | None,
        parents: Tensor,
    ) -> tuple[Tensor | float, list[Tensor]]:
        """Cross-entropy of the confidence with the acceptance rate that it predicts."""
        assert alpha is not None
        if self.config.markov_head_type != "vanilla":  # whose readout is the confidence's input
            reads = hidden[:, : self.config.hidden_size]
            hidden = torch.cat((reads, self.embedded(parents)), dim=-1)
        guess = self.confidence(hidden).squeeze(-1).float()  # [t], before the sigmoid
        loss = F.binary_cross_entropy_with_logits(guess, alpha.float(), reduction="none")
        total = (loss * aligned.weight).sum()
        return self.config.confidence_weight * total, [guess.detach().sigmoid()]


KIND = DSpark
