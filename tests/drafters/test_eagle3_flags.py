"""Every option of EAGLE-3, alone and together, in both halves: training step k is what decoding computes at depth k."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafttrain.batch import anchors_by_depth
from drafttrain.drafters.common.layers import Rotary
from drafttrain.drafters.eagle3.model import Eagle3, Eagle3Config
from drafttrain.drafters.registry import load_drafter
from drafttrain.errors import UserError
from drafttrain.ops.native import cpu_kernels
from drafttrain.target import Target
from tests.conftest import make_target, make_tokenizer
from tests.drafters.eagle3_options import EVERYTHING, LATENT, YARN
from tests.drafters.helpers import make_batch, make_drafter, run_step
from tests.drafters.layer_kinds import (
    check_closed_form_start,
    check_packed_rows,
    check_parity,
    make_kind,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
OPTIONS = [
    {},
    {"num_key_value_heads": 4, "intermediate_size": 40, "fc_norm": True},
    {"num_hidden_layers": 2, "feature_layers": (3,)},
    {"norm_before_fc": True, "rope_parameters": YARN},
    {"norm_output": True, "rope_parameters": LLAMA3},
    {"norm_before_residual": True},
    {"qk_norm": True, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    {"attention_bias": True, "feature_layers": (0, 1, 2, 3, 4)},
    {
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    },
    {"hidden_act": "gelu_pytorch_tanh"},
    {"num_hidden_layers": 2, "sliding_window": 5},
    {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": 6},
    {**LATENT, "num_hidden_layers": 2, "rope_parameters": {**YARN, "mscale_all_dim": 1.0}},
    EVERYTHING,
    {**EVERYTHING, "attention_bias": False, "mlp_bias": False},
]


def shaken(target, **options):
    return make_kind("eagle3", target, torch.arange(40, 240), shake=True, ttt_steps=4, **options)


@pytest.mark.parametrize(
    "options",
    [pytest.param(options, marks=pytest.mark.thorough if options else ()) for options in OPTIONS],
    ids=lambda o: "everything" if len(o) > 9 else "-".join(map(str, o)) or "plain",
)
def test_training_step_k_is_decoding_at_depth_k(target, options):
    check_parity(lambda: shaken(target, **options), target)
    if cpu_kernels() is not None:
        drafter = shaken(target, **options)
        drafter.pack()
        biased = options.get("attention_bias") or options.get("mlp_bias")
        missing = biased or "kv_lora_rank" in options
        assert (drafter.midlayer.native is None) == bool(missing)


@pytest.mark.parametrize(
    "options", [{}, {"num_hidden_layers": 2}, EVERYTHING], ids=["plain", "layers", "everything"]
)
def test_packed_rows_give_the_loss_and_gradients_of_single_ones(target, options):
    check_packed_rows(shaken(target, **options), target)


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_responses_shorter_than_the_depths_train_as_far_as_they_go(target, options):
    drafter = shaken(target, **options)
    batch = make_batch((12, 9))
    batch.response_mask[:] = False
    batch.response_mask[0, 4:7] = True  # anchors at two depths out of four
    step = run_step(drafter, target, batch)
    step.loss.backward()
    assert step.metrics["count"].tolist() == [2, 1, 0, 0]
    assert step.loss.isfinite() and drafter.fc.weight.grad.isfinite().all()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"num_hidden_layers": 2},
        {"norm_before_residual": True, "norm_before_fc": True},
        {"fc_norm": True},
        {"attention_bias": True, "norm_output": True},
        {"hidden_size": 24, "head_dim": 8},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 8, "num_key_value_heads": 8},
        EVERYTHING,
    ],
    ids=lambda o: "everything" if len(o) > 9 else next(iter(o)),
)
def test_the_closed_form_start_serves_every_option(options):
    target = make_target(hidden=32)
    drafter = make_drafter(target, **{"head_dim": 8, "ttt_steps": 3, **options})
    check_closed_form_start(drafter, target).loss.backward()
    # Silent heads and the MLP wake up within two steps; their output matrices get gradients at once.
    assert drafter.midlayer.mlp.down_proj.weight.grad.abs().sum() > 0
    assert drafter.midlayer.self_attn.o_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "parameters", [YARN, LLAMA3, {"rope_type": "linear", "rope_theta": 5e3, "factor": 3.0}]
)
def test_rotary_tables_are_those_of_transformers(parameters):
    positions = torch.arange(0, 200, 7)
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        rope_parameters=dict(parameters),
    )
    wanted = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = Rotary(16, parameters).tables(positions, torch.float32)
    for mine, theirs in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine[:, 0], theirs[0])


def test_a_target_of_qwen3_hands_on_its_query_norms_and_long_context():
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
        "tie_word_embeddings": True,
    }
    model = Qwen3ForCausalLM(
        Qwen3Config(**shape, rope_parameters=dict(YARN), max_position_embeddings=64)
    )
    torch.nn.init.normal_(model.model.layers[-1].self_attn.q_norm.weight)
    target = Target.wrap(model, make_tokenizer(300), name="qwen3", dtype=torch.float32)
    drafter = make_drafter(target)
    assert (
        drafter.config.qk_norm
        and drafter.config.rope_parameters["factor"] == 4.0
        and drafter.config.head_dim == 16
    )
    torch.testing.assert_close(
        drafter.midlayer.self_attn.q_norm.weight, target.layers[-1].self_attn.q_norm.weight
    )
    assert torch.equal(drafter.lm_head.weight.detach(), target.embed_weight)  # the tied head
    assert make_drafter(target, rope_theta=7e3).config.rope_parameters == {
        "rope_type": "default",
        "rope_theta": 7e3,
    }
    assert run_step(drafter, target, make_batch()).loss.isfinite()
    assert not Eagle3Config.for_target(make_target()).qk_norm


@pytest.mark.thorough
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_checkpoints_in_one_file_and_in_several(tmp_path, shard):
    target = make_target(tie_word_embeddings=True)
    target.model.save_pretrained(tmp_path / "target", max_shard_size=shard)
    target.tokenizer.save_pretrained(tmp_path / "target")
    loaded = Target.load(str(tmp_path / "target"), "float32")
    drafter = shaken(loaded, **EVERYTHING)
    drafter.save_pretrained(tmp_path / "drafter", max_shard_size=shard)
    assert (len(list((tmp_path / "drafter").glob("*.safetensors"))) > 1) == (shard == "20KB")
    again = Eagle3.from_pretrained(tmp_path / "drafter").eval()
    kept = drafter.config.to_dict()
    read = again.config.to_dict()
    assert {name for name in kept if kept[name] != read[name]} <= {
        "_name_or_path",
        "dtype",
        "feature_layers",
    }
    assert again.feature_layers == drafter.feature_layers
    again.bind(loaded)
    a, b = (run_step(d, loaded, make_batch()).loss for d in (drafter, again))
    torch.testing.assert_close(a, b)
    assert load_drafter(str(tmp_path / "drafter"), loaded).config.num_hidden_layers == 3


def test_soft_capped_targets_are_what_the_drafter_learns():
    """p comes from the capped logits, over the full vocabulary, as the model itself returns them."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 300,
        "initializer_range": 0.4,
    }
    torch.manual_seed(0)
    reference = Gemma2ForCausalLM(Gemma2Config(**shape, final_logit_softcapping=2.0)).eval()
    target = Target.wrap(reference, make_tokenizer(300), name="gemma2", dtype=torch.float32)
    drafter = make_drafter(target).eval()
    batch = make_batch((12,))
    logits = AutoModelForCausalLM.from_config(reference.config)
    logits.load_state_dict(reference.state_dict())
    p = logits.eval()(batch.input_ids).logits.softmax(-1)[0].detach()
    states = []
    step = drafter.step
    drafter.step = lambda *args: states.append(step(*args)) or states[-1]
    out = run_step(drafter, target, batch)
    anchors = anchors_by_depth(batch.response_mask, 1)[0]
    q = drafter.logits(states[0]).softmax(-1)
    torch.testing.assert_close(
        out.metrics["alpha"][0], torch.minimum(p[anchors + 1], q).sum(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_type='longrope' is not one of default, linear",
        ),
        ({"hidden_act": "silo"}, "hidden_act='silo' is not an activation"),
        ({"sliding_window": 4}, "sliding_window=4 must be larger than ttt_steps=4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
    ],
)
def test_what_cannot_work_is_said(target, options, message):
    with pytest.raises(UserError, match=message):
        Eagle3Config.for_target(target, **options)


def test_llama_targets_with_biases_hand_them_on():
    torch.manual_seed(0)
    config = make_target().config.to_dict() | {"attention_bias": True, "mlp_bias": True}
    model = LlamaForCausalLM(LlamaConfig(**config))
    torch.nn.init.normal_(model.model.layers[-1].self_attn.k_proj.bias)
    target = Target.wrap(model, make_tokenizer(300), name="biased", dtype=torch.float32)
    drafter = make_drafter(target, attention_bias=True, num_key_value_heads=4)
    theirs = target.layers[-1].self_attn.k_proj.bias.view(2, 1, 8).expand(2, 2, 8).flatten()
    assert torch.equal(drafter.midlayer.self_attn.k_proj.bias, theirs)
