"""Exports in float8: the layers alone are rounded, the form is compressed-tensors', and the export is proven as any other."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.cli import main
from drafttrain.drafters.registry import kind_class
from drafttrain.drafters.shipping import find_drafter, shipping
from drafttrain.errors import UserError
from drafttrain.export.export_drafter import export
from drafttrain.formats.float8 import FLOAT8, is_float8, round_layers
from drafttrain.inside_vllm.head_files import SwapRefused, read_head, refuse_float8
from tests.conftest import make_target, make_tokenizer


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Trained heads of two kinds; one row of a layer is zero, one large."""
    folder = tmp_path_factory.mktemp("float8")
    target = make_target()
    for kind in ("eagle3", "dflash"):
        torch.manual_seed(1)
        cls = kind_class(kind)
        drafter = cls.begin(target, "target", {"draft_vocab_size": 64}, "kl", torch.arange)
        drafter.bind(target)
        if kind == "eagle3":
            with torch.no_grad():
                drafter.midlayer.mlp.up_proj.weight[0] = 0
                drafter.midlayer.mlp.up_proj.weight[1] *= 1000
        drafter.save_pretrained(folder / kind)
    return folder


def test_layers_are_float8_and_the_rest_is_bfloat16(heads, tmp_path):
    words = ["--drafter", heads / "eagle3", "--format", "vllm", "--dtype", "float8"]
    assert main(["export", *map(str, words), "--output", str(tmp_path / "out")]) == 0
    made = load_file(tmp_path / "out" / "model.safetensors")
    plain = load_file(heads / "eagle3" / "model.safetensors")
    halves = {name for name, tensor in made.items() if tensor.dtype == FLOAT8}
    assert len(halves) == 7 and all(name.endswith("_proj.weight") for name in halves)
    for name, tensor in made.items():
        if name not in halves and tensor.is_floating_point():
            assert tensor.dtype == torch.bfloat16
    for name in halves:
        numbers = made[name].float() * made[name + "_scale"].float()
        own = plain["midlayer." + name.removeprefix("layers.0.")].float()
        highest = own.abs().amax(1, keepdim=True)
        assert numbers.isfinite().all()
        assert ((numbers - own).abs() <= 0.07 * own.abs() + 0.005 * highest).all(), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert is_float8(config)
    inner = config["transformer_layer_config"]  # what vLLM reads of a draft
    assert inner["quantization_config"] == config["quantization_config"]
    assert config["quantization_config"]["ignore"] == ["re:.*lm_head", "re:.*fc$"]


def test_an_export_is_proven_and_a_changed_scale_is_found(heads, tmp_path, capsys):
    trained = find_drafter(str(heads / "eagle3"))
    export(trained, "vllm", tmp_path / "out", FLOAT8)
    figures = shipping("eagle3").check(trained, tmp_path / "out")
    assert figures["max_log_prob_difference"] == 0 and figures["same_tokens"]
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    tensors["layers.0.self_attn.q_proj.weight_scale"] *= 1.5
    tensors["layers.0.mlp.down_proj.weight_scale"] *= 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="computes something else"):
        shipping("eagle3").check(trained, tmp_path / "out")
    del tensors["layers.0.self_attn.q_proj.weight_scale"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"has dtype torch\.float8_e4m3fn"):
        shipping("eagle3").check(trained, tmp_path / "out")


@pytest.mark.parametrize(("kind", "form"), [("eagle3", "sglang"), ("dflash", "vllm")])
def test_what_was_not_tried_is_refused(heads, tmp_path, kind, form):
    trained = find_drafter(str(heads / kind))
    with pytest.raises(
        UserError, match=f"no engine was run with a drafter of kind {kind} as {form}"
    ):
        export(trained, form, tmp_path / "out", FLOAT8)
    assert not (tmp_path / "out").exists()


def test_an_export_is_read_back_and_fits(heads, tmp_path):
    make_target().model.save_pretrained(tmp_path / "target")
    make_tokenizer(300).save_pretrained(tmp_path / "target")
    trained = find_drafter(str(heads / "eagle3"))
    export(trained, "vllm", tmp_path / "small", FLOAT8)
    words = ["--checkpoint", tmp_path / "small", "--target", tmp_path / "target"]
    assert main(["import", *map(str, words), "--output", str(tmp_path / "back")]) == 0
    head = trained.load()
    round_layers(head)
    for name, weight in load_file(tmp_path / "back" / "model.safetensors").items():
        assert torch.equal(weight, head.state_dict()[name].to(weight.dtype)), name


def test_a_server_takes_no_float8_head(heads, tmp_path):
    trained = find_drafter(str(heads / "eagle3"))
    export(trained, "vllm", tmp_path / "plain")
    export(trained, "vllm", tmp_path / "small", FLOAT8)
    plain, small = (read_head(tmp_path / name, name) for name in ("plain", "small"))
    refuse_float8(plain)
    with pytest.raises(SwapRefused, match="is float8"):
        refuse_float8(small)
