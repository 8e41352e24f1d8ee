"""The fast path of decoding on a CPU computes what transformers' forward computes, or is not taken."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from drafttrain.errors import UserError
from drafttrain.ops.native import multiplies_bfloat16
from drafttrain.ops.packing import PackedLinear
from drafttrain.ops.tree_attention import TreeLayout
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target import Target
from drafttrain.target.attention import LAST
from drafttrain.target.native_body import LayerStack, NativeBody
from tests.marks import needs_compiler
from tests.target.tiny import SIZE

pytestmark = needs_compiler

MIXED = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZE)),
    "llama with scaled rope": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZE, rope_scaling={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    ),
    "qwen2 (biases)": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZE)),
    "qwen3 (head norms)": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZE, head_dim=16)),
    "mistral (window)": lambda: MistralForCausalLM(
        MistralConfig(**SIZE, head_dim=16, sliding_window=7)
    ),
    "gemma3 (four norms, two ropes)": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZE, **MIXED, head_dim=16, query_pre_attn_scalar=9)
    ),
}
OTHERS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=90)),
    "phi3 (joined projections)": lambda: Phi3ForCausalLM(Phi3Config(**SIZE)),
    "granite (scaled residuals)": lambda: GraniteForCausalLM(
        GraniteConfig(**SIZE, residual_multiplier=0.5)
    ),
    "llama with biases in the MLP": lambda: LlamaForCausalLM(LlamaConfig(**SIZE, mlp_bias=True)),
}


def make(build) -> Target:
    torch.manual_seed(0)
    model = build().float()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0.3 if "norm" in name else 0.0, 0.2)
    return Target.wrap(model, None, name="tiny")


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers_in_a_tree(name):
    target = make(MODELS[name])
    native = NativeBody.of(target)
    assert native is not None
    prompt = torch.arange(3, 21)[None]
    parents = [-1, -1, 0, 1, 3]
    layers = (0, 1, 3, LAST)
    outputs = []
    for forward in (target.forward, native.forward):
        cache = TreeCache(64)
        cache.open([(0, 18)])
        prefill = forward(prompt, layers, cache.positions(), cache)
        cache.commit([range(18)])
        cache.open([(0, parents)])
        tree = forward(torch.tensor([[5, 6, 7, 8, 9, 10]]), layers, cache.positions(), cache)
        outputs.append((prefill, tree))
    for ours, theirs in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(ours.features, theirs.features, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(ours.last_hidden, theirs.last_hidden, atol=2e-4, rtol=1e-3)
        for output in (ours, theirs):
            assert torch.equal(output.features[..., -target.hidden_size :], output.last_hidden)


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_keep_transformers_forward(name):
    target = make(OTHERS[name])
    assert NativeBody.of(target) is None
    assert target.pack()._native is None


def test_what_differs_only_far_out_is_noticed():
    target = make(MODELS["llama"])
    attention = target.layers[1].self_attn
    plain = attention.forward

    def louder(hidden_states, *args, **kwargs):
        out = plain(hidden_states, *args, **kwargs)
        far = kwargs["position_embeddings"][0][0, 0, 0] != 1  # the first position's cosine is 1
        return (out[0] * 1.1, *out[1:]) if far else out

    attention.forward = louder
    assert NativeBody.of(target) is None


@pytest.mark.parametrize(
    "name", ["qwen3 (head norms)", "mistral (window)", "gemma3 (four norms, two ropes)"]
)
@pytest.mark.parametrize("sinks", [False, True])
def test_all_layers_in_one_call_equal_layer_by_layer_to_the_bit(name, sinks):
    """Two sequences of unequal length, one of them a tree that grows; sinks, which no such family has yet, are added."""
    options = [
        {**form, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}
        for form in NativeBody.of(make(MODELS[name])).forms
    ]
    outputs = []
    for whole in (True, False):
        native = NativeBody.of(make(MODELS[name]))
        native.forms = options if sinks else native.forms
        native.stack = LayerStack(native.layers, native.forms, native.rotary.of_layer)
        assert native.stack.served
        if not whole:
            native.stack.served = False
        cache = TreeCache(8, rows=2)
        cache.open([(0, 7), (1, 3)])
        told = [native.forward(torch.arange(3, 13)[None], (3, 0), cache.positions(), cache)]
        cache.commit([range(7), range(3)])
        cache.reserve(32)  # other buffers, other addresses
        cache.open([(1, [-1, 0]), (0, TreeLayout(7, [-1, -1, 0]))])
        told.append(native.forward(torch.arange(20, 27)[None], (1, LAST), cache.positions(), cache))
        cache.open([(0, TreeLayout(7, [-1, -1, 0, 2], held=4))])
        told.append(native.forward(torch.tensor([[9]]), (), cache.positions(), cache))
        outputs.append(told)
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours.features, theirs.features) and torch.equal(
            ours.last_hidden, theirs.last_hidden
        )
    assert outputs[0][2].features.shape == (1, 1, 0)


@pytest.mark.parametrize("units", [False, True], ids=["no bfloat16 units", "bfloat16 units"])
def test_bfloat16_weights_decode_in_float32_whatever_the_cpu_has(units, monkeypatch):
    monkeypatch.setattr("drafttrain.target.target.cpu_has_bfloat16", lambda: units)
    held = [Target.wrap(make(MODELS["llama"]).model.bfloat16(), None, "tiny") for _ in range(2)]
    assert [target.compute_dtype for target in held] == [
        torch.bfloat16 if units else torch.float32
    ] * 2
    decoding = held[0].pack()
    generating = held[1].pack(keep_dtype=True)
    assert decoding.compute_dtype == torch.float32 and decoding.dtype == torch.bfloat16
    assert decoding._native is not None, "the fast path reads float32"
    assert decoding.product_dtype == (torch.bfloat16 if multiplies_bfloat16() else torch.float32)
    assert {
        module.rounded for module in decoding.model.modules() if isinstance(module, PackedLinear)
    } == {decoding.rounds}
    assert not make(MODELS["llama"]).pack().rounds
    assert generating.compute_dtype == (torch.bfloat16 if units else torch.float32)
    generating.widen()  # packed weights keep their format
    assert generating.lm_head.weight.dtype == generating.compute_dtype


def test_packed_targets_refuse_copies_and_other_weights():
    target = Target.wrap(MODELS["llama"](), None, name="tiny")
    state = target.model.state_dict()
    assert copy.deepcopy(target).model is not target.model
    target.pack()
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UserError, match=r"'tiny' is packed for decoding.*copy it before pack"):
            copied(target)
    for strict in (True, False):
        with pytest.raises(UserError, match=r"q_proj\.weight is packed.*load weights before pack"):
            target.model.load_state_dict(state, strict=strict)


@pytest.mark.parametrize("name", MODELS)
def test_the_state_of_a_packed_target_is_complete(name):
    """Also where a family's norms store their factor minus one, as Gemma's do."""
    target = make(MODELS[name])
    state = target.model.state_dict()
    target.pack()
    packed = target.model.state_dict()
    assert packed.keys() == state.keys()
    for key, weight in state.items():
        assert torch.equal(packed[key], weight), key
