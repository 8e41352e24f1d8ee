"""Every packed family against its own transformers implementation: tokens, logits, states, and what is not packed."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.errors import UserError
from drafttrain.inference import generate
from drafttrain.target import Target
from tests.inference.fakes import (
    ANY,
    FAMILIES,
    FakeDrafter,
    family,
    hf_greedy,
    sharpen,
    tokens,
)

WINDOW = 7
every_family = pytest.mark.parametrize("name", FAMILIES)


class Dense:
    """A context that keeps nothing and computes attention from its definition.

    Args:
        visible: [n, n] bool, who sees whom but for windows. positions: [n].
    """

    def __init__(self, visible, positions):
        self.visible = visible
        self.positions = positions
        self.windows = set()

    def attend(self, layer, query, key, value, *, scaling, window, softcap, sinks):
        self.windows.add(window)
        groups = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        distance = self.positions[:, None] - self.positions
        scores = scores.masked_fill(~self.visible | (distance >= (window or 10**6)), float("-inf"))
        total = scores.logsumexp(-1, keepdim=True)
        if sinks is not None:
            total = total.logaddexp(sinks.view(1, -1, 1, 1).expand_as(total))
        return ((scores - total).exp() @ value.repeat_interleave(groups, 1)).transpose(1, 2)


@torch.no_grad()
def hf_states(reference, ids):
    """Logits, and hidden_states with the last layer's raw output in place of the normed one that transformers gives."""
    decoder = reference.get_decoder()
    last = {}
    layers = decoder.h if hasattr(decoder, "h") else decoder.layers
    hook = layers[-1].register_forward_hook(
        lambda _m, _a, out: last.update(out=out[0] if type(out) is tuple else out)
    )
    out = reference(input_ids=ids, output_hidden_states=True, use_cache=False)
    hook.remove()
    return out.logits, torch.cat([*out.hidden_states[:-1], last["out"]], dim=-1)


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.thorough
@every_family
def test_greedy_is_what_transformers_generates(name):
    target, reference = family(name)
    for length in (3, 2 * WINDOW + 5):  # a window is passed in decoding, and in the prompt
        prompt = tokens(length, seed=length).tolist()
        want = hf_greedy(reference, prompt, 16)
        drafters = [(None, "none")]
        if length > WINDOW:
            drafters = [
                (NgramDrafter(), "chain:4"),
                (FakeDrafter(want, 0.6, nodes=16, seed=length), str(ANY)),
            ]
        for drafter, spec in drafters:
            got = generate(
                target, drafter, prompt, max_new_tokens=16, spec=TreeSpec.parse(spec), eos_ids=()
            )
            assert got.tokens == want, (length, spec)
    assert got.stats.accepted_length > 1


@pytest.mark.thorough
@every_family
def test_tree_rows_are_the_logits_of_their_paths(name):
    target, reference = family(name)
    prompt = 12
    n = 14
    generator = torch.Generator().manual_seed(2)
    parents = [-1, *(int(torch.randint(-1, i, (), generator=generator)) for i in range(1, n))]
    ids = tokens(prompt + n, seed=3)
    visible = torch.ones(prompt + n, prompt + n).tril().bool()
    visible[prompt:, prompt:] = False
    paths = []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), prompt + i])
        visible[prompt + i, paths[i]] = True
    positions = torch.tensor([*range(prompt), *(prompt - 1 + len(path) for path in paths)])
    context = Dense(visible, positions)
    out = target.forward(ids[None], range(target.num_layers + 1), positions[None], context)
    logits = target.head(out.last_hidden[0])
    for path in paths:
        want, states = hf_states(reference, ids[[*range(prompt), *path]][None])
        assert_close(logits[path[-1]], want[0, -1])
        assert_close(out.features[0, path[-1]], states[0, -1])
    assert context.windows == {
        "mistral": {WINDOW},
        "mixtral": {WINDOW},
        "phi3": {WINDOW},
        **{mixed: {WINDOW, None} for mixed in ("qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss")},
    }.get(name, {None})


@every_family
def test_packed_sequences_do_not_touch_each_other(name):
    target, _ = family(name)
    rows = [tokens(9, seed=4), tokens(14, seed=5)]
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    visible = torch.block_diag(*(torch.ones(len(row), len(row)).tril() for row in rows)).bool()
    layers = range(target.num_layers + 1)
    packed = target.forward(
        torch.cat(rows)[None], layers, positions[None], Dense(visible, positions)
    )
    alone = [target.forward(row[None], layers) for row in rows]
    assert_close(packed.features, torch.cat([out.features for out in alone], dim=1))
    assert_close(packed.last_hidden, torch.cat([out.last_hidden for out in alone], dim=1))


