"""Small random models of every causal language model that the installed transformers has."""

from __future__ import annotations

import inspect

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from drafttrain.errors import UserError
from drafttrain.target import Target
from tests.inference.fakes import sharpen

# Sizes under the names that configs give them; each config takes those that it knows.
_FOUR = "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_hidden_layers n_layer num_layers n_layers"
_FOUR += " decoder_layers num_local_experts num_experts n_routed_experts moe_num_experts"
_FOUR += " linear_num_value_heads encoder_attention_heads laurel_rank mamba_n_heads"
_EIGHT = "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim query_pre_attn_scalar kv_channels index_head_dim state_size"
_EIGHT += " mamba_d_state linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input"
_BY_SIZE = {
    32: "hidden_size n_embd d_model dim embed_dim word_embed_proj_dim attention_hidden_size",
    4: _FOUR,
    8: _EIGHT,
    48: "intermediate_size n_inner ffn_dim decoder_ffn_dim d_ff intermediate_size_mlp ffn_hidden_size encoder_ffn_dim",
    24: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    16: "q_lora_rank kv_lora_rank mamba_d_head",
    60: "vocab_size vocab_size_per_layer_input",
    128: "max_position_embeddings n_positions index_topk",  # selecting fewer breaks exact ties by length
    7: "sliding_window",
    2: "num_key_value_heads num_experts_per_tok moe_topk moe_k index_n_heads linear_num_key_heads mamba_expand",
    1: "n_group topk_group first_k_dense_replace num_dense_layers n_shared_experts mamba_n_groups encoder_layers bos_token_id",
    0: "pad_token_id num_kv_shared_layers num_nextn_predict_layers",
}
_SIZES = {name: size for size, names in _BY_SIZE.items() for name in names.split()} | {
    "eos_token_id": None
}
_FACTORS = {
    **{
        "logits_scaling": 0.3,
        "logit_scale": 0.4,
        "lm_head_multiplier": 0.5,
        "final_logit_softcapping": 8.0,
    },
    **{
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
        "mup_enabled": True,
    },
}
VARIANTS = {
    "plain": {},
    "factors": _FACTORS,
    "full attention": {
        "layer_types": ["full_attention"] * 4,
        "sliding_window": None,
        "attention_chunk_size": None,
    },
    "mixed": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "all heads": {"num_key_value_heads": 4, **_FACTORS},
}
FAMILIES = {config.model_type: config for config in MODEL_FOR_CAUSAL_LM_MAPPING}
PROMPT = torch.arange(3, 15)
_MOST_WEIGHTS = 3e7


def known(config_class):
    names = {name for cls in config_class.__mro__ for name in getattr(cls, "__annotations__", {})}
    return names | set(inspect.signature(config_class.__init__).parameters)


def build(config_class, more):
    """A small random model; raises whatever transformers raises for sizes that do not go together."""
    sizes = {**_SIZES, **more}
    renamed = getattr(config_class, "attribute_map", {})
    own = {
        name: value for name, value in sizes.items() if name in known(config_class) - set(renamed)
    }
    for name, inner in (getattr(config_class, "sub_configs", {}) or {}).items():
        if isinstance(inner, type):
            own[name] = {key: value for key, value in sizes.items() if key in known(inner)}
    torch.manual_seed(0)
    config = config_class(**own)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    with torch.device("meta"):
        if (
            sum(weight.numel() for weight in model_class._from_config(config).parameters())
            > _MOST_WEIGHTS
        ):
            raise RuntimeError("too large")
    model = model_class._from_config(config)
    sharpen(model, seed=8)
    model.eval()
    with torch.no_grad():
        model(input_ids=PROMPT[None], use_cache=False)
    return model


def wrapped(model, name):
    """The target and '', or None and the error."""
    try:
        return Target.wrap(model, None, name), ""
    except UserError as error:
        return None, str(error)
