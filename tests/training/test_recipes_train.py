"""Recipes for large targets train, each on a tiny random model of its target's family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from drafttrain.cli import main
from drafttrain.config import load_config
from drafttrain.recipes import recipe_path
from drafttrain.target import Target
from drafttrain.training.arguments import KEYS
from tests.conftest import make_tokenizer
from tests.files import large_recipes, load_json
from tests.training.runs import write_data

pytestmark = pytest.mark.slow

VOCABULARY = 300
WIDTHS = {
    "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "query_pre_attn_scalar": 8, "sliding_window": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}
# Their layers are served by vLLM, or built of parts with widths of their own: tests of those families build them.
LEFT_OUT = (
    "gemma-4-",
    "qwen3.5-",
    "qwen3.6-",
    "qwen3-vl-",
    "deepseek-v3/",
    "deepseek-v4-flash/",
    "kimi-k2",
    "glm-5.2/",
    "minimax-m3/",
    "nemotron-3-",
)
RECIPES = [name for name in large_recipes() if not name.startswith(LEFT_OUT)]


def tiny(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config of the same family and depth, a few entries wide."""
    text = config.get_text_config()
    raw = {
        name: value
        for name, value in text.to_dict().items()
        if name not in ("rope_scaling", "quantization_config")
    }
    raw |= {name: value for name, value in {**WIDTHS, **LATENT}.items() if raw.get(name)} | TOKENS
    return AutoConfig.for_model(
        **{**raw, "initializer_range": 0.2, "max_position_embeddings": 4096}
    )


def save(config: PreTrainedConfig, folder: Path) -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer = make_tokenizer(VOCABULARY)
    tokenizer.save_pretrained(folder)
    return Target.wrap(model, tokenizer, name=str(folder), dtype=torch.float32)


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.endswith("/mtp")])
def test_the_recipe_trains(name, tmp_path):
    path = recipe_path(name)
    config = load_config(name, [], KEYS)
    target = save(
        tiny(AutoConfig.from_pretrained(str(path.parent / "target.json"))), tmp_path / "target"
    )
    words = [
        f"target={tmp_path / 'target'}",
        f"data={write_data(tmp_path / 'data', target)}",
        f"output_dir={tmp_path / 'out'}",
    ]
    words += [
        "use_cpu=true",
        "dtype=float32",
        "max_steps=2",
        "max_length=64",
        "target_url=",
        "decode_tokens=8",
        "validation=0.2",
    ]
    if config.drafter.get("draft_vocab_size"):
        words.append("drafter.draft_vocab_size=255")
    if "mask_token_id" in config.drafter:
        words.append("drafter.mask_token_id=299")
    sizes = {
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    words += [f"drafter.{key}={size}" for key, size in sizes.items() if key in config.drafter]
    if config.on_policy:
        words += [
            "on_policy.responses=4",
            "on_policy.max_new_tokens=8",
            "on_policy.refresh_steps=1",
        ]
    if config.kind == "draft_model":
        save(tiny(AutoConfig.from_pretrained(str(path.parent / "init.json"))), tmp_path / "small")
        words.append(f"init={tmp_path / 'small'}")
    assert main(["train", "--recipe", name, *words]) == 0
    summary = load_json(tmp_path / "out" / "training.json")
    assert summary["steps"] == 2 and summary["config"]["packing"] and summary["train_loss"] > 0
