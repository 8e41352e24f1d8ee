"""JetSpec: DFlash's block with causal attention, distilled for wide trees.

    block of 4       x_{t+1}   mask      mask      mask
    sees of it       1         1 2       1 2 3     1 2 3 4         DFlash: 1 2 3 4 everywhere
    predicts                   x_{t+2}   x_{t+3}   x_{t+4}

Depth k is drafted as the target writes: from what stands before it, never from deeper masks. Two
things follow. A shorter block drafts the same tokens, so an engine may draft fewer. And masks learn
nothing from deeper ones that decoding may not reach. All depths weigh the same in the loss, the
forward divergence from the target's distribution: a best-first tree (`dynamic`) uses the order of
all likely tokens, not the first one alone.

Published heads draft trees of depth 20, 7 children and 128 to 256 nodes on large GPUs.

Sources: JetSpec, arXiv 2606.18394; hao-ai-lab/JetSpec models/draft_head.py (June 2026); NeMo
Automodel 0.7 components/speculative/dflash/jetspec_core.py.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from drafttrain.batch import Batch
from drafttrain.drafters.base import Source
from drafttrain.drafters.common.block import BlockDrafter
from drafttrain.drafters.common.configs import BlockConfig, BlockWeighting
from drafttrain.drafters.common.tree_spec import MOST_NODES

_WIDTH = 7  # children of a node in published trees


class JetSpecConfig(BlockConfig):
    """Config of a JetSpec drafter.

    Attributes:
        tree_nodes: of the tree that is suggested after training; 0 suggests none.
    """

    model_type = "drafttrain_jetspec"
    recipe_keys = (*BlockConfig.recipe_keys, "tree_nodes")
    loss: str = "kl"
    causal: bool = True
    weighting: BlockWeighting = "equal"
    tree_nodes: Annotated[int, Field(ge=0, le=MOST_NODES)] = 64


class JetSpec(BlockDrafter):
    """A JetSpec drafter: the block-parallel backbone with causal blocks."""

    config_class = JetSpecConfig
    kind = "jetspec"
    config: JetSpecConfig

    def suggest_tree(self, batches: list[Batch], source: Source) -> str | None:
        """The published shape, as deep as a block; `drafttrain tune` finds what pays here."""
        config = self.config
        if not config.tree_nodes:
            return None
        width = min(_WIDTH, config.draft_vocab_size, config.tree_nodes)
        return f"dynamic:{config.depth},{width},{config.tree_nodes}"


KIND = JetSpec
