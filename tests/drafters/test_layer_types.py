"""Block drafters whose layers differ, against a dense forward as their publishers describe it; and DSpark's three heads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.dflash.model import DFlash, DFlashConfig
from drafttrain.drafters.dflash2.model import DFlash2
from drafttrain.drafters.dspark.model import DSpark
from drafttrain.errors import UserError
from drafttrain.ops.tree_cache import TreeCache
from tests.drafters.block_kinds import begun, block_states, make_drafter, shaken
from tests.drafters.helpers import check_gradients, make_batch, run_step

SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 7, "num_hidden_layers": 3}
VARIANTS = [
    MIXED,
    {**MIXED, "causal": True},
    {**MIXED, "causal": "sliding"},
    {**MIXED, "causal": "sliding", "attention_sink_bias": True, "sample_from_anchor": True},
    {"attention_sink_bias": True, "head_dim": 16},
]


def rotated(x, positions, theta):
    """x [n, heads, e], rotated in halves."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def dense(drafter, features, root):
    """[depth, h]: each layer over context and block with one mask; a sink is a further logit without a value."""
    config = drafter.config
    context = drafter.hidden_norm(drafter.fc(features))
    size = config.block_size
    state = torch.cat((drafter.embed(torch.tensor([root])), drafter.mask_embedding().expand(size - 1, -1)))  # fmt: skip
    at = torch.arange(len(context) + size)
    queries = at[len(context) :, None]
    types = config.layer_types or [FULL] * config.num_hidden_layers
    for layer, kind in zip(drafter.layers, types, strict=True):
        seen = torch.ones(size, len(at), dtype=torch.bool)
        if kind == SLIDING:
            seen &= queries - at < config.sliding_window
        if config.causal is True or (config.causal == "sliding" and kind == SLIDING):
            seen &= at <= queries
        own = layer.self_attn
        normed = layer.input_layernorm(state)
        both = torch.cat((context, normed))
        heads = lambda x: x.unflatten(-1, (-1, config.head_dim))  # noqa: E731
        theta = config.rope_theta
        query = rotated(own.q_norm(heads(own.q_proj(normed))), queries[:, 0], theta)
        key = rotated(own.k_norm(heads(own.k_proj(both))), at, theta)
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, heads(own.v_proj(both))))
        scores = torch.einsum("qhe,khe->hqk", query, key) * config.head_dim**-0.5
        scores = scores.masked_fill(~seen, -torch.inf)
        if config.attention_sink_bias:
            sinks = own.attention_sink_bias[:, None, None].expand(-1, size, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : len(at)]
        state = state + own.o_proj(torch.einsum("hqk,khe->qhe", weights, value).flatten(1))
        state = state + layer.mlp(layer.post_attention_layernorm(state))
    return drafter.norm(state)[-config.depth :]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@torch.no_grad()
