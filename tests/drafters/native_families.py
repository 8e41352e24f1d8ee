"""Tiny checkpoints in the real layouts of families that come with a prediction module, and what such a module computes.

The references are written from the published definitions, over a checkpoint's raw tensors, and share no code with the package.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.conftest import make_tokenizer

H = 32
HEADS = 4
LAYERS = 4
VOCAB = 300
EPS = 1e-6
COMMON = {
    "hidden_size": H,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "rms_norm_eps": EPS,
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "tie_word_embeddings": False,
}
GATED = {
    **{
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
    },
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
QWEN_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
ROUTED = {
    **{
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
    },
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
}
LATENT = {
    **{
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
    **{"num_key_value_heads": HEADS, "n_group": 4, "topk_group": 2},
}
GLM = {
    **{
        "num_key_value_heads": 2,
        "head_dim": 16,
        "use_qk_norm": True,
        "attention_bias": True,
        "n_group": 1,
        "topk_group": 1,
    },
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


class Family(NamedTuple):
    """config and model classes, further config values, prefix of the module and of its layer."""

    config: type
    model: type
    values: dict
    module: str
    layer: str


FAMILIES = {
    "qwen3-next": Family(
        Qwen3NextConfig, Qwen3NextForCausalLM, {**GATED, **QWEN_MOE}, "mtp.", "layers.0."
    ),
    "qwen3.5": Family(Qwen3_5TextConfig, Qwen3_5ForCausalLM, GATED, "mtp.", "layers.0."),
    "deepseek-v3": Family(
        DeepseekV3Config, DeepseekV3ForCausalLM, {**ROUTED, **LATENT}, f"model.layers.{LAYERS}.", ""
    ),
    "glm-4-moe": Family(
        Glm4MoeConfig, Glm4MoeForCausalLM, {**ROUTED, **GLM}, f"model.layers.{LAYERS}.", ""
    ),
}
NAMES = {
    "mtp.": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    f"model.layers.{LAYERS}.": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
}


def module_tensors(name):
    """Random tensors of a family's module, by their names in the checkpoint behind the module's prefix."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape, around=0.0, size=0.25):
        return around + size * torch.randn(*shape, generator=generator)

    family = FAMILIES[name]
    gated = family.module == "mtp."
    one = 0.0 if family.module == "mtp." else 1.0
    e = family.values.get("head_dim", 0)
    kv = family.values["num_key_value_heads"]
    first, second, project, norm = NAMES[family.module]
    around = {f"{each}.weight": random(H, around=one) for each in (first, second, norm)}
    around[f"{project}.weight"] = random(H, 2 * H)
    layer = {
        f"{each}_layernorm.weight": random(H, around=one) for each in ("input", "post_attention")
    }
    shapes = {
        "q_proj": ((2 if gated else 1) * HEADS * e, H),
        "k_proj": (kv * e, H),
        "v_proj": (kv * e, H),
        "o_proj": (H, HEADS * e),
    }
    norms = {"q_norm": e, "k_norm": e}
    if name == "deepseek-v3":
        shapes = {
            "q_a_proj": (16, H),
            "q_b_proj": (HEADS * 16, 16),
            "kv_a_proj_with_mqa": (16 + 8, H),
            "kv_b_proj": (HEADS * (8 + 12), 16),
            "o_proj": (H, HEADS * 12),
        }
        norms = {"q_a_layernorm": 16, "kv_a_layernorm": 16}
    layer |= {f"self_attn.{key}.weight": random(*shape) for key, shape in shapes.items()}
    layer |= {f"self_attn.{key}.weight": random(size, around=one) for key, size in norms.items()}
    if name == "glm-4-moe":
        layer |= {
            f"self_attn.{key}.bias": random(shapes[key][0])
            for key in ("q_proj", "k_proj", "v_proj")
        }

    def mlp(where, inner):
        return {
            f"{where}.gate_proj.weight": random(inner, H),
            f"{where}.up_proj.weight": random(inner, H),
            f"{where}.down_proj.weight": random(H, inner),
        }

    experts = family.values.get("num_experts") or family.values.get("n_routed_experts")
    if experts is None:
        layer |= mlp("mlp", 48)
    else:
        layer["mlp.gate.weight"] = random(experts, H)
        for i in range(experts):
            layer |= mlp(f"mlp.experts.{i}", 24)
        if gated:
            layer |= {**mlp("mlp.shared_expert", 20), "mlp.shared_expert_gate.weight": random(1, H)}
        else:
            layer |= {
                **mlp("mlp.shared_experts", 24),
                "mlp.gate.e_score_correction_bias": random(experts),
            }
    return {**around, **{family.layer + key: weight for key, weight in layer.items()}}


