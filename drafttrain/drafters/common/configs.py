"""Configs of trained drafters: what all share, decoder layers, blocks and heads.

transformers makes dataclasses of these classes: the annotated fields are what config.json and a
recipe's `drafter:` hold. Field names are those of published checkpoints.
"""

from __future__ import annotations

import os
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.target import Target
from drafttrain.target.attention import LAST
from drafttrain.values import (
    AnyText,
    Count,
    Depth,
    Fraction,
    PositiveAmount,
    PositiveFraction,
    Size,
    check,
    kinds_of,
)

Width = Annotated[int, Field(ge=1, le=2**20)]
Offset = Annotated[int, Field(ge=0, le=2**20)]
OwnWidth = Annotated[int, Field(ge=0, le=2**20)]  # 0 where it follows from others
FeatureLayer = Annotated[int, Field(ge=-1, le=1024)]
Heads = Annotated[int, Field(ge=1, le=2**16)]
Layers = Annotated[int, Field(ge=1, le=1024)]
Decay = Annotated[float, Field(gt=0, le=10)]
Block = Annotated[int, Field(ge=2, le=256)]
Smoothing = Annotated[float, Field(ge=0, le=0.999)]
Nodes = Annotated[int, Field(ge=1, le=1024)]
_HEAD = 64  # width of a head where the target has none
# Rotary scalings for positions beyond those of pretraining. Scalings that depend on the length of
# the current sequence are unsupported: cached keys would have to change while it grows.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class TargetedConfig(PreTrainedConfig):
    """Vocabulary, loss and target of a trained drafter.

    Attributes:
        recipe_keys: fields that a run may change when it continues a drafter; the weights depend on
            all others.
        width_field: the field that holds the target's hidden size.
        vocab_size: of the target. draft_vocab_size: kept tokens (d); 0 keeps the target's whole
            vocabulary.
        loss: as a recipe writes it. target: the target's identity, compared before use.

    Raises:
        UserError: values that cannot work, or not together.
    """

    recipe_keys: ClassVar[tuple[str, ...]] = ("loss",)
    width_field: ClassVar[str] = ""
    vocab_size: Size = 0
    draft_vocab_size: Size = 0
    loss: AnyText = "kl"
    target: Json = field(default_factory=dict)

    def __post_init__(self, **kwargs: Any) -> None:
        self.drafter_kind = self.kind()
        if not self.draft_vocab_size:
            self.draft_vocab_size = self.vocab_size
        if self.target is None:  # null in a config.json
            self.target = {}
        # Each field is checked as a recipe's value is, also where a published config.json names it.
        for name, kind in kinds_of(type(self)).items():  # type: ignore[arg-type]
            setattr(self, name, check(name, getattr(self, name), kind))
        self.check()
        # The base class, which would tie by default, must not: the head is the drafter's own or
        # none.
        super().__post_init__(**{"tie_word_embeddings": False, **kwargs})

    def check(self) -> None:
        """Derives values that are 0 or empty, and raises UserError for values that cannot work."""

    @classmethod
    def get_config_dict(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        **options: object,
    ) -> tuple[Json, Json]:
        """As transformers reads a config.json; one that engines read too has their model_type."""
        described, left = super().get_config_dict(pretrained_model_name_or_path, **options)
        if "drafter_kind" in described:
            described["model_type"] = cls.model_type
        return described, left

    @classmethod
    def kind(cls) -> str:
        return cls.model_type.removeprefix("drafttrain_")

    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        """A config for this target: its vocabulary, and its shapes where `options` have none."""
        fields = {**cls.shapes(target, options), **options}
        fields["vocab_size"] = target.vocab_size
        fields["target"] = target.identity()
        if cls.width_field:
            fields[cls.width_field] = target.hidden_size
        return cls(**fields)

    @classmethod
    def shapes(cls, target: Target, options: Json) -> Json:
        """Fields that follow the target unless a recipe's `options` set them."""
        return {}


