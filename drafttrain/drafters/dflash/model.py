"""DFlash: a block of tokens in one pass, each the likeliest at its place given the context alone (arXiv 2602.06036).

The tokens of a block do not know what was chosen before them: all nodes of a depth share their logits, and a path's
probability is the product of its depths' marginals. So a tree of any shape costs one pass; see `block.py` for the backbone.
"""

from __future__ import annotations

from typing import Any

from drafttrain.drafters.common.block import BlockDrafter
from drafttrain.drafters.common.block_config import BlockConfig


class DFlashConfig(BlockConfig):
    """See `BlockConfig`."""

    model_type = "drafttrain_dflash"

    def __init__(self, **options: Any):  # without one, transformers would make a dataclass of it
        super().__init__(**options)


class DFlash(BlockDrafter):
    """The backbone as it is."""

    config_class = DFlashConfig
    kind = "dflash"


KIND = DFlash
