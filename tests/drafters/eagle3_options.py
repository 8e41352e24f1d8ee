"""Options of EAGLE-3 and P-EAGLE layers, all at once."""

from __future__ import annotations

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
EVERYTHING = {
    "num_hidden_layers": 3,
    "fc_norm": True,
    "norm_output": True,
    "norm_before_residual": True,
    "qk_norm": True,
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "gelu_pytorch_tanh",
    "sliding_window": 6,
    "hidden_size": 48,
    "rope_parameters": YARN,
    "feature_layers": (0, 1, 2, 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
}
