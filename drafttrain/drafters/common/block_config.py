"""Shape and training recipe of block-parallel drafters; field names are those of published checkpoints where they have one."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from drafttrain.drafters.common.layers import ROPE_TYPES, rope_parameters_of
from drafttrain.errors import UserError
from drafttrain.target import Target

WEIGHTINGS = ("exp", "dpace")


class BlockConfig(PreTrainedConfig):
    """What a block-parallel drafter is. Its width is the target's, whose embedding and head it uses.

    Attributes:
        block_size: tokens of a block, the last committed one among them; one less is the deepest it drafts.
        intermediate_size, num_attention_heads, num_key_value_heads, head_dim, num_hidden_layers: of its layers, which norm
            queries and keys per head.
        draft_vocab_size: d, kept tokens; 0 keeps the target's whole vocabulary.
        feature_layers: target hidden states that are fused, any number; empty means the target's default three.
        mask_token_id: the token whose embedding stands at positions to be predicted; None learns one.
        train_head: the head is a copy of the target's rows that is trained and saved; else it is those rows, frozen.
        rope_parameters: as in transformers 5, {"rope_type": "yarn", "factor": ...}; wins over rope_theta.
        max_position_embeddings: for engines; nothing here depends on it.
        anchor_share: share of the possible blocks that a step trains on; their losses keep their weight in expectation.
        weighting: `exp` weights depth k (from 0) by exp(-k / gamma); `dpace` by how likely the block is still right there
            and deeper, with the drafter's probabilities q of the data's tokens smoothed to (1 - dpace_alpha) q + dpace_alpha.
        target: the target's identity, checked before use.

    Raises:
        UserError: values that cannot work, or not together.
    """

    # What a run may set anew when it continues a drafter; everything else is what the weights were made for.
    recipe_keys: tuple[str, ...] = ("anchor_share", "weighting", "gamma", "dpace_alpha", "loss")

    def __init__(
        self,
        hidden_size: int = 64,
        intermediate_size: int = 0,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 0,
        head_dim: int = 0,
        num_hidden_layers: int = 2,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        rope_parameters: dict[str, Any] | None = None,
        max_position_embeddings: int = 131072,
        vocab_size: int = 0,
        draft_vocab_size: int = 0,
        feature_layers: tuple[int, ...] = (),
        block_size: int = 8,
        mask_token_id: int | None = None,
        train_head: bool = False,
        anchor_share: float = 1.0,
        weighting: str = "exp",
        gamma: float = 4.0,
        dpace_alpha: float = 0.5,
        loss: str = "kl",
        target: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.drafter_kind = self.model_type.removeprefix("drafttrain_")
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size or 4 * hidden_size
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.num_hidden_layers = num_hidden_layers
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.rope_parameters = dict(rope_parameters or {})
        self.max_position_embeddings = max_position_embeddings
        self.vocab_size = vocab_size
        self.draft_vocab_size = draft_vocab_size or vocab_size
        self.feature_layers = tuple(feature_layers)
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.train_head = train_head
        self.anchor_share = anchor_share
        self.weighting, self.gamma, self.dpace_alpha = weighting, gamma, dpace_alpha
        self.loss = loss
        self.target = target or {}
        self._check()
        super().__init__(**{"tie_word_embeddings": False, **kwargs})
        self.rope_theta = self.rope_parameters["rope_theta"]  # the base class has completed them

    @property
    def depth(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - 1

    def _check(self) -> None:
        kind = self.rope_parameters.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise UserError(f"rope_parameters: rope_type={kind!r} is not one of {', '.join(ROPE_TYPES)}")
        if self.block_size < 2:
            raise UserError(
                f"block_size={self.block_size}: a block holds the last token and at least 1 to predict; use 8"
            )
        if self.num_hidden_layers < 1:
            raise UserError(f"num_hidden_layers={self.num_hidden_layers}: a drafter has at least 1 layer")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_key_value_heads={self.num_key_value_heads} must divide num_attention_heads={self.num_attention_heads}"
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"mask_token_id={self.mask_token_id} is no token of the target, which has {self.vocab_size}; drop the key to "
                "learn an embedding"
            )
        if not 0 < self.anchor_share <= 1:
            raise UserError(f"anchor_share={self.anchor_share} must be in (0, 1]; 1 trains on every block")
        if self.weighting not in WEIGHTINGS:
            raise UserError(f"weighting={self.weighting!r} is not one of {', '.join(WEIGHTINGS)}")
        if self.gamma <= 0 or not 0 <= self.dpace_alpha < 1:
            raise UserError(
                f"gamma={self.gamma} must be above 0 and dpace_alpha={self.dpace_alpha} in [0, 1); their defaults are 4 and 0.5"
            )

    @classmethod
    def for_target(cls, target: Target, **options: Any) -> BlockConfig:
        """The target's own shapes and positions where `options` say nothing.

        Raises:
            UserError: a width that is not the target's, or another value that cannot work.
        """
        config = target.config
        if options.get("hidden_size", target.hidden_size) != target.hidden_size:
            raise UserError(
                f"hidden_size={options['hidden_size']}: this kind uses the target's embedding and head, so its width is the "
                f"target's, {target.hidden_size}; drop the key"
            )
        own = {
            "intermediate_size": getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            "head_dim": getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads,
            "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-5),
            "rope_parameters": rope_parameters_of(config),
            "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 131072,
            "feature_layers": target.default_feature_layers,
        }
        if "rope_theta" in options and "rope_parameters" not in options:
            own["rope_parameters"] = None
        fixed = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "target": target.identity()}
        return cls(**{**own, **options, **fixed})
