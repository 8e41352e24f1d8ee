"""Medusa: heads that each predict a further token from the target's last state alone.

Source: arXiv 2401.10774, Medusa-1.

h_t is the last state from which the target's head chooses x_{t+1}; see common/path_heads.py.

    head k at anchor t reads h_t and predicts x_{t+2+k}; head 0 predicts the token after the one the
    target has just chosen

    out_k = block(h_t), block(x) = x + SiLU(W x)         logits = lm_head_k(out_k)

Heads ignore the tokens of other heads, so all nodes of a depth have the same children, and a node's
probability is the product along its path. The target stays frozen. With init=target W starts at 0
and the head rows are the target's, combined with the best linear prediction of its state at t+1+k
where training data is available.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.drafters.common.configs import HeadsConfig, Layers, Width
from drafttrain.drafters.common.path_heads import PathHeads
from drafttrain.target import Target


class MedusaConfig(HeadsConfig):
    """Config of Medusa heads.

    Attributes:
        hidden_size: width of the states. num_heads: depths. blocks: residual blocks per head.
        shared_head: one set of head rows for all depths, which is smaller and trains faster; else
            one per depth.
    """

    model_type = "drafttrain_medusa"
    width_field = "hidden_size"
    hidden_size: Width = 64
    num_heads: Layers = 4
    blocks: Layers = 1
    shared_head: bool = False


class ResidualBlock(nn.Module):
    """x + SiLU(W x)."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.linear = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(PathHeads):
    """Medusa heads."""

    config_class = MedusaConfig
    kind = "medusa"
    independent = True
    blocks: Any  # nn.ModuleList of nn.Sequential

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        self.depths = config.num_heads
        h = config.hidden_size
        self.blocks = nn.ModuleList()
        for k in range(config.num_heads):
            blocks = nn.Sequential(self.first_block(h, k))
            for _ in range(config.blocks - 1):
                blocks.append(ResidualBlock(h, h))
            self.blocks.append(blocks)
        self.finish(h, 1 if config.shared_head else config.num_heads)

    @staticmethod
    def first_block(hidden: int, depth: int) -> ResidualBlock:
        """The block that reads the states of a depth."""
        return ResidualBlock(hidden, hidden)

    def copy_from(self, target: Target) -> list[str]:
        """Copies the target's head rows; blocks start as the identity."""
        for block in self.blocks.modules():
            if isinstance(block, ResidualBlock):
                block.linear.weight.zero_()
        return super().copy_from(target)

    def enter(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden.to(self.head(0).weight.dtype)

    def advance(self, state: Tensor, tokens: Tensor, depth: int) -> Tensor:
        return state

    def read(self, state: Tensor, depth: int) -> Tensor:
        return self.blocks[depth](state)


KIND = Medusa
