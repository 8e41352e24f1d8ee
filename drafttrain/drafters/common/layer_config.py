"""Shape and training recipe of drafters with decoder layers; field names are those of published checkpoints where they have
one."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from drafttrain.drafters.common.layers import ROPE_TYPES, rope_parameters_of
from drafttrain.errors import UserError
from drafttrain.target import Target
from drafttrain.target.attention import LAST


class LayerConfig(PreTrainedConfig):
    """What a drafter with decoder layers is, and how it is trained.

    Attributes:
        hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim, num_hidden_layers: of its layers.
        draft_vocab_size: d, kept tokens; 0 keeps the target's whole vocabulary.
        qk_norm: norms per query and key head (Qwen3). attention_bias, mlp_bias: of the linear layers there.
        hidden_act: the MLP's activation. sliding_window: positions that a token sees, its own included; 0 for all.
        rope_parameters: as in transformers 5, {"rope_type": "yarn", "factor": ...}; wins over rope_theta.
        max_position_embeddings: for engines; nothing here depends on it.
        ttt_steps: depths trained. depth_decay: weight of depth k is depth_decay ** k.
        depth_share: share of anchors, drawn anew each step, that go on to depths after the first. Those losses keep their
            weight in expectation; less than 1 trains more first-depth anchors in the same time.
        target: the target's identity, checked before use.

    Raises:
        UserError: values that cannot work, or not together.
    """

    drafter_kind = ""
    # What a run may set anew when it continues a drafter; everything else is what the weights were made for.
    recipe_keys: ClassVar[tuple[str, ...]] = ("ttt_steps", "depth_decay", "depth_share", "loss")

    def __init__(
        self,
        hidden_size: int = 64,
        intermediate_size: int = 0,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 0,
        head_dim: int = 0,
        num_hidden_layers: int = 1,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        rope_parameters: dict[str, Any] | None = None,
        max_position_embeddings: int = 131072,
        vocab_size: int = 0,
        draft_vocab_size: int = 0,
        qk_norm: bool = False,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        hidden_act: str = "silu",
        sliding_window: int = 0,
        ttt_steps: int = 4,
        depth_decay: float = 0.8,
        depth_share: float = 1.0,
        loss: str = "kl",
        target: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.drafter_kind = type(self).drafter_kind
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
        self.qk_norm, self.attention_bias, self.mlp_bias = qk_norm, attention_bias, mlp_bias
        self.hidden_act = hidden_act
        self.sliding_window = sliding_window or 0
        self.ttt_steps = ttt_steps
        self.depth_decay = depth_decay
        self.depth_share = depth_share
        self.loss = loss
        self.target = target or {}
        self._check()
        super().__init__(**{"tie_word_embeddings": False, **kwargs})
        self.rope_theta = self.rope_parameters["rope_theta"]  # the base class has completed them

    def _check(self) -> None:
        kind = self.rope_parameters.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise UserError(f"rope_parameters: rope_type={kind!r} is not one of {', '.join(ROPE_TYPES)}")
        if self.hidden_act not in ACT2FN:
            raise UserError(f"hidden_act={self.hidden_act!r} is no activation of transformers; silu is the usual one")
        if self.num_hidden_layers < 1:
            raise UserError(f"num_hidden_layers={self.num_hidden_layers}: a drafter has at least 1 layer")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_key_value_heads={self.num_key_value_heads} must divide num_attention_heads={self.num_attention_heads}"
            )
        if self.ttt_steps < 1:
            raise UserError(f"ttt_steps={self.ttt_steps}: at least 1 depth is trained")
        if 0 < self.sliding_window <= self.ttt_steps:
            raise UserError(
                f"sliding_window={self.sliding_window} must be larger than ttt_steps={self.ttt_steps}, or drafted tokens "
                "would lose sight of the text; raise it, or set 0 for no window"
            )

    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Any:
        """The target's own shapes, positions and query norms where `options` say nothing."""
        config = target.config
        heads = options.get("num_attention_heads", config.num_attention_heads)
        own = {
            "hidden_size": target.hidden_size,
            "intermediate_size": getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            "head_dim": getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads,
            "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-5),
            "rope_parameters": rope_parameters_of(config),
            "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 131072,
            "qk_norm": has_head_norms(target.layers[-1]),
        }
        if "rope_theta" in options and "rope_parameters" not in options:
            own["rope_parameters"] = None
        if "hidden_size" in options and options["hidden_size"] != target.hidden_size:
            # Heads and MLP of another width than the target's follow the own one.
            del own["intermediate_size"], own["head_dim"]
            if heads % own["num_key_value_heads"]:
                del own["num_key_value_heads"]
        fixed = {"vocab_size": target.vocab_size, "target": target.identity()}
        return cls(**{**own, **options, **fixed})


class LastStateConfig(LayerConfig):
    """Of kinds that go on from the state which the target's head reads, with states of their own that are of its width."""

    feature_layers = (LAST,)

    def __init__(self, **kwargs: Any):  # or the base class of all configs writes one
        super().__init__(**kwargs)

    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Any:
        width = options.get("hidden_size", target.hidden_size)
        if width != target.hidden_size:
            raise UserError(
                f"hidden_size={width}: kind={cls.drafter_kind!r} reads and writes states of the target, which have "
                f"{target.hidden_size} entries; drop the key, or choose a smaller intermediate_size"
            )
        return super().for_target(target, **options)


def has_head_norms(layer: nn.Module) -> bool:
    """True for a layer whose attention norms queries and keys per head, as Qwen3's and Gemma 3's do."""
    attention = getattr(layer, "self_attn", None)
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    head_dim = getattr(attention, "head_dim", None)
    return all(norm is not None and getattr(norm, "weight", norm).shape == (head_dim,) for norm in norms)
