"""A wrapped model's logits are its own: rules that a config does not tell apart, and what cannot be reproduced."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.errors import UserError
from drafttrain.inference import generate
from drafttrain.target import Target
from tests.inference.fakes import hf_greedy, sharpen

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 60, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip


def tiny(model_type, dtype=torch.float32, **settings):
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**SIZES, **settings})
    )
    sharpen(model, seed=3)
    return model.to(dtype).eval()


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "settings", "factor"),
    [
        ("hyperclovax", {"logits_scaling": 0.25}, 0.25),  # multiplies
        ("granite", {"logits_scaling": 0.25}, 4.0),  # divides
        ("cohere", {"logit_scale": 0.5}, 0.5),
        ("llama", {"logits_scaling": 0.25}, 1.0),  # does not read it
    ],
)
def test_silent_tokens_of_a_logit_factor(model_type, settings, factor, dtype):
    """HyperCLOVAX multiplies its logits by the value that Granite divides by: sampled tokens were of another distribution."""
    model = tiny(model_type, dtype, **settings)
    ids = torch.arange(2, 26).view(2, 12)
    own = logits(model, ids)
    target = Target.wrap(model, None, model_type, dtype=dtype)
    ours = target.head(target.forward(ids, ()).last_hidden)
    # bfloat16 is held as float32 where the CPU has no bfloat16 units
    bound = 1e-4 if dtype == torch.float32 else 5e-2
    assert target.logit_scale == pytest.approx(factor)
    torch.testing.assert_close(ours, own, rtol=bound, atol=bound * own.abs().max().item())


def test_a_factor_that_no_value_of_the_config_names_is_fitted():
    """MiniCPM3 divides states by hidden_size / dim_model_base before its head."""
    mla = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    model = tiny("minicpm3", num_key_value_heads=4, dim_model_base=256, **mla)
    ids = torch.arange(2, 14)[None]
    own = logits(model, ids)
    target = Target.wrap(model, None, "minicpm3")
    torch.testing.assert_close(
        target.head(target.forward(ids, ()).last_hidden), own, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "change", [lambda out: out + torch.arange(60.0), lambda out: out.relu(), lambda out: out / 0]
)
def test_other_logits_are_refused_with_the_figure(change):
    model = tiny("llama")

    def changed(module, args, output):
        output.logits = change(output.logits)
        return output

    model.register_forward_hook(changed)
    with pytest.raises(
        UserError,
        match=r"\(LlamaForCausalLM\) transforms its logits in an unknown way \(relative error",
    ):
        Target.wrap(model, None)


def test_afmoe_takes_views_of_what_attention_returns():
    """Its attention's output must be contiguous, also in a plain forward with a context."""
    model = tiny(
        "afmoe",
        num_experts=4,
        moe_intermediate_size=24,
        num_dense_layers=1,
        sliding_window=7,
        num_experts_per_tok=2,
    )
    ids = torch.arange(2, 22)[None]
    own = logits(model, ids)
    greedy = hf_greedy(model, ids[0].tolist(), 6)
    target = Target.wrap(model, None, "afmoe")
    torch.testing.assert_close(
        target.head(target.forward(ids, (0, 1)).last_hidden), own, rtol=1e-4, atol=1e-4
    )
    assert generate(target, None, ids[0].tolist(), max_new_tokens=6, eos_ids=()).tokens == greedy