class HeadsConfig(TargetedConfig):
    """Heads per depth that read the target's last state.

    Attributes:
        depth_decay: the loss of depth k weighs depth_decay ** k.
        tree_nodes: nodes of the default tree, which is chosen by held-out accuracy when training
            ends.
    """

    recipe_keys: ClassVar[tuple[str, ...]] = ("depth_decay", "tree_nodes", "loss")
    depth_decay: Decay = 0.8
    tree_nodes: Nodes = 16


class DecoderConfig(TargetedConfig):
    """Decoder layers.

    Attributes:
        target_width: ClassVar, True for kinds that read and write states of the target's width.
        hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim,
            num_hidden_layers: of the layers.
        rms_norm_eps: of all norms. rope_theta: base of the rotary embedding, where rope_parameters
            are not given.
        rope_parameters: as in transformers 5, {"rope_type": "yarn", "factor": ...}; takes
            precedence over rope_theta.
        max_position_embeddings: read by serving engines; unused here.
        sliding_window: positions that a token sees, its own included; 0 for all.
        position_offset: in training all but a conversation's first 4 tokens stand up to so many
            positions further behind.
        extra_vocab_size: most tokens of a prompt and its answer that join the kept ones in
            decoding, on CPUs; 0 for none.
        lora: adapters to train in place of the layers' weights when a drafter is continued, {r: 8,
            alpha: 16, targets: all-linear, dropout: 0}; empty trains all weights.
    """

    target_width: ClassVar[bool] = False
    hidden_size: Width = 64
    intermediate_size: OwnWidth = 0
    num_attention_heads: Heads = 4
    num_key_value_heads: OwnWidth = 0
    head_dim: OwnWidth = 0
    num_hidden_layers: Layers = 1
    rms_norm_eps: Fraction = 1e-5
    rope_theta: PositiveAmount = 10000.0
    rope_parameters: Json | None = None
    max_position_embeddings: Count = 131072
    sliding_window: Size | None = 0
    position_offset: Offset = 0
    extra_vocab_size: Size = 0
    lora: Json | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.rope_parameters is None:
            self.rope_parameters = {}
        else:
            self.rope_parameters = dict(self.rope_parameters)
        super().__post_init__(**kwargs)
        self.rope_theta = self.rope_parameters["rope_theta"]  # transformers has completed them

    @property
    def windows(self) -> tuple[int, ...]:
        """Positions that each layer's tokens see; 0 for all."""
        return (self.sliding_window or 0,) * self.num_hidden_layers

    def check(self) -> None:
        # Sizes that are 0 follow from others.
        if not self.intermediate_size:
            self.intermediate_size = 4 * self.hidden_size
        if not self.num_key_value_heads:
            self.num_key_value_heads = self.num_attention_heads
        if not self.head_dim:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.sliding_window is None:
            self.sliding_window = 0

        rope = self.rope_parameters or {}
        kind = rope.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise UserError(
                f"rope_parameters: rope_type={kind!r} is not one of {', '.join(ROPE_TYPES)}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_key_value_heads={self.num_key_value_heads} must divide num_attention_heads={self.num_attention_heads}"
            )

    @property
    def rotary_dim(self) -> int:
        """Entries of a head that the rotary embedding may rotate."""
        return self.head_dim

    @classmethod
    def shapes(cls, target: Target, options: Json) -> Json:
        config = last_layer_config(target.config)
        width = options.get("hidden_size", target.hidden_size)
        if cls.target_width and width != target.hidden_size:
            raise UserError(
                f"hidden_size={width}: kind={cls.kind()!r} shares states with the target, so its width is the target's, "
                f"{target.hidden_size}; drop the key, or choose a smaller intermediate_size"
            )
        heads = getattr(config, "num_attention_heads", None)
        if not heads:  # models without attention (Mamba)
            heads = max(1, target.hidden_size // _HEAD)

        # The target's own values, or these where its config has none.
        own: Json = {
            "intermediate_size": 4 * target.hidden_size,
            "num_key_value_heads": heads,
            "rms_norm_eps": 1e-5,
            "head_dim": target.hidden_size // heads,
            "max_position_embeddings": 131072,
        }
        for name in own:
            value = getattr(config, name, None)
            if value:
                own[name] = value
        own["hidden_size"] = target.hidden_size
        own["num_attention_heads"] = heads
        own["rope_parameters"] = None
        if "rope_theta" not in options:
            own["rope_parameters"] = rope_parameters_of(config)

        # A drafter of another width has heads and an MLP of sizes that follow its own.
        if width != target.hidden_size:
            del own["intermediate_size"]
            del own["head_dim"]
            # More query heads or fewer may not be a multiple of the target's key heads.
            if options.get("num_attention_heads", heads) % own["num_key_value_heads"]:
                del own["num_key_value_heads"]
        return own


LATENT_KEYS = (
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip


class LayerConfig(DecoderConfig):
    """Decoder layers that read their own output at the next depth (training-time test).

    Attributes:
        qk_norm: norms per query and key head (Qwen3). attention_bias, mlp_bias: biases of those
            linear layers.
        hidden_act: the MLP's activation.
        kv_lora_rank: width of the vector from which latent attention (DeepSeek, Kimi) takes keys
            and values; 0 for grouped-query attention. q_lora_rank: of the queries' vector, 0 for
            none. qk_nope_head_dim, qk_rope_head_dim: entries of a query or key head without and
            with rotation, of which head_dim is the sum. v_head_dim: width of a value head. 0 takes
            the target's.
        ttt_steps: depths trained. depth_decay: weight of depth k is depth_decay ** k.
        depth_share: share of anchors, drawn at every step, that are trained at depths after the
            first. Those losses keep their weight in expectation; less than 1 trains more
            first-depth anchors in the same time.
        later_depths_from: share of the training, in time or steps, after which depths behind the
            first are trained too. Until then a step costs half as much or less, so that the first
            learns from more anchors.
    """

    recipe_keys: ClassVar[tuple[str, ...]] = (
        "ttt_steps", "depth_decay", "depth_share", "later_depths_from", "position_offset", "extra_vocab_size", "loss",
    )  # fmt: skip
    attention_sink_bias = False  # published layers of these kinds have none
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: AnyText = "silu"
    kv_lora_rank: OwnWidth = 0
    q_lora_rank: OwnWidth | None = 0
    qk_nope_head_dim: OwnWidth = 0
    qk_rope_head_dim: OwnWidth = 0
    v_head_dim: OwnWidth = 0
    ttt_steps: Depth = 4
    depth_decay: Decay = 0.8
    depth_share: PositiveFraction = 1.0
    later_depths_from: Annotated[float, Field(ge=0, le=0.99)] = 0.0

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim if self.kv_lora_rank else self.head_dim

    def check(self) -> None:
        if self.kv_lora_rank:
            self._check_latent()
        super().check()
        if self.hidden_act not in ACT2FN:
            raise UserError(
                f"hidden_act={self.hidden_act!r} is not an activation of transformers; silu is the usual one"
            )
        window = self.sliding_window or 0
        if 0 < window <= self.ttt_steps:
            raise UserError(
                f"sliding_window={window} must be larger than ttt_steps={self.ttt_steps}, or drafted tokens "
                "would lose sight of the text; raise it, or set 0 for no window"
            )

    def _check_latent(self) -> None:
        """Derives the sizes of latent attention's heads."""
        sizes = {name: getattr(self, name) for name in LATENT_KEYS}
        if not self.qk_rope_head_dim or not self.v_head_dim:
            raise UserError(
                f"kv_lora_rank={self.kv_lora_rank} is latent attention, whose heads need qk_rope_head_dim and v_head_dim, "
                f"but {sizes}; set them, or leave kv_lora_rank out"
            )
        self.q_lora_rank = self.q_lora_rank or 0
        derived = {
            "head_dim": self.qk_nope_head_dim + self.qk_rope_head_dim,
            "num_key_value_heads": self.num_attention_heads,
        }
        for name, size in derived.items():
            if getattr(self, name) not in (0, size):
                raise UserError(
                    f"{name}={getattr(self, name)}, but latent attention (kv_lora_rank) has {size}; set 0, or drop the key"
                )
            setattr(self, name, size)
        if self.qk_rope_head_dim % 2 or self.v_head_dim > self.head_dim:
            raise UserError(
                f"latent attention rotates pairs of qk_rope_head_dim={self.qk_rope_head_dim} entries, and its values "
                f"(v_head_dim={self.v_head_dim}) are at most as wide as its keys ({self.head_dim}); change these sizes"
            )
        for key in ("qk_norm", "attention_bias", "sliding_window"):
            if getattr(self, key):
                raise UserError(
                    f"{key} is not computed by latent attention (kv_lora_rank); drop it"
                )

    @classmethod
    def shapes(cls, target: Target, options: Json) -> Json:
        own = super().shapes(target, options)
        if not options.get("kv_lora_rank"):
            own["qk_norm"] = has_head_norms(target.layers[-1])
            return own
        config = last_layer_config(target.config)
        for name in LATENT_KEYS:
            own[name] = getattr(config, name, None) or 0
        for name in ("head_dim", "num_key_value_heads"):  # follow from these
            own.pop(name, None)
        return own


class LastStateConfig(LayerConfig):
    """Layers that read the target's last hidden state and predict states of its width."""

    feature_layers = (LAST,)
    target_width = True


BlockWeighting = Literal["exp", "dpace", "equal"]
FULL = "full_attention"
SLIDING = "sliding_attention"
LayerType = Literal["full_attention", "sliding_attention"]


class BlockConfig(DecoderConfig):
    """Block-parallel drafters, which use the target's embedding and head.

    Attributes:
        block_size: tokens of a block, the last committed one included.
        sample_from_anchor: the block's first token predicts too, so that each of them predicts the
            token behind itself; False predicts at the masks only, each of which stands at the
            position that it predicts.
        layer_types: `sliding_attention` for layers that see `sliding_window` positions,
            `full_attention` for those that see all; None: all layers are of one type, with the
            window if there is one. A window bounds a sequence's cache only where all layers have it.
        causal: a token of a block sees earlier ones of it alone; `sliding` in layers with a window
            alone; False shows it all of the block.
        attention_sink_bias: a learned logit per query head and layer joins the softmax without a
            value (as in gpt-oss), so that a head may attend to nothing.
        feature_layers: target hidden states that are fused, any number; empty for those that the
            data stores, else the target's default three.
        mask_token_id: the token whose embedding stands at positions to predict; None learns an
            embedding.
        train_head: train and save a copy of the target's head rows; False uses the target's,
            frozen.
        anchor_share: share of the possible blocks that a step trains on; their losses keep their
            weight in expectation.
        weighting: `exp` weights depth k (from 0) by exp(-k / gamma); `equal` all depths alike;
            `dpace` by how likely the block is right there and deeper, with the drafter's
            probabilities q of the data's tokens smoothed to (1 - dpace_alpha) q + dpace_alpha.
        gamma: of `exp`. dpace_alpha: of `dpace`.
    """

    recipe_keys: ClassVar[tuple[str, ...]] = (
        "anchor_share", "weighting", "gamma", "dpace_alpha", "position_offset", "extra_vocab_size", "loss",
    )  # fmt: skip
    target_width = True
    # What `DraftLayer` reads and published checkpoints fix.
    qk_norm = True
    attention_bias = False
    mlp_bias = False
    hidden_act = "silu"
    num_hidden_layers: Layers = 2
    feature_layers: tuple[FeatureLayer, ...] = ()
    block_size: Block = 8
    sample_from_anchor: bool = False
    layer_types: tuple[LayerType, ...] | None = None
    causal: bool | Literal["sliding"] = False
    attention_sink_bias: bool = False
    mask_token_id: Size | None = None
    train_head: bool = False
    anchor_share: PositiveFraction = 1.0
    weighting: BlockWeighting = "exp"
    gamma: PositiveAmount = 4.0
    dpace_alpha: Smoothing = 0.5

    @property
    def depth(self) -> int:
        """Number of tokens that a block predicts."""
        if self.sample_from_anchor:
            return self.block_size
        return self.block_size - 1

    @property
    def windows(self) -> tuple[int, ...]:
        """Positions that each layer's tokens see, their own included; 0 for all."""
        window = self.sliding_window or 0
        types = self.layer_types or [SLIDING] * self.num_hidden_layers
        return tuple(window if kind == SLIDING else 0 for kind in types)

    @property
    def each_type(self) -> list[str]:
        """`layer_types` of each layer, as published configs write them."""
        return [SLIDING if window else FULL for window in self.windows]

    @property
    def causal_layers(self) -> tuple[bool, ...]:
        """Of each layer, whether a token of a block sees earlier ones of it alone."""
        if self.causal == "sliding":
            return tuple(window > 0 for window in self.windows)
        return (self.causal,) * self.num_hidden_layers

    def check(self) -> None:
        super().check()
        # Layers of one type have one spelling.
        types = self.layer_types
        if types is not None:
            windowed = SLIDING in types
            if len(types) != self.num_hidden_layers or windowed != bool(self.sliding_window):
                raise UserError(
                    f"layer_types={list(types)} do not fit num_hidden_layers={self.num_hidden_layers} and "
                    f"sliding_window={self.sliding_window}: name a type per layer, {SLIDING} if there is a window"
                )
            if len(set(types)) == 1:
                self.layer_types = None
        if self.causal == "sliding" and self.layer_types is None:
            self.causal = bool(self.sliding_window)

        window = self.sliding_window or 0
        if 0 < window <= self.block_size:
            raise UserError(
                f"sliding_window={window} must be larger than block_size={self.block_size}, or the last tokens of a "
                "block would lose sight of the text; raise it, or set 0 for no window"
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"mask_token_id={self.mask_token_id} is not a token of the target, which has {self.vocab_size}; drop the key to "
                "learn an embedding"
            )

    @classmethod
    def shapes(cls, target: Target, options: Json) -> Json:
        return {**super().shapes(target, options), "feature_layers": target.default_feature_layers}


def layer_config(config: PreTrainedConfig, layer: int) -> PreTrainedConfig:
    """The text config of a target's layer: layers may differ in their heads (Gemma 4)."""
    layers = getattr(config, "per_layer_config", ())
    # Its entries may be made on demand, so that it knows no negative index.
    return layers[layer % len(layers)] if layers else config


def last_layer_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The text config of a target's last layer."""
    return layer_config(config, -1)


def rope_parameters_of(config: PreTrainedConfig) -> Json:
    """The target's rope_parameters for layers without a window.

    If their scaling is unsupported, only rope_theta.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # Families with two kinds of layers (Gemma 3) have parameters by kind.
    rope = dict(rope.get("full_attention", rope))
    if not rope.get("rope_theta"):
        rope["rope_theta"] = 10000.0
    if rope.get("rope_type", "default") in ROPE_TYPES:
        return rope
    return {"rope_theta": rope["rope_theta"]}


def has_head_norms(layer: nn.Module) -> bool:
    """True if a layer's attention norms queries and keys per head, as in Qwen3 and Gemma 3."""
    attention = getattr(layer, "self_attn", None)
    head_dim = getattr(attention, "head_dim", None)
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name, None)
        if norm is None or getattr(norm, "weight", norm).shape != (head_dim,):
            return False
    return True
