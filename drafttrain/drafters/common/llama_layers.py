"""Decoder layers of the Llama family in engines' checkpoints: config keys and rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedConfig

from drafttrain.drafters.common.configs import LayerConfig
from drafttrain.files import Json

# Keys that a layer has in every engine's config and in ours, and the default where a checkpoint
# lacks one (None: required).
LAYER_KEYS: Json = {
    "hidden_size": None,
    "intermediate_size": None,
    "num_attention_heads": None,
    "num_key_value_heads": 0,
    "head_dim": 0,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 131072,
    "vocab_size": None,
}
# Keys of an export whose layers are a Llama's, and the fields of our config that hold the same.
ENGINE_KEYS = {key: key for key in (*LAYER_KEYS, "rope_parameters")}


def rope_parameters(config: LayerConfig) -> Json:
    """The rotary embedding as in transformers 5: rope_type, rope_theta, its parameters."""
    rope: Json = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_parameters:
        rope |= config.rope_parameters
    return rope


def layer_keys(config: LayerConfig) -> Json:
    """A drafter's layers as keys of a Llama config."""
    rope = rope_parameters(config)
    own = config.to_dict()
    keys = {name: own[name] for name in LAYER_KEYS}
    keys["rope_parameters"] = rope
    keys["rope_theta"] = rope["rope_theta"]
    keys["tie_word_embeddings"] = False
    # vLLM reads this key last, and null there erases rope_parameters.
    if rope["rope_type"] != "default":
        keys["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return keys


def set_features(config: PreTrainedConfig, reasons: Mapping[str, str]) -> list[str]:
    """The reason against each feature that a config sets, by the feature's key."""
    return [f"{key}: {reason}" for key, reason in reasons.items() if getattr(config, key)]


def unsupported_by_llama(
    config: LayerConfig,
    windows: bool = False,
    partial: bool = False,
    latent: bool = False,
) -> list[str]:
    """The features of a drafter's layers that an engine's Llama layer does not support.

    Args:
        windows, partial, latent: the engine's layer has sliding windows, partly rotated heads, and
            latent attention.
    """
    found = []
    if config.kv_lora_rank and not latent:
        found.append("kv_lora_rank: the engine's layer has no latent attention")
    act = config.hidden_act
    if act != "silu":
        found.append(f"hidden_act={act!r}: the engine's MLP raises on anything but silu")
    window = config.sliding_window
    if window and not windows:
        found.append(f"sliding_window={window}: the engine's layer attends to everything")
    rotated = rope_parameters(config).get("partial_rotary_factor", 1.0)
    if rotated != 1.0 and not partial:
        found.append("partial_rotary_factor: the engine's layer rotates whole heads")
    return found
