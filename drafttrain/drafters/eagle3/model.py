"""EAGLE-3: decoder layers over fused target features, trained by training-time test (arXiv 2503.01840).

    anchor t, depth 0:   state = fc(features_t)              token x_{t+1}        predicts x_{t+2}
    anchor t, depth k:   state = own output at depth k-1     token x_{t+1+k}      predicts x_{t+2+k}

    out = layers(state, embed(token))     q, k, v of the first read norm(embed) ++ norm(state); the residual is the state
    logits = lm_head(norm(out))           over the drafter's own, pruned vocabulary

A query at (t, k) sees the depth-0 keys of anchors 0..t and its own keys at depths 1..k. Its rotary position is t + k. The
decoder computes just that: depth-0 keys come from true target features of committed tokens, deeper ones belong to the
drafted path. Both call `Eagle3.step`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from drafttrain.batch import Batch
from drafttrain.drafters.common.layer_config import LayerConfig
from drafttrain.drafters.common.layer_model import DraftLayer, LayerDrafter
from drafttrain.drafters.common.layers import RMSNorm
from drafttrain.drafters.common.linear_start import Source, linear_start
from drafttrain.drafters.common.shared import copy_layer, copy_norm
from drafttrain.ops.cpu_layers import DraftWeights
from drafttrain.target import Target


class Eagle3Config(LayerConfig):
    """What an EAGLE-3 drafter is, beside what `LayerConfig` says. hidden_size may differ from the target's.

    Attributes:
        feature_layers: target hidden states that are fused, any number; empty means the target's default three.
        fc_norm: a norm of its own for each feature before `fc`. norm_output: the next depth reads the state after the final
            norm (both EAGLE-3.1). norm_before_residual: the first layer's residual is the normed state.
    """

    model_type = "drafttrain_eagle3"
    drafter_kind = "eagle3"

    def __init__(
        self,
        feature_layers: tuple[int, ...] = (),
        target_hidden_size: int = 0,
        fc_norm: bool = False,
        norm_output: bool = False,
        norm_before_residual: bool = False,
        **kwargs: Any,
    ):
        self.feature_layers = tuple(feature_layers)
        self.fc_norm, self.norm_output, self.norm_before_residual = fc_norm, norm_output, norm_before_residual
        super().__init__(**kwargs)
        self.target_hidden_size = target_hidden_size or self.hidden_size

    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Any:
        """The target's own shapes, positions and query norms where `options` say nothing."""
        options = {"feature_layers": target.default_feature_layers, **options}
        return super().for_target(target, **{**options, "target_hidden_size": target.hidden_size})


class Eagle3(LayerDrafter):
    """The drafter."""

    config_class: Any = Eagle3Config
    _keys_to_ignore_on_load_unexpected = ["d2t", "t2d"]
    kind = "eagle3"

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        self.fc = nn.Linear(len(config.feature_layers) * config.target_hidden_size, config.hidden_size, bias=False)
        self.fc_norm = nn.ModuleList(
            RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.feature_layers if config.fc_norm
        )
        self.midlayer = DraftLayer(config, beside=config.target_hidden_size)
        # Numbered as engines number them: the middle layer is their layer 0.
        self.layers = nn.ModuleDict({str(i): DraftLayer(config) for i in range(1, config.num_hidden_layers)})
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.norm_output = config.norm_output
        self.finish(config.num_hidden_layers)

    @classmethod
    def load(cls, folder: Path) -> Eagle3:
        """A saved drafter, published ones included: those hold the kept ids as the engines' d2t, target id minus drafter id."""
        loaded: Any = cls.from_pretrained(folder, use_safetensors=True, output_loading_info=True)
        drafter, info = loaded
        if "kept_ids" in info["missing_keys"]:
            drafter.kept_ids = torch.arange(drafter.config.draft_vocab_size)
            if drafter.config.draft_vocab_size != drafter.config.vocab_size:
                with safe_open(folder / "model.safetensors", "pt") as file:
                    drafter.kept_ids += file.get_tensor("d2t")
        return drafter

    @property
    def decoder_layers(self) -> list[Any]:
        return [self.midlayer, *self.layers.values()]

    @torch.no_grad()
    def initialize(self, target: Target, kept_ids: Tensor) -> list[str]:
        """Starts from the target: head rows of the kept tokens, and its last layers (the first on its input's state half).

        `fc` starts as the identity on the highest feature, so the untrained drafter is the target's last layers on a late
        state. Returns the names of what was copied; nothing fits a drafter of another hidden size.
        """
        h = self.config.hidden_size
        self.kept_ids.copy_(kept_ids)
        if h != self.config.target_hidden_size:
            return []
        self.lm_head.weight.copy_(target.head_weight[kept_ids])
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -h:].add_(torch.eye(h))
        names = ["lm_head", "fc"]
        if copy_norm(self.norm, getattr(target.body, "norm", None)):
            names.append("norm")
        ours = self.decoder_layers[-target.num_layers :]
        for layer, theirs in zip(ours, target.layers[-len(ours) :], strict=True):
            copied = copy_layer(layer, theirs)
            names += copied if layer is self.midlayer else []
        return names

    def solve_start(self, batches: list[Batch], source: Source) -> float:
        """Fits the linear part in closed form, see `linear_start`; returns the share of variance explained."""
        return linear_start(self, batches, source)

    def draft_weights(self) -> DraftWeights | None:
        config, first = self.config, self.midlayer
        if config.norm_before_residual:
            return None
        return DraftWeights(
            head=self.lm_head.weight,
            embed_width=config.target_hidden_size,
            eps=config.rms_norm_eps,
            embed_norm=first.input_layernorm.weight,
            state_norm=first.hidden_norm.weight,
            norm=self.norm.weight,
            returns_normed=config.norm_output,
        )

    # -- the one forward ----------------------------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """[t, f * target h] target features -> [t, h], the state that depth 0 reads."""
        return self.fc(self.norm_features(features))

    def norm_features(self, features: Tensor) -> Tensor:
        """What `fc` reads, in its dtype: each feature under its own norm, where there are norms."""
        features = features.to(self.fc.weight.dtype)
        if not self.fc_norm:
            return features
        parts = features.chunk(len(self.fc_norm), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)

    def enter(self, state: Tensor, embeds: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        return state, embeds

    def leave(self, state: Tensor) -> Tensor:
        """The last layer's output, normed if the config says so."""
        return self.norm(state) if self.norm_output else state

    def read_out(self, state: Tensor) -> Tensor:
        return state if self.norm_output else self.norm(state)


KIND = Eagle3
