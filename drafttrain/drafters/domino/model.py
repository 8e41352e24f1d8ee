"""Domino: DFlash's block with a small recurrent network that reads the drafted path.

    anchor t, block of 4            x_{t+1}   mask      mask      mask
    predicts                                  x_{t+2}   x_{t+3}   x_{t+4}
    depth k                                   0         1         2
    the path's state g_k read                 x_{t+1}   x_{t+2}   x_{t+3}      and the tokens before, from x_{t+1} on

    logits at depth k  =  head(z_k) + out(silu(in([z_k, g_k])))         z_k [h] the block's state, g_k [g] a GRU's

The GRU reads the target's embeddings. DSpark and DFlash 2 read the last token of a path alone. The
first `pure_draft_prefix_len` depths are the block's own. Without the second term a fresh drafter
drafts what DFlash does, because `out` starts near zero.

Training starts at the block's own loss and moves to the corrected one:

    loss = (1 - l) corrected + l block's own        l from lambda_base_start to 0 over a share of the training

Sources: Domino, arXiv 2605.29707; SpecForge modeling/draft/domino.py (August 2026); NeMo Automodel
0.7 components/speculative/dflash/domino_core.py; SGLang 0.5.23 speculative/domino_utils.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.drafters.common.block import OtherLoss, Paths
from drafttrain.drafters.common.configs import BlockConfig
from drafttrain.drafters.common.markov import CorrectedBlock
from drafttrain.losses import Aligned
from drafttrain.values import Count, Fraction, PositiveFraction, Size


class DominoConfig(BlockConfig):
    """Config of a Domino drafter; names are those of published checkpoints where they have one.

    Attributes:
        emb_dim: rank of the correction. gru_hidden_dim: width of the path's state (g).
        pure_draft_prefix_len: first depths that are not corrected; SGLang reads 1 alone.
        lambda_base_start: share of the block's own loss at the start of training.
        lambda_base_decay_ratio: share of the training over which that share falls to 0.
    """

    model_type = "drafttrain_domino"
    recipe_keys = (*BlockConfig.recipe_keys, "lambda_base_start", "lambda_base_decay_ratio")
    loss: str = "ce"
    emb_dim: Count = 256
    gru_hidden_dim: Count = 1024
    pure_draft_prefix_len: Size = 1
    lambda_base_start: Fraction = 1.0
    lambda_base_decay_ratio: PositiveFraction = 1.0


class PathGru(nn.Module):
    """A GRU without biases. Rows of its weights: reset gate, update gate, new state, as torch's."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.size = size
        self.reads = nn.Linear(width, 3 * size, bias=False)
        self.keeps = nn.Linear(size, 3 * size, bias=False)

    def first(self, count: int) -> Tensor:
        """[count, g], states before the first token."""
        return self.keeps.weight.new_zeros(count, self.size)

    def forward(self, read: Tensor, state: Tensor) -> Tensor:
        """The state after one more token.

        read: [n, 3g], `reads` of the token's embedding. state: [n, g] before it.
        """
        reset, update, new = read.chunk(3, dim=-1)  # [n, g] each
        old_reset, old_update, old_new = self.keeps(state).chunk(3, dim=-1)
        new = torch.tanh(new + torch.sigmoid(reset + old_reset) * old_new)
        return new + torch.sigmoid(update + old_update) * (state - new)


class Domino(CorrectedBlock):
    """A Domino drafter: the block-parallel backbone with a correction by the path."""

    config_class = DominoConfig
    kind = "domino"
    config: DominoConfig

    def __init__(self, config: DominoConfig):
        super().__init__(config)
        h = config.hidden_size
        self.gru = PathGru(h, config.gru_hidden_dim)
        self.correction_in = nn.Linear(h + config.gru_hidden_dim, config.emb_dim, bias=False)
        self.correction_out = nn.Linear(config.emb_dim, config.draft_vocab_size, bias=False)
        self.post_init()
        # Not zero, which would keep the gradient from the other factors.
        nn.init.normal_(self.correction_out.weight, std=1e-3)

    @property
    def correction(self) -> nn.Linear:
        return self.correction_out

    def first_states(self, count: int) -> Tensor:
        return self.gru.first(count)

    def bend(self, at: Paths) -> tuple[Tensor, Tensor]:
        assert at.states is not None
        read = self.gru.reads(self.embed(at.parents).to(at.states.dtype))
        states = self.gru(read, at.states)
        both = torch.cat((at.reads, states.to(at.reads.dtype)), dim=-1)  # [n, h + g]
        bent = F.silu(self.correction_in(both))
        if at.depth < self.config.pure_draft_prefix_len:
            bent = torch.zeros_like(bent)
        return bent, states

    @property
    def base_share(self) -> float:
        """Share of the block's own loss at this point of the training."""
        config = self.config
        if not self.training:
            return 0.0
        done = self.progress / config.lambda_base_decay_ratio
        return config.lambda_base_start * max(0.0, 1.0 - done)

    @property
    def loss_share(self) -> float:
        return 1.0 - self.base_share

    def other_loss(
        self,
        hidden: Tensor,
        aligned: Aligned,
        alpha: Tensor | None,
        parents: Tensor,
    ) -> OtherLoss:
        """The block's own loss, without the correction."""
        share = self.base_share
        if not share:
            return 0.0, []
        return share * self.own_loss(hidden, aligned), []


KIND = Domino