def write_checkpoint(name, folder, more=None):
    """A target's folder with its module; returns the module's tensors behind their prefix."""
    family = FAMILIES[name]
    torch.manual_seed(1)
    config = family.config(**{**COMMON, **family.values}, num_nextn_predict_layers=1)
    model = family.model(config)
    with torch.no_grad():
        for key, weight in model.named_parameters():  # norms that matter
            if "norm" in key:
                weight += 0.2 * torch.randn_like(weight)
    model.save_pretrained(folder)
    make_tokenizer(VOCAB).save_pretrained(folder)
    tensors = module_tensors(name)
    path = folder / "model.safetensors"
    files = {family.module + key: weight for key, weight in tensors.items()}
    if family.module != "mtp.":  # these files repeat the target's embedding and head
        own = load_file(path)
        files[f"{family.module}embed_tokens.weight"] = own["model.embed_tokens.weight"].clone()
        files[f"{family.module}shared_head.head.weight"] = own["lm_head.weight"].clone()
    save_file({**load_file(path), **files, **(more or {})}, path, metadata={"format": "pt"})
    return tensors


# -- what a module computes -------------------------------------------------------------------------------------------


def reference(name, tensors, embeds, states, positions):
    """[t, h] embeddings and target states of one row -> [t, h] the module's normed output."""
    family, (first, second, project, norm) = FAMILIES[name], NAMES[FAMILIES[name].module]
    shift = (
        1.0 if family.module == "mtp." else 0.0
    )  # these families store the factors of norms minus one

    def normed(x, key):
        return (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
            * (tensors[f"{key}.weight"] + shift)
        )

    weights = {key.removeprefix(family.layer): weight for key, weight in tensors.items()}
    x = (
        torch.cat((normed(embeds, first), normed(states, second)), dim=-1)
        @ tensors[f"{project}.weight"].T
    )
    attention = latent_attention if name == "deepseek-v3" else grouped_attention
    x = x + attention(
        weights, normed(x, family.layer + "input_layernorm"), positions, family.values, shift
    )
    x = x + mixture(weights, normed(x, family.layer + "post_attention_layernorm"), family.values)
    return normed(x, norm)


def rms(x, weight, shift=0.0):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (weight + shift)


def linear(weights, key, x):
    return F.linear(x, weights[f"{key}.weight"], weights.get(f"{key}.bias"))


def angles(positions, width):
    return positions[:, None] * 1e4 ** (-torch.arange(0, width, 2) / width)  # [t, width / 2]