@every_family
def test_states_and_head_are_those_of_transformers(name):
    target, reference = family(name)
    ids = tokens(2, 24, seed=6)
    logits, states = hf_states(reference, ids)
    out = target.forward(ids, range(target.num_layers + 1))
    assert_close(out.features, states)
    assert out.last_hidden.shape == (2, 24, target.hidden_size)
    assert_close(target.head(out.last_hidden), logits)
    kept = torch.tensor([3, 1, 40])
    bias = 0.0 if target.head_bias is None else target.head_bias[kept]
    products = torch.nn.functional.linear(out.last_hidden, target.head_weight[kept])
    assert_close(target.shape_logits(products + bias), logits[..., kept])
    # What the first layer receives is the embedding, plus a learned position at most.
    learned = out.features[..., : target.hidden_size] - target.embed(ids)
    assert_close(learned[0], learned[1])
    assert (learned.abs().max() > 1e-3) == (name in ("gpt2", "opt", "opt_post_norm"))


@every_family
def test_packed_weights_change_nothing(name):
    target, reference = family(name)
    packed = Target.wrap(copy.deepcopy(target.model), None).pack()
    ids = tokens(1, 16, seed=7)
    logits, _ = hf_states(reference, ids)
    assert_close(packed.head(packed.forward(ids, ()).last_hidden), logits)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_the_model_itself_still_generates_as_before(name):
    target, reference = family(name)
    ids = tokens(2, 12, seed=8)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # padded on the left
    made = [
        model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
        for model in (target.model, reference)
    ]
    assert torch.equal(*made)


def test_longrope_ends_where_its_factors_change():
    target, reference = family("phi3_longrope")
    assert target.max_positions == 128
    prompt = tokens(120, seed=9).tolist()
    assert generate(target, None, prompt, max_new_tokens=50, eos_ids=()).tokens == hf_greedy(
        reference, prompt, 8
    )
    with pytest.raises(
        UserError, match="prompt has 128 tokens, but target 'phi3_longrope' reads at most 128"
    ):
        generate(target, None, tokens(128).tolist(), max_new_tokens=1)
    with pytest.raises(
        UserError, match="rows of 129 tokens, but target 'phi3_longrope' reads at most 128"
    ):
        target.forward(tokens(1, 129), ())


def tiny(model_type, **settings):
    config = AutoConfig.for_model(
        model_type,
        **{
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 60,
            **settings,
        },
    )
    return AutoModelForCausalLM.from_config(config)


def test_sparse_windows_that_attention_is_not_told_run_as_they_are():
    """Qwen2-MoE masks by a window that it does not pass to the attention interface: packed rows would lose it."""
    settings = {
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 4,
    }
    settings |= {
        "shared_expert_intermediate_size": 24,
        "use_sliding_window": True,
        "sliding_window": 7,
    }
    target = Target.wrap(
        tiny("qwen2_moe", **settings, layer_types=["sliding_attention", "full_attention"]), None
    )
    assert target.decoding_path == "snapshot"
    assert "does not pass its window of 7 tokens to the attention interface" in target.reason


def shift_tokens(module, args, output):
    """A layer that looks at its left neighbour without attention."""
    return output + output.roll(1, dims=1)


def first_come(module, args, output):
    """A layer with a capacity: what comes after the fourth token is dropped."""
    output[:, 4:] = 0
    return output


def ignore_positions(module, args, kwargs):
    return args, {**kwargs, "position_ids": None}


def test_layers_that_mix_tokens_are_found():
    model = tiny("llama", intermediate_size=48)
    sharpen(model, seed=1)
    model.model.layers[1].mlp.register_forward_hook(shift_tokens)
    with pytest.raises(
        UserError, match=r"\(LlamaForCausalLM\) computes states that change with later tokens"
    ):
        Target.wrap(model, None)


def test_a_capacity_of_tokens_is_found():
    model = tiny("llama", intermediate_size=48)
    sharpen(model, seed=1)
    model.model.layers[1].mlp.register_forward_hook(first_come)
    target = Target.wrap(model, None)
    assert "computes other states for packed rows than for one row" in target.reason
    assert str(target.continuation) == "no cache, sequences are read again"


def test_a_model_that_counts_its_own_positions_is_found():
    model = tiny("llama", intermediate_size=48)
    sharpen(model, seed=1)
    model.model.register_forward_pre_hook(ignore_positions, with_kwargs=True)
    target = Target.wrap(model, None)
    assert "computes other states for packed rows" in target.reason
    assert (
        str(target.continuation) == "rejected tokens dropped, rows one by one"
    )  # padded rows need positions


def test_a_mask_of_the_models_own_is_found():
    model = tiny("llama", intermediate_size=48)

    def add_mask(module, args, kwargs):
        return args, {**kwargs, "attention_mask": torch.zeros(1, 1, 1, 1)}

    model.model.layers[0].register_forward_pre_hook(add_mask, with_kwargs=True)
    with pytest.raises(UserError, match="computes states that change with later tokens"):
        Target.wrap(model, None)
    with pytest.raises(UserError, match="LlamaAttention brings its own mask or position bias"):
        Target.wrap(model, None, freeze=False)
