"""Multi-token prediction: the contract in its own options, the closed-form start, and modules that targets come with."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config, GraniteConfig, GraniteForCausalLM

from drafttrain.drafters.mtp.model import MTP, MTPConfig
from drafttrain.errors import UserError
from drafttrain.files import write_json
from drafttrain.target import Target
from drafttrain.target.own_layer import OwnLayer
from tests.conftest import make_target
from tests.drafters.helpers import check_gradients, make_batch, run_step
from tests.drafters.layer_kinds import (
    check_closed_form_start,
    check_packed_rows,
    check_parity,
    make_kind,
)

KEPT = torch.arange(40, 240)
OPTIONS = [
    {},
    {"modules": 3},
    {"train_head": False},
    {"modules": 4, "qk_norm": True, "attention_bias": True, "sliding_window": 6},
]


@pytest.mark.thorough
@pytest.mark.parametrize("options", OPTIONS[1:3], ids=str)
def test_training(target, options):
    drafter = make_kind("mtp", target, **options)
    run_step(drafter, target, make_batch()).loss.backward()
    check_gradients(drafter)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_both_halves_are_one_forward(target, options):
    check_parity(lambda: make_kind("mtp", target, KEPT, shake=True, **options), target)


def test_packed_rows(target):
    check_packed_rows(make_kind("mtp", target, KEPT, shake=True, modules=2), target)


def test_a_frozen_head_takes_no_capped_logits(target, monkeypatch):
    monkeypatch.setattr(target, "softcap", 30.0)
    with pytest.raises(
        UserError, match=r"train_head=false: target 'tiny' caps its logits.*train_head=true"
    ):
        make_kind("mtp", target, KEPT, train_head=False)


def test_modules_have_weights_of_their_own(target):
    """Depth k reads module k's projection: changing it leaves earlier depths as they were."""
    drafter = make_kind("mtp", target, modules=3).eval()
    before = run_step(drafter, target, make_batch()).metrics["loss"]
    drafter.blocks[1].eh_proj.weight.data *= -1
    after = run_step(drafter, target, make_batch()).metrics["loss"]
    assert after[0] == before[0] and (after[1:] != before[1:]).all()


@pytest.mark.thorough
@pytest.mark.parametrize("modules", [1, 2])
def test_the_closed_form_start_beats_copied_weights_at_every_depth(modules):
    target = make_target(hidden=32)
    drafter = make_kind("mtp", target, modules=modules, ttt_steps=3)
    check_closed_form_start(drafter, target).loss.backward()
    assert drafter.blocks[0].layer.mlp.down_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": 5}, "modules=5 must be from 1 to ttt_steps=4"),
        ({"num_hidden_layers": 2}, "a module has 1 layer"),
        ({"hidden_size": 16}, "hidden_size=16: kind='mtp' shares states with the target"),
    ],
)
def test_what_cannot_work_is_said(target, options, message):
    with pytest.raises(UserError, match=message):
        MTPConfig.for_target(target, **options)


# -- modules that targets come with ---------------------------------------------------------------------------------


def native_tensors(drafter, form, layers=4):
    """A drafter's weights under the names of a family."""
    module, layer, names, swapped = {
        "deepseek": (f"model.layers.{layers}.", "", {"norm": "shared_head.norm"}, False),
        "qwen": ("mtp.", "layers.0.", {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}, False),
        "mimo": ("model.mtp_layers.0.", "", {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
                                             "norm": "final_layernorm"}, True),
    }[form]  # fmt: skip
    tensors = {}
    for name, weight in drafter.state_dict().items():
        ours = name.removeprefix("blocks.0.")
        if ours.startswith("layer."):
            tensors[module + layer + ours.removeprefix("layer.")] = weight.clone()
        elif ours.removesuffix(".weight") in ("enorm", "hnorm", "eh_proj", "norm"):
            stem = ours.removesuffix(".weight")
            weight = (
                torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)
                if swapped and stem == "eh_proj"
                else weight
            )
            tensors[f"{module}{names.get(stem, stem)}.weight"] = weight.clone()
    return tensors


def with_native(target_dir, tensors):
    weights = target_dir / "model.safetensors"
    save_file({**load_file(weights), **tensors}, weights, metadata={"format": "pt"})
    return Target.load(str(target_dir), "float32")


@pytest.mark.parametrize("form", ["deepseek", "qwen", "mimo"])
def test_native_modules_are_taken_over(target, target_dir, form):
    options = {"intermediate_size": 48, "attention_bias": form == "mimo", "qk_norm": form == "qwen"}
    theirs = make_kind("mtp", target, shake=True, **options)
    tensors = native_tensors(theirs, form)
    if form == "deepseek":
        tensors["model.layers.4.shared_head.head.weight"] = target.head_weight.clone()
    loaded = with_native(target_dir, tensors)
    drafter = MTP.native(loaded, torch.arange(target.vocab_size), {})
    drafter.bind(loaded)
    assert drafter.config.intermediate_size == 48
    ours = drafter.state_dict()
    expected = theirs.state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, msg=name)
    pruned = MTP.native(loaded, KEPT, {"modules": 2})
    assert torch.equal(pruned.lm_head.weight, target.head_weight[KEPT])
    assert torch.equal(pruned.blocks[1].eh_proj.weight, pruned.blocks[0].eh_proj.weight)


