"""DFlash: a block of tokens in one pass, each predicted from the context alone.

Source: arXiv 2602.06036.

A block's predictions ignore the tokens chosen before them: all nodes of a depth share their logits,
and a path's probability is the product of its depths' marginals. So a tree of any shape costs one
pass; see common/block.py.
"""

from __future__ import annotations

from drafttrain.drafters.common.block import BlockDrafter
from drafttrain.drafters.common.configs import BlockConfig


class DFlashConfig(BlockConfig):
    """Config of a DFlash drafter."""

    model_type = "drafttrain_dflash"


class DFlash(BlockDrafter):
    """A DFlash drafter: the block-parallel backbone alone."""

    config_class = DFlashConfig
    kind = "dflash"


KIND = DFlash
