"""EAGLE-3: decoder layers over fused target features, trained by training-time test.

Source: arXiv 2503.01840.

    anchor t, depth 0:   state = fc(features_t)              token x_{t+1}        predicts x_{t+2}
    anchor t, depth k:   state = own output at depth k-1     token x_{t+1+k}      predicts x_{t+2+k}

    out = layers(state, embed(token))     q, k, v of the first layer read norm(embed) ++ norm(state); its residual is the state
    logits = lm_head(norm(out))           over the drafter's own, pruned vocabulary

Which keys a query sees, and why decoding computes what was trained: common/layer_model.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from drafttrain.batch import Batch
from drafttrain.drafters.base import KeepTokens, Source
from drafttrain.drafters.common import starts
from drafttrain.drafters.common.configs import FeatureLayer, LayerConfig, OwnWidth
from drafttrain.drafters.common.layer_model import LayerDrafter
from drafttrain.drafters.common.layers import DraftLayer, RMSNorm
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.weights import Shapes, file_shapes, read_weights
from drafttrain.ops.cpu_draft import DraftWeights
from drafttrain.target import Target


class Eagle3Config(LayerConfig):
    """Config of an EAGLE-3 drafter; hidden_size may differ from the target's.

    Attributes:
        feature_layers: target hidden states that are fused, any number; empty means those that the
            data stores, else the target's default three.
        target_hidden_size: width of these states.
        fc_norm: a norm per feature before `fc`. norm_before_fc: one norm over all features instead.
        norm_output: the next depth reads the state after the final norm (EAGLE-3.1, with fc_norm).
        norm_before_residual: the first layer's residual is the normed state.
        train_head: False keeps the head's rows as they are copied from the target.
        image_embeds: at an image's placeholders it reads the target's embeddings of the image
            instead of the placeholder's: layer 0, the first of `feature_layers`. For our decoder;
            engines embed the placeholder.
    """

    recipe_keys = (*LayerConfig.recipe_keys, "train_head")
    model_type = "drafttrain_eagle3"
    width_field = "target_hidden_size"
    feature_layers: tuple[FeatureLayer, ...] = ()
    target_hidden_size: OwnWidth = 0
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    train_head: bool = True
    image_embeds: bool = False

    def check(self) -> None:
        super().check()
        if self.image_embeds and self.feature_layers[:1] != (0,):
            raise UserError(
                f"image_embeds=true reads the target's layer 0, but feature_layers={list(self.feature_layers)} do not begin "
                "with it; add it, and where states are stored, store it too: drafttrain features --layers 0,..."
            )
        if self.fc_norm and self.norm_before_fc:
            raise UserError("fc_norm and norm_before_fc norm the same features; set one of them")
        if not self.target_hidden_size:
            self.target_hidden_size = self.hidden_size

    @classmethod
    def shapes(cls, target: Target, options: Json) -> Json:
        layers = target.default_feature_layers
        if options.get("image_embeds"):
            layers = tuple(sorted({0, *layers}))
        return {**super().shapes(target, options), "feature_layers": layers}


class Eagle3(LayerDrafter):
    """An EAGLE-3 drafter."""

    config_class: Any = Eagle3Config
    # Of the flat published form, see export.py.
    _keys_to_ignore_on_load_unexpected = ["d2t", "t2d", r"layers\.\d+\.hidden_norm\.weight"]
    kind = "eagle3"
    lm_head: nn.Linear
    reads_features = "fc.weight"

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        h = config.hidden_size
        wide = config.target_hidden_size
        eps = config.rms_norm_eps
        self.fc = nn.Linear(len(config.feature_layers) * wide, h, bias=False)
        self.fc_norm = nn.ModuleList()  # one norm per feature
        if config.fc_norm:
            for _ in config.feature_layers:
                self.fc_norm.append(RMSNorm(wide, eps))
        self.input_norm = RMSNorm(self.fc.in_features, eps) if config.norm_before_fc else None
        if config.image_embeds:
            self.image_part = slice(0, wide)
        self.midlayer = DraftLayer(
            config,
            embed_width=wide,
            norm_before_residual=config.norm_before_residual,
        )
        # Numbered as engines number them: the middle layer is their layer 0.
        self.layers = nn.ModuleDict()
        for i in range(1, config.num_hidden_layers):
            self.layers[str(i)] = DraftLayer(config)
        self.norm = RMSNorm(h, eps)
        self.finish(own_head=True)

    @classmethod
    def begin(
        cls,
        target: Target,
        init: str,
        options: Json,
        loss: str,
        keep: KeepTokens | None = None,
    ) -> Self:
        # A frozen head needs the target's rows.
        other = options.get("hidden_size", target.hidden_size) != target.hidden_size
        copied = init != "random" and not (init == "target" and other)
        if options.get("train_head") is False and not copied:
            where = " to another hidden_size" if other else ""
            raise UserError(
                f"drafter.train_head=false keeps the target's head rows, which init={init!r} does not copy{where}; set "
                "init=target and leave hidden_size out"
            )
        return super().begin(target, init, options, loss, keep)

    def bind(self, target: Target) -> None:
        super().bind(target)
        trained = self.config.train_head and not self.adapted  # adapters freeze all other weights
        self.lm_head.requires_grad_(trained)

    @classmethod
    def stored_shapes(
        cls,
        shapes: Shapes,
        found: Shapes,
        config: Any,
    ) -> Shapes:
        """As the base class, also for published checkpoints.

        They hold the kept ids as the engines' d2t (target id minus drafter id) and t2d, or leave
        them out.
        """
        if "kept_ids" in found:
            return shapes
        stored = dict(shapes)
        del stored["kept_ids"]
        if config.draft_vocab_size != config.vocab_size:
            stored["d2t"] = (config.draft_vocab_size,)
            stored["t2d"] = (config.vocab_size,)
        return stored

    def finish_loading(self, folder: Path) -> None:
        found = file_shapes(folder)
        if "kept_ids" not in found:
            self.kept_ids = torch.arange(self.config.draft_vocab_size)
            if "d2t" in found:
                self.kept_ids += read_weights(folder)["d2t"].long()  # target id minus drafter id

    @property
    def decoder_layers(self) -> list[DraftLayer]:
        return [self.midlayer, *self.layers.values()]  # type: ignore[list-item]

    def copy_from(self, target: Target) -> list[str]:
        """Copies the target's head rows, final norm and last layers.

        The first layer is copied to the state half of its input. `fc` starts as the identity on the
        highest feature, so the untrained drafter is the target's last layers on a late state.
        Nothing fits a drafter of another hidden size.
        """
        if self.config.hidden_size != self.config.target_hidden_size:
            return []
        starts.identity_on_last(self.fc)
        names = ["fc", *starts.copy_ends(self, target)]
        layers = self.decoder_layers
        copied = starts.copy_last_layers(layers, target.last_layers(len(layers)))
        if copied:
            names += copied[0]
        return names

    def solve_start(self, batches: list[Batch], source: Source) -> float | None:
        if self.config.kv_lora_rank:
            return None  # the narrow vectors of latent attention cannot hold the map
        return starts.linear_start(self, batches, source)

    @torch.no_grad()
    def take_words(self, target: Target, kept_ids: Tensor) -> bool:
        if self.config.train_head or self.adapted:
            return False
        self.kept_ids.copy_(kept_ids)
        self.lm_head.weight.copy_(self.head_rows(target))
        self.bind(target)
        return True

    def draft_weights(self, depth: int) -> DraftWeights | None:
        config = self.config
        first = self.midlayer
        if not isinstance(first.input_layernorm, RMSNorm) or first.hidden_norm is None:
            return None
        return DraftWeights(
            hidden=config.hidden_size,
            embed_width=config.target_hidden_size,
            eps=config.rms_norm_eps,
            embed_norm=first.input_layernorm.weight,
            state_norm=first.hidden_norm.weight,
            norm=self.norm.weight,
            returns_normed=config.norm_output,
            residual_normed=config.norm_before_residual,
            fuse=self.fc.weight,
            reads_features=not (config.fc_norm or config.norm_before_fc or config.image_embeds),
        )

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(self.norm_features(features))

    def norm_features(self, features: Tensor) -> Tensor:
        """[t, f * target h], the input of `fc` in its dtype, normed as the config says."""
        features = features.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            return self.input_norm(features)
        if not self.fc_norm:
            return features
        parts = features.chunk(len(self.fc_norm), dim=-1)  # [t, target h] each
        normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        return torch.cat(normed, dim=-1)

    def enter(
        self,
        state: Tensor,
        embeds: Tensor,
        depth: int,
    ) -> tuple[Tensor, Tensor | None]:
        return state, embeds

    def leave(self, state: Tensor) -> Tensor:
        if self.config.norm_output:
            return self.norm(state)
        return state

    def read_out(self, state: Tensor) -> Tensor:
        if self.config.norm_output:
            return state
        return self.norm(state)


KIND = Eagle3
