"""Exports with layers in float8 and nvfp4: the layers alone are rounded, in compressed-tensors' form, and proven as any other."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.cli import main
from drafttrain.drafters.registry import kind_class
from drafttrain.drafters.shipping import find_drafter, shipping
from drafttrain.errors import UserError
from drafttrain.export.export_drafter import export
from drafttrain.formats.small_layers import SMALL, round_layers, small_layers
from drafttrain.inside_vllm.head_files import SwapRefused, read_head, refuse_small_layers
from tests.conftest import make_target, make_tokenizer

VLLM = os.environ.get("VLLM_PYTHON", "")  # the interpreter of an environment with vLLM
# What vLLM computes with where no kernel multiplies float4 numbers: it divides by the global scale as it loads.
READ_BY_VLLM = """
import sys, torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
tensors = load_file(sys.argv[1])
read = {}
for name in tensors:
    if name.endswith("_packed"):
        weight = name.removesuffix("_packed")
        whole = 1.0 / tensors[weight + "_global_scale"].float()
        read[weight] = dequantize_to_dtype(
            tensors[name], tensors[weight + "_scale"], whole, torch.bfloat16, 16, swizzle=False
        )
save_file(read, sys.argv[2])
"""


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


@pytest.mark.parametrize(("form", "near"), [("float8", 0.07), ("nvfp4", 0.18)])
def test_layers_are_small_and_the_rest_is_bfloat16(heads, tmp_path, form, near):
    words = ["--drafter", heads / "eagle3", "--format", "vllm", "--dtype", form]
    assert main(["export", *map(str, words), "--output", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    layers = SMALL[form]
    assert small_layers(config) is layers
    inner = config["transformer_layer_config"]  # what vLLM reads of a draft
    assert inner["quantization_config"] == config["quantization_config"]
    assert config["quantization_config"]["ignore"] == ["re:.*lm_head", "re:.*fc$"]

    made = load_file(tmp_path / "out" / "model.safetensors")
    plain = load_file(heads / "eagle3" / "model.safetensors")
    names = {name.removesuffix("_scale") for name in made if name.endswith("weight_scale")}
    assert len(names) == 7 and all(name.endswith("_proj.weight") for name in names)
    for name in names:
        numbers = layers.product(*(made.pop(name + part) for part in layers.parts)).float()
        own = plain["midlayer." + name.removeprefix("layers.0.")].float()
        highest = own.abs().amax(1, keepdim=True)
        assert numbers.isfinite().all()
        # Half a step of the grid: near the number itself, or near zero of its block's largest.
        assert ((numbers - own).abs() <= near * own.abs() + near / 2 * highest).all(), name
    assert all(
        tensor.dtype == torch.bfloat16 for tensor in made.values() if tensor.is_floating_point()
    )


def test_float4_numbers_are_the_nearest_of_their_grid():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 48, generator=generator) * torch.tensor(
        [[1.0], [1e-6], [30.0], [0.0], [1.0]]
    )
    layers = SMALL["nvfp4"]
    packed, scale, whole = layers.divided(weight, weight.abs().max())
    assert packed.dtype == torch.uint8 and packed.shape == (5, 24)
    assert scale.shape == (5, 3) and whole.shape == (1,)
    steps = scale.float().repeat_interleave(16, 1) / whole.float()  # what one is worth
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = torch.cat((grid, -grid))
    values = grid * steps[..., None]  # [5, 48, 16]
    nearest = (values - weight[..., None]).abs().amin(-1)
    made = layers.product(packed, scale, whole).float()
    torch.testing.assert_close(
        (made - weight).abs(), nearest, rtol=0.01, atol=0.01 * float(steps.max())
    )
    low = grid[(packed % 16).long()] * steps[:, 0::2]  # the first of two numbers is in the low bits
    torch.testing.assert_close(low.bfloat16().float(), made[:, 0::2])


@pytest.mark.parametrize("form", ["float8", "nvfp4"])
def test_an_export_is_proven_and_a_changed_scale_is_found(heads, tmp_path, form):
    trained = find_drafter(str(heads / "eagle3"))
    export(trained, "vllm", tmp_path / "out", layers=form)
    figures = shipping("eagle3").check(trained, tmp_path / "out")
    assert figures["max_log_prob_difference"] == 0 and figures["same_tokens"]
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    for name in ("layers.0.self_attn.q_proj.weight_scale", "layers.0.mlp.down_proj.weight_scale"):
        scale = tensors[name]
        tensors[name] = (scale.float() * 1.5).clamp(max=448).to(scale.dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="computes something else"):
        shipping("eagle3").check(trained, tmp_path / "out")
    del tensors["layers.0.self_attn.q_proj.weight_scale"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"has dtype torch\.float8_e4m3fn|q_proj"):
        shipping("eagle3").check(trained, tmp_path / "out")


@pytest.mark.parametrize(("kind", "form"), [("eagle3", "sglang"), ("dflash", "vllm")])
def test_what_was_not_tried_is_refused(heads, tmp_path, kind, form):
    trained = find_drafter(str(heads / kind))
    with pytest.raises(
        UserError,
        match=f"no engine was tried with such layers of a drafter of kind {kind} as {form}",
    ):
        export(trained, form, tmp_path / "out", layers="float8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["float8", "nvfp4"])
def test_an_export_is_read_back_and_fits(heads, tmp_path, form):
    make_target().model.save_pretrained(tmp_path / "target")
    make_tokenizer(300).save_pretrained(tmp_path / "target")
    trained = find_drafter(str(heads / "eagle3"))
    export(trained, "vllm", tmp_path / "small", layers=form)
    words = ["--checkpoint", tmp_path / "small", "--target", tmp_path / "target"]
    assert main(["import", *map(str, words), "--output", str(tmp_path / "back")]) == 0
    head = trained.load()
    round_layers(SMALL[form], head)
    for name, weight in load_file(tmp_path / "back" / "model.safetensors").items():
        assert torch.equal(weight, head.state_dict()[name].to(weight.dtype)), name


@pytest.mark.parametrize("form", ["float8", "nvfp4"])
def test_a_server_takes_no_head_with_small_layers(heads, tmp_path, form):
    trained = find_drafter(str(heads / "eagle3"))
    export(trained, "vllm", tmp_path / "plain")
    export(trained, "vllm", tmp_path / "small", layers=form)
    plain, small = (read_head(tmp_path / name, name) for name in ("plain", "small"))
    refuse_small_layers(plain)
    with pytest.raises(SwapRefused, match="has layers in float8 or nvfp4"):
        refuse_small_layers(small)


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="VLLM_PYTHON is not set")
def test_vllm_reads_nvfp4_as_we_do(heads, tmp_path):
    trained = find_drafter(str(heads / "eagle3"))
    export(trained, "vllm", tmp_path, layers="nvfp4")
    made = load_file(tmp_path / "model.safetensors")
    words = [tmp_path / "model.safetensors", tmp_path / "read.safetensors"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([VLLM, "-c", READ_BY_VLLM, *map(str, words)], check=True, env=environment)
    read = load_file(tmp_path / "read.safetensors")
    assert len(read) == 7
    layers = SMALL["nvfp4"]
    for name, theirs in read.items():
        ours = layers.product(*(made[name + part] for part in layers.parts))
        torch.testing.assert_close(ours, theirs, rtol=2**-8, atol=0)  # the last bit of bfloat16
