"""Multi-token prediction as DeepSeek-V3 trains it (arXiv 2412.19437), on top of a finished target.

    anchor t, depth 0:   state = f_t, which the target's head reads    token x_{t+1}        predicts x_{t+2}
    anchor t, depth k:   state = own output at depth k-1               token x_{t+1+k}      predicts x_{t+2+k}

    x = eh_proj(enorm(embed(token)) ++ hnorm(state));  out = norm(layer(x));  logits = lm_head(out)

One module serves all depths, as in serving engines, or each depth has its own. The target's head reads f_t after its final
norm, so the next depth reads `out` after our norm. With several modules each depth's keys come from its own module, and all
depths see the keys that the first module computes from true states: a cache as with one module.
(DeepSeek's modules have a causal cache each, which every drafted path would have to recompute.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import RMSNorm

from drafttrain.batch import Batch
from drafttrain.drafters.base import Source
from drafttrain.drafters.common.configs import LastStateConfig
from drafttrain.drafters.common.layer_model import LayerDrafter
from drafttrain.drafters.common.layers import DraftLayer
from drafttrain.drafters.common.linear_start import projection_start, set_temperature
from drafttrain.drafters.common.target_weights import copy_layer, copy_norm, final_norm, head_rows, identity_on_last
from drafttrain.drafters.mtp.native_module import read_native
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.ops.cpu_layers import DraftWeights
from drafttrain.target import Target


class MTPConfig(LastStateConfig):
    """Config of an MTP drafter.

    Attributes:
        modules: 1, or more for one per depth; deeper depths use the last one. Each has one layer.
    """

    model_type = "drafttrain_mtp"
    modules: int = 1
    depth_decay: float = 0.6

    def check(self) -> None:
        super().check()
        if not 1 <= self.modules <= self.ttt_steps:
            raise UserError(
                f"modules={self.modules} must be from 1 to ttt_steps={self.ttt_steps}, or some are never trained"
            )
        if self.num_hidden_layers != 1:
            raise UserError(f"num_hidden_layers={self.num_hidden_layers}: a module has 1 layer; set modules instead")


class MTPModule(nn.Module):
    """A prediction module: projection and layer; names are DeepSeek's."""

    def __init__(self, config: MTPConfig):
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(h, eps), RMSNorm(h, eps)
        self.eh_proj = nn.Linear(2 * h, h, bias=False)
        self.layer = DraftLayer(config)


class MTP(LayerDrafter):
    """A multi-token prediction drafter."""

    config_class = MTPConfig
    kind = "mtp"

    def __init__(self, config: MTPConfig):
        super().__init__(config)
        self.blocks: Any = nn.ModuleList(MTPModule(config) for _ in range(config.modules))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.finish(layers=1)

    @property
    def decoder_layers(self) -> list[DraftLayer]:
        return [block.layer for block in self.blocks]

    def block_at(self, depth: int) -> MTPModule:
        return self.blocks[min(depth, len(self.blocks) - 1)]

    def layers_at(self, depth: int) -> list[DraftLayer]:
        return [self.block_at(depth).layer]

    def draft_weights(self) -> DraftWeights | None:
        if len(self.blocks) > 1:
            return None
        block = self.blocks[0]
        return DraftWeights(
            head=self.lm_head.weight,
            embed_width=self.config.hidden_size,
            eps=self.config.rms_norm_eps,
            embed_norm=block.enorm.weight,
            state_norm=block.hnorm.weight,
            norm=self.norm.weight,
            project=block.eh_proj.weight,
            returns_normed=True,
        )

    def fuse(self, features: Tensor) -> Tensor:
        return features.to(self.lm_head.weight.dtype)

    def enter(self, state: Tensor, embeds: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        block = self.block_at(depth)
        return block.eh_proj(torch.cat((block.enorm(embeds), block.hnorm(state)), dim=-1)), None

    def leave(self, state: Tensor) -> Tensor:
        return self.norm(state)

    @classmethod
    def native(cls, target: Target, kept_ids: Tensor, options: Json) -> MTP:
        """A drafter with the weights of the MTP module in the target's checkpoint; of several, the first, for all depths.

        Raises:
            UserError: no module there, or one of another form than our layer.
        """
        shapes, state = read_native(target)
        drafter = cls(MTPConfig.for_target(target, **{**shapes, **options}, draft_vocab_size=len(kept_ids)))
        drafter.initialize(target, kept_ids)
        for name, weight in state.items():
            ours = drafter.norm.weight if name == "norm.weight" else drafter.blocks[0].get_parameter(name)
            if ours.shape != weight.shape:
                raise UserError(
                    f"init='native': {name} of target {target.name!r} is {list(weight.shape)}, not {list(ours.shape)} as in a "
                    "plain layer of its sizes (gated attention?); use init=target"
                )
            ours.data.copy_(weight)
        for block in drafter.blocks[1:]:
            block.load_state_dict(drafter.blocks[0].state_dict())
        return drafter

    def copy_from(self, target: Target) -> list[str]:
        """Copies head rows, final norm and, into each module, the last layer; projections start as the identity on the state."""
        self.lm_head.weight.copy_(head_rows(target, self.kept_ids))
        names = ["lm_head", "eh_proj"]
        if copy_norm(self.norm, final_norm(target)):
            names.append("norm")
        for block in self.blocks:
            identity_on_last(block.eh_proj)
            copied = copy_layer(block.layer, target.layers[-1])
        return names + copied

    @torch.no_grad()
    def solve_start(self, batches: list[Batch], source: Source) -> float | None:
        """Fits the projections."""
        for block in self.blocks:
            for norm in (block.enorm, block.hnorm):
                norm.weight.fill_(1.0)
        projections = [block.eh_proj for block in self.blocks]
        explained, size = projection_start(self, projections, batches, source, normed=True)
        self.norm.weight.fill_(size)
        set_temperature(self, batches[0], source, self.norm.weight)
        return explained


KIND = MTP