def halves(x, positions, width):
    """Rotates the first `width` entries of heads x [t, heads, e], entry i with i + width / 2."""
    angle = angles(positions, width)[:, None]
    a = x[..., : width // 2]
    b = x[..., width // 2 : width]
    rest = x[..., width:]
    return torch.cat(
        (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest), dim=-1
    )


def attended(query, key, value):
    """Causal attention of heads [t, heads, e], [t, kv, e], [t, kv, ev] -> [t, heads * ev]."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhe,khe->hqk", query, key) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khe->qhe", scores.softmax(-1), value).flatten(1)


def grouped_attention(weights, x, positions, values, shift):
    e = values["head_dim"]
    width = int(values["head_dim"] * values["rope_parameters"]["partial_rotary_factor"])
    query = linear(weights, "self_attn.q_proj", x).view(len(x), HEADS, -1)
    query, gate = query[..., :e], query[..., e:]  # the gate is there in Qwen3-Next and Qwen3.5
    key, value = (linear(weights, f"self_attn.{part}_proj", x).view(len(x), -1, e) for part in "kv")
    query, key = (
        rms(part, weights[f"self_attn.{n}_norm.weight"], shift)
        for part, n in ((query, "q"), (key, "k"))
    )
    out = attended(halves(query, positions, width), halves(key, positions, width), value)
    return linear(weights, "self_attn.o_proj", out * gate.flatten(1).sigmoid() if shift else out)


def latent_attention(weights, x, positions, values, shift):
    nope = values["qk_nope_head_dim"]
    rope = values["qk_rope_head_dim"]

    def pairs(x):  # entries 2i and 2i + 1 rotate together
        angle = angles(positions, rope)[:, None]
        a = x[..., 0::2]
        b = x[..., 1::2]
        return torch.stack(
            (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1
        ).flatten(-2)

    latent = rms(
        linear(weights, "self_attn.q_a_proj", x), weights["self_attn.q_a_layernorm.weight"]
    )
    query = linear(weights, "self_attn.q_b_proj", latent).view(len(x), HEADS, nope + rope)
    compressed = linear(weights, "self_attn.kv_a_proj_with_mqa", x)
    latent = compressed[:, : values["kv_lora_rank"]]
    shared = compressed[:, None, values["kv_lora_rank"] :]
    latent = rms(latent, weights["self_attn.kv_a_layernorm.weight"])
    both = linear(weights, "self_attn.kv_b_proj", latent).view(len(x), HEADS, -1)
    key = torch.cat((both[..., :nope], pairs(shared).expand(-1, HEADS, -1)), dim=-1)
    query = torch.cat((query[..., :nope], pairs(query[..., nope:])), dim=-1)
    return linear(weights, "self_attn.o_proj", attended(query, key, both[..., nope:]))


def dense(weights, where, x):
    return linear(
        weights,
        f"{where}.down_proj",
        F.silu(linear(weights, f"{where}.gate_proj", x)) * linear(weights, f"{where}.up_proj", x),
    )


def mixture(weights, x, values):
    if "mlp.gate.weight" not in weights:
        return dense(weights, "mlp", x)
    products = linear(weights, "mlp.gate", x)
    count = values["num_experts_per_tok"]
    if (
        "mlp.gate.e_score_correction_bias" in weights
    ):  # sigmoid scores; the bias chooses and does not weigh
        scores = products.sigmoid()
        choice = scores + weights["mlp.gate.e_score_correction_bias"]
        groups = choice.view(len(x), values["n_group"], -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(values["topk_group"], dim=-1).indices
        allowed = torch.zeros(len(x), values["n_group"]).scatter_(1, best, 1.0).bool()
        chosen = (
            groups.masked_fill(~allowed[..., None], -torch.inf)
            .flatten(1)
            .topk(count, dim=-1)
            .indices
        )
        shares = scores.gather(1, chosen)
        shares = shares / shares.sum(-1, keepdim=True) * values["routed_scaling_factor"]
        shared = dense(weights, "mlp.shared_experts", x)
    else:
        shares, chosen = products.softmax(-1).topk(count, dim=-1)
        shares = shares / shares.sum(-1, keepdim=True)
        shared = (
            dense(weights, "mlp.shared_expert", x)
            * linear(weights, "mlp.shared_expert_gate", x).sigmoid()
        )
    rows = [
        sum(
            share * dense(weights, f"mlp.experts.{int(i)}", x[t : t + 1])[0]
            for share, i in zip(shares[t], chosen[t], strict=True)
        )
        for t in range(len(x))
    ]
    return torch.stack(rows) + shared