def test_a_block_is_the_dense_forward(target, options):
    drafter = shaken(DFlash, target, **options)
    features = torch.randn(20, drafter.fc.in_features, generator=torch.Generator().manual_seed(0))
    wanted = dense(drafter, features, 5)
    torch.testing.assert_close(block_states(drafter, features, 5), wanted, rtol=1e-4, atol=1e-5)
    drafter.config.sliding_window = 6 if drafter.config.sliding_window else 0
    for layer in drafter.layers if drafter.config.attention_sink_bias else ():
        layer.self_attn.attention_sink_bias -= 1
    assert (dense(drafter, features, 5) - wanted).abs().max() > 1e-3  # what is compared matters


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@torch.no_grad()
def test_a_head_reads_of_the_path_what_its_form_says(target, head):
    """A chain's log q and confidence, step by step as DeepSpec describes them."""
    drafter = shaken(DSpark, target, markov_head_type=head, markov_rank=8)
    prefix = make_batch((9,)).input_ids[0]
    tree = begun(drafter, target, prefix).propose(TreeSpec.parse("chain:4"))
    features = target.forward(prefix[None], drafter.feature_layers).features[0, :-1]
    states = block_states(drafter, features, int(prefix[-1]))
    r = drafter.config.markov_rank
    state = torch.zeros(r)
    before = prefix[-1]
    score = torch.zeros(())
    for k, token in enumerate(tree.tokens):
        own = drafter.markov_in.weight[drafter.own_ids[before]]
        if head == "vanilla":
            latent = own
        elif head == "gated":
            latent = torch.sigmoid(drafter.gate_proj(torch.cat((states[k], own)))) * own
        else:
            g, n, o = drafter.joint_proj(torch.cat((state, own, states[k]))).split(r)
            state = g.sigmoid() * state + (1 - g.sigmoid()) * n.tanh()
            latent = o.tanh()
        log_q = (drafter.head.weight @ states[k] + drafter.markov_out.weight @ latent).log_softmax(
            -1
        )
        confidence = F.logsigmoid(drafter.confidence(torch.cat((states[k], own))))
        score = (
            score + log_q[(drafter.kept_ids == token).nonzero()].squeeze() + confidence.squeeze()
        )
        torch.testing.assert_close(tree.log_probs[k], score, rtol=1e-4, atol=1e-4)
        before = token


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DFlash, {**MIXED, "attention_sink_bias": True, "causal": "sliding"}),
        (DSpark, {"markov_head_type": "rnn"}),
        (DSpark, {"markov_head_type": "gated"}),
    ],
    ids=str,
)
def test_every_parameter_is_trained_and_a_run_continues(target, tmp_path, kind, options):
    drafter = make_drafter(kind, target, torch.arange(300), **options)
    run_step(drafter, target, make_batch((12, 9))).loss.backward()
    check_gradients(drafter)
    drafter.save_pretrained(tmp_path)
    later = kind.begin(target, str(tmp_path), {"gamma": 2.0}, drafter.config.loss)
    assert later.config.windows == drafter.config.windows and later.config.gamma == 2.0
    for name, value in drafter.state_dict().items():
        assert torch.equal(later.state_dict()[name], value), name
    if options.get("layer_types"):
        assert all(layer.self_attn.attention_sink_bias.grad.any() for layer in drafter.layers)
        with pytest.raises(UserError, match="layer_types"):
            kind.begin(target, str(tmp_path), {"layer_types": [FULL, FULL, SLIDING]}, "kl")


@pytest.mark.parametrize("types", [None, [SLIDING, FULL]])
def test_a_window_bounds_the_cache_only_where_every_layer_has_it(monkeypatch, target, types):
    drafter = shaken(DFlash, target, sliding_window=7, layer_types=types, num_hidden_layers=2)
    prefix = make_batch((60,)).input_ids[0]
    session = begun(drafter, target, prefix, 100)
    assert (session.cache.base > 0) == (types is None)
    assert session.length + session.cache.base == len(prefix) - 1
    tree = session.propose(TreeSpec.parse("chain:4"))
    monkeypatch.setattr(TreeCache, "trim", lambda cache: None)
    whole = begun(drafter, target, prefix, 100).propose(TreeSpec.parse("chain:4"))
    assert torch.equal(tree.tokens, whole.tokens)
    torch.testing.assert_close(tree.log_probs, whole.log_probs, rtol=1e-4, atol=1e-5)


def test_files_without_layer_types_have_one_window(target):
    old = DFlashConfig(vocab_size=300, sliding_window=9, num_hidden_layers=3, causal=True).to_dict()
    assert old["layer_types"] is None
    for name in ("layer_types", "attention_sink_bias"):
        del old[name]
    read = DFlashConfig(**old)
    assert read.windows == (9, 9, 9) and read.causal_layers == (True, True, True)
    two = {"vocab_size": 300, "num_hidden_layers": 2, "causal": "sliding"}
    same = DFlashConfig(**two, sliding_window=9, layer_types=[SLIDING] * 2)
    assert same.layer_types is None and same.causal is True
    plain = DFlashConfig(**two, layer_types=[FULL] * 2)
    assert plain.layer_types is None and plain.causal is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_types": [FULL]}, "layer_types has 1 entries, but num_hidden_layers=2"),
        ({"layer_types": [FULL, SLIDING]}, "with sliding_window=0: a window needs layers of type sliding"),
        ({"layer_types": [FULL, FULL], "sliding_window": 64}, "with sliding_window=64: a window needs"),
        ({"layer_types": [FULL, "chunked"]}, "layer_types"),
        ({"causal": "full"}, "causal='full' must be"),
    ],
)  # fmt: skip
def test_types_that_cannot_work_are_one_line(target, options, message):
    with pytest.raises(UserError, match=message):
        DFlash2.config_class.for_target(target, **options)
