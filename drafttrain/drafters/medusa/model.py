"""Medusa: heads that each predict a further token from the target's last state alone (arXiv 2401.10774, Medusa-1).

    position t          0    1    2    3    4
    token               x0   x1   x2   x3   x4
    last state          h0   h1   h2   h3   h4      the target's head reads h_t and chooses x_{t+1}

    head k at anchor t reads h_t and predicts x_{t+2+k}: head 0 what follows the token that the target has just chosen

    out_k = block(h_t), block(x) = x + SiLU(W x)         logits = lm_head_k(out_k)

Heads do not know which tokens the others chose, so all nodes of a depth have the same children, and a node is as likely as
the product of its path's. Loss weights fall by `depth_decay` per head. The target stays frozen. Started from it, W is 0 and
the head rows are the target's, through the best linear guess of its state at t+1+k if data for that is at hand.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from drafttrain.drafters.common.path_heads import PathHeads
from drafttrain.errors import UserError
from drafttrain.target import Target


class MedusaConfig(PreTrainedConfig):
    """What a Medusa drafter is.

    Attributes:
        hidden_size: the target's. num_heads: depths. blocks: residual blocks per head.
        shared_head: one set of head rows for all depths, which is smaller and quicker to learn; else each has its own.
        draft_vocab_size: d, kept tokens; 0 keeps the target's whole vocabulary.
        depth_decay: the loss of head k weighs depth_decay ** k.
        tree_nodes: of the default tree, which is chosen by held-out accuracy when training ends.
        target: the target's identity, checked before use.

    Raises:
        UserError: values that cannot work.
    """

    model_type = "drafttrain_medusa"
    kind = "medusa"
    # What a run may set anew when it continues a drafter.
    recipe_keys = ("depth_decay", "tree_nodes", "loss")

    def __init__(
        self,
        hidden_size: int = 64,
        vocab_size: int = 0,
        draft_vocab_size: int = 0,
        num_heads: int = 4,
        blocks: int = 1,
        shared_head: bool = False,
        depth_decay: float = 0.8,
        tree_nodes: int = 16,
        loss: str = "kl",
        target: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.drafter_kind = self.kind
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.draft_vocab_size = draft_vocab_size or vocab_size
        self.num_heads, self.blocks, self.shared_head = num_heads, blocks, shared_head
        self.depth_decay, self.tree_nodes, self.loss = depth_decay, tree_nodes, loss
        self.target = target or {}
        for name in ("num_heads", "blocks", "tree_nodes"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1")
        super().__init__(**{"tie_word_embeddings": False, **kwargs})

    @classmethod
    def for_target(cls, target: Target, **options: Any) -> MedusaConfig:
        """Of the target's width; everything else as `options` say."""
        fixed = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "target": target.identity()}
        return cls(**{**options, **fixed})


class ResidualBlock(nn.Module):
    """x + SiLU(W x)."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.linear = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(PathHeads):
    """The drafter."""

    config_class: type[MedusaConfig] = MedusaConfig
    kind = "medusa"
    independent = True
    blocks: Any

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        self.depths = config.num_heads
        h = config.hidden_size
        rest = range(config.blocks - 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(self.first_block(h, k), *(ResidualBlock(h, h) for _ in rest)) for k in range(config.num_heads)
        )
        self.finish(h, 1 if config.shared_head else config.num_heads)

    @staticmethod
    def first_block(hidden: int, depth: int) -> ResidualBlock:
        """The block that reads a state of this depth."""
        return ResidualBlock(hidden, hidden)

    @torch.no_grad()
    def initialize(self, target: Target, kept_ids: Tensor) -> list[str]:
        """Starts as the target: its head rows of the kept tokens, blocks silent."""
        for block in self.blocks.modules():
            if isinstance(block, ResidualBlock):
                block.linear.weight.zero_()
        return super().initialize(target, kept_ids)

    def enter(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden.to(self.lm_heads[0].weight.dtype)

    def advance(self, state: Tensor, tokens: Tensor, depth: int) -> Tensor:
        return state

    def read(self, state: Tensor, depth: int) -> Tensor:
        return self.blocks[depth](state)


KIND = Medusa