def test_a_native_module_predicts_as_it_did(target, target_dir):
    """The very same loss as the drafter whose weights the checkpoint holds."""
    theirs = make_kind("mtp", target, shake=True)
    loaded = with_native(target_dir, native_tensors(theirs, "deepseek"))
    drafter = MTP.native(loaded, torch.arange(target.vocab_size), {}).eval()
    drafter.bind(loaded)
    a, b = (run_step(d, loaded, make_batch()).loss for d in (theirs, drafter))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "mlp.experts.0.up_proj.weight",
            "no mlp.experts.0.up_proj.weight, nor a layer of the target's class: unknown are mlp.exp",
        ),
        (
            "self_attn.indexer.wk.weight",
            "no self_attn.indexer.wk.weight, nor a layer of the target's class: unknown are self_attn",
        ),
        (
            "mlp.up_proj.weight_scale_inv",
            "mlp.up_proj.weight_scale_inv of target .* scales a weight that is not FP8",
        ),
        ("embed_tokens.weight", "embed_tokens.weight of target .* is not the target's embedding"),
    ],
)
def test_native_modules_of_other_kinds_are_refused(target, target_dir, extra, message):
    tensors = native_tensors(make_kind("mtp", target), "deepseek")
    loaded = with_native(target_dir, {**tensors, f"model.layers.4.{extra}": torch.zeros(2)})
    with pytest.raises(UserError, match=message):
        MTP.native(loaded, torch.arange(target.vocab_size), {})


@pytest.mark.parametrize("block", [None, [48, 8]])
def test_fp8_blocks_and_heads_of_their_own_are_read(target, target_dir, capsys, block):
    """DeepSeek publishes FP8 blocks with factors; a module may have a head of its own; a second module is named."""
    tensors = native_tensors(make_kind("mtp", target, shake=True), "deepseek")
    name = "model.layers.4.mlp.up_proj.weight"
    head = torch.randn(target.vocab_size, 32)
    plain = tensors[name]  # [64, 32]: one block of the usual size
    rows, columns = block or (128, 128)
    factors = 0.005 + 0.01 * torch.rand(-(-64 // rows), -(-32 // columns))
    each = factors.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:64, :32]
    tensors[name] = (plain / each).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = factors
    more = {
        "model.layers.4.shared_head.head.weight": head,
        "model.layers.5.eh_proj.weight": torch.zeros(2),
    }
    loaded = with_native(target_dir, {**tensors, **more})
    config = json.loads((target_dir / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block}
    write_json(target_dir / "config.json", config)
    loaded.config.quantization_config = FineGrainedFP8Config()  # what a loader makes of it on a GPU
    drafter = MTP.native(loaded, KEPT, {})
    ours = drafter.blocks[0].layer.mlp.up_proj.weight
    torch.testing.assert_close(ours, tensors[name].float() * each)
    torch.testing.assert_close(ours, plain, rtol=0.1, atol=0.01)
    assert torch.equal(drafter.lm_head.weight, head[KEPT])
    assert "has several prediction modules; the first serves all depths" in capsys.readouterr().out
    with pytest.raises(
        UserError, match=r"train_head=false: the prediction module .* has a head of its own"
    ):
        MTP.native(loaded, KEPT, {"train_head": False})


def test_the_class_decides_where_tensors_fit_a_plain_layer_too(target, target_dir):
    """Granite's tensors have Llama's names and shapes, and its layers scale what they add to the residual."""
    sizes = {
        key: getattr(target.config, key)
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    }
    torch.manual_seed(0)
    model = GraniteForCausalLM(
        GraniteConfig(**sizes, num_key_value_heads=2, num_hidden_layers=4, residual_multiplier=0.4)
    )
    model.save_pretrained(target_dir)
    loaded = with_native(
        target_dir, native_tensors(make_kind("mtp", target, shake=True), "deepseek")
    )
    layer = MTP.native(loaded, KEPT, {}).blocks[0].layer
    assert isinstance(layer, OwnLayer) and layer.layer.residual_multiplier == 0.4


def test_no_native_module_and_other_shapes_are_said(target, target_dir):
    loaded = Target.load(str(target_dir), "float32")
    with pytest.raises(UserError, match="holds no multi-token prediction module"):
        MTP.native(loaded, torch.arange(target.vocab_size), {})
    tensors = native_tensors(make_kind("mtp", target), "qwen")
    gated = tensors["mtp.layers.0.self_attn.q_proj.weight"].repeat(2, 1)
    loaded = with_native(target_dir, {**tensors, "mtp.layers.0.self_attn.q_proj.weight": gated})
    with pytest.raises(UserError, match=r"q_proj.weight is \[64, 32\], not \[32, 32\]"):
        MTP.native(loaded, torch.arange(target.vocab_size), {})
