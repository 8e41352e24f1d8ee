"""EAGLE-1: the next state of the target, predicted from the last one and the next token.

Source: arXiv 2401.15077.

    anchor t, depth 0:   state = f_t, which the target's head reads    token x_{t+1}        predicts f_{t+1}, so x_{t+2}
    anchor t, depth k:   state = own output at depth k-1               token x_{t+1+k}      predicts f_{t+1+k}, so x_{t+2+k}

    out = layers(fc(embed(token) ++ state));  logits = the target's own head(out)

The first layer reads its input without a norm, as in published checkpoints. The head is the
target's, frozen and never saved. The loss is the smooth L1 distance to the target's next state plus
a divergence of the head's output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.batch import Batch
from drafttrain.drafters.base import Source
from drafttrain.drafters.common.configs import LastStateConfig
from drafttrain.drafters.common.layer_model import LayerDrafter
from drafttrain.drafters.common.layers import DraftLayer, RMSNorm
from drafttrain.drafters.common.starts import (
    copy_last_layers,
    identity_on_last,
    projection_start,
)
from drafttrain.errors import UserError
from drafttrain.losses import TargetRows
from drafttrain.ops.cpu_draft import DraftWeights
from drafttrain.target import Target
from drafttrain.values import Depth, Weight


class Eagle1Config(LastStateConfig):
    """Config of an EAGLE-1 drafter.

    Attributes:
        ttt_steps: 1 as in the paper; more also train on the drafter's own output, as EAGLE-3 does.
        fc_bias: `fc` has a bias, as heads of the paper's authors do.
        normed_layers: the first layer norms its input and a norm follows the last, as in verl-SpeCo's
            heads; the paper has neither, and no engine's class.
        regression, token_weight: weights of the smooth L1 distance to the target's next state (mean
            over its entries), and of the divergence.
        feature_noise: a; in training, true states get uniform noise in (-a, a) * 512 / tokens of
            the conversation.
    """

    model_type = "drafttrain_eagle1"
    recipe_keys = (*LastStateConfig.recipe_keys, "regression", "token_weight", "feature_noise")
    ttt_steps: Depth = 1
    fc_bias: bool = False
    normed_layers: bool = False
    regression: Weight = 1.0
    token_weight: Weight = 0.1
    feature_noise: Weight = 0.1

    def check(self) -> None:
        super().check()
        if self.regression + self.token_weight == 0:
            raise UserError("regression=0 and token_weight=0 leave no loss; set one above 0")


class Eagle1(LayerDrafter):
    """An EAGLE-1 drafter; `bind` attaches the target's embedding and head.

    Attributes:
        all_tokens: the target's own head, which is packed already, where all tokens are kept.
    """

    config_class = Eagle1Config
    kind = "eagle1"
    all_tokens: Callable[[Tensor], Tensor] | None = None

    def __init__(self, config: Eagle1Config):
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DraftLayer(config, normed=config.normed_layers or i > 0)
            for i in range(config.num_hidden_layers)
        )
        self.norm: RMSNorm | None = None
        if config.normed_layers:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.finish(own_head=False)

    @property
    def token_weight(self) -> float:
        return self.config.token_weight

    def bind(self, target: Target) -> None:
        """Attaches the target's embedding and head.

        Raises:
            UserError: the target caps its logits, which the loss does not.
        """
        if target.softcap is not None:
            raise UserError(
                f"target={target.name!r} caps its logits, and kind={self.kind!r} shares its head, which is trained without a "
                "cap; use a kind with a head of its own (eagle3)"
            )
        super().bind(target)
        self.all_tokens = None
        if len(self.kept_ids) == target.vocab_size:
            self.all_tokens = target.head

    def copy_from(self, target: Target) -> list[str]:
        """Copies the target's last layers; `fc` starts as the identity on the state.

        The layers' output projections start near zero: their input comes after the target's final
        norm, which no layer of the target reads, and their error would grow from depth to depth.
        """
        identity_on_last(self.fc)
        copied = copy_last_layers(self.decoder_layers, target.last_layers(len(self.decoder_layers)))
        for layer in self.decoder_layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        names = ["fc"]
        if copied:
            names += copied[0]
        return names

    @torch.no_grad()
    def solve_start(self, batches: list[Batch], source: Source) -> float | None:
        """Fits `fc`."""
        return projection_start(self, [self.fc], batches, source, normed=False)[0]

    def fuse(self, features: Tensor) -> Tensor:
        return features.to(self.fc.weight.dtype)

    def enter(
        self,
        state: Tensor,
        embeds: Tensor,
        depth: int,
    ) -> tuple[Tensor, Tensor | None]:
        return self.fc(torch.cat((embeds, state), dim=-1)), None

    def leave(self, state: Tensor) -> Tensor:
        if self.norm is not None:
            return self.norm(state)
        return state

    def score(self, read: Tensor) -> Tensor:
        if self.all_tokens is not None:
            return self.all_tokens(read)
        return super().score(read)

    def draft_weights(self, depth: int) -> DraftWeights | None:
        config = self.config
        if config.normed_layers:
            return None
        return DraftWeights(
            hidden=config.hidden_size,
            embed_width=config.hidden_size,
            eps=config.rms_norm_eps,
            project=self.fc.weight,
            project_bias=self.fc.bias,
        )

    def first_state(self, features: Tensor, batch: Batch) -> Tensor:
        """Adds noise in training, in place of the error of drafted states."""
        state = self.fuse(features)
        if not self.training or self.config.feature_noise == 0:
            return state
        lengths = batch.conversations()[:, 2]  # [c] tokens of each conversation
        of_tokens = torch.repeat_interleave(lengths, (lengths - 1).clamp(min=0))  # [t]
        own = of_tokens[batch.part.of(batch.anchors()[0])]  # [part]
        width = self.config.feature_noise * 512 / own.to(state.dtype)
        return state + (2 * torch.rand_like(state) - 1) * width[:, None]

    def other_loss(
        self,
        state: Tensor,
        rows: TargetRows,
        at: Tensor,
        weight: Tensor,
    ) -> Tensor | float:
        if self.config.regression == 0:
            return 0.0
        if not isinstance(rows, TargetRows):
            raise UserError(
                f"regression={self.config.regression}: the data's features hold likeliest tokens but no states; store "
                "states (drafttrain features without --top-k), or set drafter.regression=0"
            )
        wanted = rows.hidden[at].float()  # [t, h]
        distance = F.smooth_l1_loss(state.float(), wanted, reduction="none").mean(-1)  # [t]
        return self.config.regression * (weight * distance).sum()


KIND = Eagle1
