"""Layers with fused operations on a GPU compute what the model's own compute, or are not taken."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.inference import Decoder
from drafttrain.ops.layer_ops import NormForm, add_norm, rotate_heads
from drafttrain.target import Target
from drafttrain.target.attention import CausalRows
from drafttrain.target.fused_body import FusedBody
from tests.target.tiny import SIZE

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
FUSED = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    "gemma": {},
    "gemma2": {"sliding_window": 7},
    "gemma3_text": {"sliding_window": 7},
    "smollm3": {},
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "gpt_oss": {**EXPERTS, "sliding_window": 7},
}
OTHERS = {
    "phi3": {},  # joined projections
    "olmo2": {},  # norms behind the blocks
    "ernie4_5": {},  # rotates pairs of neighbors
    "granite": {"residual_multiplier": 0.5},
}


def make(kind, options, dtype=torch.float32, device="cuda"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **SIZE, head_dim=16, **options)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):  # a norm of ones hides a factor that is lost
                weight.add_(torch.randn_like(weight) / 4)
    return Target.wrap(model.eval().to(device, dtype), None, name=kind)


@pytest.mark.thorough
@pytest.mark.any_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FUSED)
def test_layers_of_a_family_are_fused(any_gpu, kind, dtype):
    target = make(kind, FUSED[kind], dtype)
    assert isinstance(target._native, FusedBody)


@pytest.mark.any_gpu
@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers_stay_the_models_own(any_gpu, kind):
    assert make(kind, OTHERS[kind])._native is None


@pytest.mark.thorough
@pytest.mark.any_gpu
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss"])
def test_fused_layers_decode_the_models_own_tokens(request, kind):
    prompts = [[5, 6, 7, 8, 5, 6, 7], [9, 8, 9]]
    plain = make(kind, FUSED[kind], device="cpu")
    options = {"eos_ids": (), "max_rows": 2}
    want = [
        one.tokens for one in Decoder(plain, None, **options).generate(prompts, max_new_tokens=12)
    ]
    gpu = request.getfixturevalue("any_gpu")
    target = make(kind, FUSED[kind])
    drafter = NgramDrafter()
    drafter.bind(target)
    for graphs in (False, True):
        for side in (None, drafter):
            made = Decoder(target, side, graphs=graphs, **options).generate(
                prompts, max_new_tokens=12
            )
            assert [one.tokens for one in made] == want
    assert gpu.replays > 0


@pytest.mark.any_gpu
def test_features_of_all_layers_are_the_models_own(any_gpu):
    target = make("qwen3", {})
    ids = torch.arange(7, device=target.device)[None]
    layers = [3, 0, -1, 2]
    want = target.forward(ids, layers)  # rows without a context run in the model's own layers
    got = target.forward(ids, layers, ids, CausalRows(7))
    torch.testing.assert_close(got.features.cpu(), want.features.cpu())
    torch.testing.assert_close(got.last_hidden.cpu(), want.last_hidden.cpu())


@pytest.mark.any_gpu
def test_no_tokens_are_no_launch(any_gpu):
    empty = torch.zeros(0, 2, 16, device="cuda")
    assert rotate_heads(empty, (empty[:, 0], empty[:, 0])).shape == empty.shape
    norm = NormForm(torch.ones(16, device="cuda"), 1e-6, 0.0)
    assert add_norm(empty[:, 0], empty[:, 0], norm).shape == (0, 16)


@pytest.mark.any_gpu
def test_a_changed_layer_is_not_fused(any_gpu, monkeypatch, caplog):
    target = make("llama", {})
    layer = target.layers[1]
    own = layer.mlp.forward
    monkeypatch.setattr(layer.mlp, "forward", lambda x: own(x) * 1.1)
    assert FusedBody.of(target) is None

    def broken(x):
        raise TypeError("another argument")

    other = make("llama", {})
    monkeypatch.setattr(other.layers[0].self_attn.q_proj, "forward", broken)
    with caplog.at_level(logging.INFO):
        assert FusedBody.of(other) is None
    assert "keeps its own layers: another argument" in caplog.text


def test_a_target_in_training_keeps_its_own_layers(gpu):
    model = make("llama", {}).model.requires_grad_(True)
    assert Target.wrap(model, None, name="draft", freeze=False)._native is None
