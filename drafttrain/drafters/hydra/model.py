"""Hydra: Medusa's heads, which also read the tokens drafted so far (arXiv 2402.05109).

    head k at anchor t reads h_t ++ e(x_{t+1}) ++ .. ++ e(x_{t+1+k}) and predicts x_{t+2+k}

    out_k = block(M x + SiLU(W x)), x what is read         logits = lm_head_k(out_k)

h_t is the target's last state, as in Medusa; e is its embedding, frozen and scaled to RMS 1. M
replaces the residual of Medusa, whose input is as wide as its output. With init=target W starts at
0, and M as the identity on h_t or the best linear prediction of the state at t+1+k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafttrain.drafters.common.starts import unit
from drafttrain.drafters.medusa.model import Medusa, MedusaConfig, ResidualBlock
from drafttrain.target import Target


class HydraConfig(MedusaConfig):
    """Config of Hydra heads; fields are Medusa's."""

    model_type = "drafttrain_hydra"


class MixBlock(ResidualBlock):
    """M x + SiLU(W x), for an input that is wider than the output."""

    def __init__(self, width: int, hidden: int):
        super().__init__(width, hidden)
        self.residual = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + nn.functional.silu(self.linear(x))


class Hydra(Medusa):
    """Hydra heads; the embedding is the target's, never saved."""

    config_class = HydraConfig
    kind = "hydra"
    independent = False

    @staticmethod
    def first_block(hidden: int, depth: int) -> ResidualBlock:
        return MixBlock((2 + depth) * hidden, hidden)

    def copy_from(self, target: Target) -> list[str]:
        h = self.config.hidden_size
        for block in self.blocks:
            block[0].residual.weight.zero_()[:, :h].fill_diagonal_(1.0)
        return [*super().copy_from(target), "residual"]

    def fitted(self, state: Tensor, depth: int) -> tuple[int, Tensor]:
        return depth, state

    def take_map(self, index: int, found: Tensor, rows: Tensor) -> None:
        self.blocks[index][0].residual.weight.copy_(found)

    def enter(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return self.advance(super().enter(hidden, tokens), tokens, 0)

    def advance(self, state: Tensor, tokens: Tensor, depth: int) -> Tensor:
        embeds = unit(self.embed(tokens).to(state.dtype))
        return torch.cat((state, embeds), dim=-1)


KIND = Hydra
