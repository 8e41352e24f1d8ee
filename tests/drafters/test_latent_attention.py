"""Latent attention in a draft layer: equal to transformers' DeepSeek-V3, copied from it, lossless, shipped and refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from drafttrain.drafters.common.layers import LatentAttention, Rotary
from drafttrain.drafters.eagle3.export import SHIPPING, unsupported_features
from drafttrain.drafters.eagle3.model import Eagle3Config
from drafttrain.errors import UserError
from drafttrain.formats.engines import ENGINES
from drafttrain.target import Target
from tests.conftest import make_target, make_tokenizer
from tests.drafters.eagle3_files import FLAT, SPECULATORS, make_head, write_eagle3
from tests.drafters.eagle3_options import LATENT
from tests.drafters.layer_kinds import make_kind
from tests.files import dump_json, load_json

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def deepseek(**more) -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        max_position_embeddings=256,
        **{**LATENT, "rope_parameters": PLAIN, **more},
    )


def causal(query, key, value):
    """[t, heads, e] each -> [t, heads * e], every token over those up to itself."""
    scores = torch.einsum("qhe,khe->hqk", query, key) / query.shape[-1] ** 0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khe->qhe", weights, value).flatten(1)


@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("narrow", [0, LATENT["q_lora_rank"]])
@torch.no_grad()
def test_it_is_deepseeks_attention(rope, narrow):
    config = deepseek(q_lora_rank=narrow or None, rope_parameters=rope)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = DeepseekV3Attention(config, layer_idx=0).eval()
    own = Eagle3Config(
        vocab_size=300,
        hidden_size=32,
        num_attention_heads=4,
        rms_norm_eps=1e-6,  # transformers' class norms the narrow vectors with its default
        rope_parameters=rope,
        feature_layers=(1,),
        **{**LATENT, "q_lora_rank": narrow},
    )
    ours = LatentAttention(own, 32)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(20, 32)
    at = torch.arange(20)
    later = torch.ones(20, 20).triu(1)[None, None] * torch.finfo(torch.float32).min
    wanted = theirs(x[None], DeepseekV3RotaryEmbedding(config)(x[None], at[None]), later)[0][0]
    tables = Rotary(own.rotary_dim, rope).tables(at, torch.float32)
    torch.testing.assert_close(ours(x, tables, causal), wanted, rtol=1e-5, atol=1e-6)
    last = ours(x, tables, lambda q, k, v: causal_rows(q, k, v, at[15:]), at[15:])
    torch.testing.assert_close(last, wanted[15:], rtol=1e-5, atol=1e-6)


def causal_rows(query, key, value, rows):
    """As `causal`, of some rows' queries."""
    every = query.new_zeros(len(key), *query.shape[1:])
    every[rows] = query
    return causal(every, key, value)[rows]


def test_its_sizes_are_the_targets_and_its_weights_too(tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "target"
    AutoModelForCausalLM.from_config(deepseek()).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    target = Target.load(str(folder), "float32", "cpu")
    drafter = make_kind("eagle3", target, torch.arange(40, 240), kv_lora_rank=12)
    config = drafter.config
    assert {name: getattr(config, name) for name in LATENT} == LATENT
    assert config.head_dim == 10 and config.num_key_value_heads == 4
    theirs = target.layers[-1].self_attn
    ours = drafter.midlayer.self_attn
    assert torch.equal(ours.kv_b_proj.weight, theirs.kv_b_proj.weight)
    assert torch.equal(ours.kv_a_proj_with_mqa.weight[:, 32:], theirs.kv_a_proj_with_mqa.weight)
    torch.testing.assert_close(ours.q_a_layernorm.weight, theirs.q_a_layernorm.weight)


def test_both_engines_get_one_form_which_comes_back_from_their_names(tmp_path):
    target = make_target(layers=8)
    head = make_head(target, **LATENT, rope_parameters=YARN, fc_norm=True)
    write_eagle3(head, tmp_path / "v", SPECULATORS, dtype=torch.float32)
    write_eagle3(head, tmp_path / "s", FLAT, dtype=torch.float32)
    described = load_json(tmp_path / "v" / "config.json")
    assert described == load_json(tmp_path / "s" / "config.json")
    assert described["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    assert described["model_type"] == "deepseek_v2" and "head_dim" not in described
    # Published configs have the keys of their targets' experts too, and earlier or other names.
    described["use_aux_norm"] = described.pop("fc_norm")
    described |= {
        "head_dim": 4,
        "num_nextn_predict_layers": 0,
        "n_routed_experts": 256,
        "scoring_func": "sigmoid",
        "rope_interleave": True,
    }
    dump_json(
        tmp_path / "v" / "config.json",
        {**described, "architectures": ["DeepseekV3Eagle3DraftModel"]},
    )
    back = SHIPPING.read(tmp_path / "v", target.identity())
    for name, weight in head.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name
    assert back.config.rope_parameters["mscale_all_dim"] == 1.0
    dump_json(tmp_path / "v" / "config.json", {**described, "rope_interleave": False})
    with pytest.raises(UserError, match="rope_interleave false"):
        SHIPPING.read(tmp_path / "v", target.identity())


@pytest.mark.parametrize(
    ("engine", "options", "reasons"),
    [
        ("vLLM", {"num_hidden_layers": 2, "norm_before_residual": True}, []),
        ("vLLM", {"q_lora_rank": 0}, ["q_lora_rank=0: vLLM joins q_a_proj and kv_a_proj"]),
        ("vLLM", {"norm_before_fc": True}, ["norm_before_fc: vLLM's class"]),
        ("SGLang", {"num_hidden_layers": 2}, ["num_hidden_layers=2: SGLang's class has one layer"]),
        ("SGLang", {"norm_before_residual": True}, ["norm_before_residual: SGLang's class"]),
        ("TensorRT-LLM, Triton", {}, ["kv_lora_rank: the engine's layer has no latent attention"]),
    ],
)
def test_what_engines_lack_is_refused(engine, options, reasons):
    head = make_head(make_target(layers=8), **{**LATENT, **options})
    found = unsupported_features(head, ENGINES[engine])
    assert len(found) >= len(reasons)
    for text in reasons:
        assert any(each.startswith(text) for each in found), found
    assert bool(found) == bool(reasons)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_lora_rank": 12}, "heads need qk_rope_head_dim and v_head_dim"),
        ({**LATENT, "qk_rope_head_dim": 3}, "rotates pairs of qk_rope_head_dim=3"),
        ({**LATENT, "v_head_dim": 11}, r"\(v_head_dim=11\) are at most as wide as its keys \(10\)"),
        ({**LATENT, "head_dim": 16}, "head_dim=16, but latent attention .* has 10; set 0"),
        ({**LATENT, "qk_norm": True}, "qk_norm is not computed by latent attention"),
        ({**LATENT, "sliding_window": 16}, "sliding_window is not computed by latent attention"),
    ],
)
def test_sizes_that_cannot_work_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Eagle3Config.for_target(make_target(layers=8), **options)
