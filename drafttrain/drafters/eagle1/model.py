"""EAGLE-1: the next state of the target, predicted from the last one and the next token (arXiv 2401.15077).

    anchor t, depth 0:   state = f_t, which the target's head reads    token x_{t+1}        predicts f_{t+1}, so x_{t+2}
    anchor t, depth k:   state = own output at depth k-1               token x_{t+1+k}      predicts f_{t+1+k}, so x_{t+2+k}

    out = layers(fc(embed(token) ++ state));  logits = the target's own head(out)

The first layer reads its input without a norm, as in published checkpoints. The head is the target's, frozen and never saved:
what is learned is a state (smooth L1) that the head then reads as the target's (cross-entropy or any other divergence).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.batch import Batch
from drafttrain.drafters.common.layer_config import LastStateConfig
from drafttrain.drafters.common.layer_model import DraftLayer, LayerDrafter
from drafttrain.drafters.common.linear_start import Source, projection_start
from drafttrain.drafters.common.shared import copy_layer
from drafttrain.errors import UserError
from drafttrain.losses import TargetRows
from drafttrain.ops.packing import pack
from drafttrain.target import Target


class Eagle1Config(LastStateConfig):
    """What an EAGLE-1 drafter is, beside what `LayerConfig` says.

    Attributes:
        ttt_steps: 1 as in the paper; more also train on the own output, as EAGLE-3 does.
        regression, token_weight: of the smooth L1 distance to the target's next state (mean over its entries), and of the loss.
        feature_noise: a; true states get uniform noise in (-a, a) * 512 / tokens of the conversation while training.
    """

    model_type = "drafttrain_eagle1"
    drafter_kind = "eagle1"
    recipe_keys: ClassVar[tuple[str, ...]] = (
        *LastStateConfig.recipe_keys,
        "regression",
        "token_weight",
        "feature_noise",
    )

    def __init__(
        self,
        ttt_steps: int = 1,
        regression: float = 1.0,
        token_weight: float = 0.1,
        feature_noise: float = 0.1,
        **kwargs: Any,
    ):
        self.regression, self.token_weight, self.feature_noise = regression, token_weight, feature_noise
        super().__init__(ttt_steps=ttt_steps, **kwargs)
        if min(regression, token_weight, feature_noise) < 0 or regression + token_weight == 0:
            raise UserError(
                f"regression={regression}, token_weight={token_weight}, feature_noise={feature_noise}: none may be negative, and "
                "one of the first two must not be 0"
            )


class Eagle1(LayerDrafter):
    """The drafter; embedding and head are the target's, and `bind` attaches both.

    Attributes:
        frozen_head: [d, h] the target's rows of the kept tokens. score: [t, h] -> [t, d] their products.
    """

    config_class = Eagle1Config
    kind = "eagle1"
    frozen_head: Tensor
    score: Callable[[Tensor], Tensor]

    def __init__(self, config: Eagle1Config):
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers: Any = nn.ModuleList(DraftLayer(config, normed=i > 0) for i in range(config.num_hidden_layers))
        self.packed = False
        self.finish(config.num_hidden_layers)

    @property
    def decoder_layers(self) -> list[Any]:
        return list(self.layers)

    @property
    def head_weight(self) -> Tensor:
        return self.frozen_head

    @property
    def token_weight(self) -> float:
        return self.config.token_weight

    def bind(self, target: Target) -> None:
        """Checks that this drafter was made for the target and borrows its embedding and head.

        Raises:
            UserError: made for another target, or one that caps its logits, which the loss does not do to the drafter's.
        """
        if target.softcap is not None:
            raise UserError(
                f"target={target.name!r} caps its logits, and kind={self.kind!r} shares its head, which is trained without a "
                "cap; use a kind with a head of its own (eagle3)"
            )
        super().bind(target)
        head = target.head_weight.detach()
        whole = len(self.kept_ids) == target.vocab_size
        if not whole:
            head = head[self.kept_ids.to(head.device)].contiguous()
        self.frozen_head = head if target.logit_scale == 1.0 else head * target.logit_scale
        if whole:
            self.score = target.head
        else:
            linear = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(self.frozen_head, requires_grad=False)
            alone = nn.Sequential(linear)
            if self.packed:
                pack(alone)
            self.score = alone.forward

    def pack(self) -> None:
        super().pack()
        self.packed = True  # the head follows when it is bound

    @torch.no_grad()
    def initialize(self, target: Target, kept_ids: Tensor) -> list[str]:
        """Starts as the target's last layers on its state, which `fc` hands on. Returns the names of what was copied.

        What the layers add begins near nothing: that state comes after the target's final norm, where no layer of it ever
        stood, and what they would make of it grows from depth to depth.
        """
        h = self.config.hidden_size
        self.kept_ids.copy_(kept_ids)
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, h:].add_(torch.eye(h))
        names = ["fc"]
        ours = self.decoder_layers[-target.num_layers :]
        for layer, theirs in zip(ours, target.layers[-len(ours) :], strict=True):
            copied = copy_layer(layer, theirs)
            names += copied if layer is ours[0] else []
            for added in (layer.self_attn.o_proj, layer.mlp.down_proj):
                added.weight.mul_(0.01)
        return names

    @torch.no_grad()
    def solve_start(self, batches: list[Batch], source: Source) -> float:
        """Fits `fc` in closed form, see `projection_start`; returns the share of variance explained."""
        return projection_start(self, [self.fc], batches, source, normed=False)[0]

    # -- the one forward ----------------------------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        return features.to(self.fc.weight.dtype)

    def enter(self, state: Tensor, embeds: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        return self.fc(torch.cat((embeds, state), dim=-1)), None

    def logits(self, state: Tensor) -> Tensor:
        return self.score(state.to(self.frozen_head.dtype))

    # -- training half ------------------------------------------------------------------------------------------

    def first_state(self, features: Tensor, batch: Batch) -> Tensor:
        """Noise stands for the error that drafted states will have."""
        state = self.fuse(features)
        if not self.training or self.config.feature_noise == 0:
            return state
        length = batch.conversations()[:, 2]
        length = torch.repeat_interleave(length, (length - 1).clamp(min=0))  # of each anchor's conversation
        width = self.config.feature_noise * 512 / length.to(state.dtype)
        return state + (2 * torch.rand_like(state) - 1) * width[:, None]

    def other_loss(self, state: Tensor, rows: TargetRows, at: Tensor, weight: Tensor) -> Tensor | float:
        if self.config.regression == 0:
            return 0.0
        if not isinstance(rows, TargetRows):
            raise UserError(
                f"regression={self.config.regression}: the data's features hold likeliest tokens but no states; store "
                "states (drafttrain features without --top-k), or set drafter.regression=0"
            )
        distance = F.smooth_l1_loss(state.float(), rows.hidden[at].float(), reduction="none").mean(-1)
        return self.config.regression * (weight * distance).sum()


KIND = Eagle1
