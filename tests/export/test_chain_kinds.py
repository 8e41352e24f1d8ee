"""EAGLE-1, P-EAGLE and MTP as engines load them: names, shapes, and the drafts of what is read back."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.drafters.registry import META_FILE
from drafttrain.drafters.shipping import ExportRequest, check_expressible, find_drafter, shipping
from drafttrain.errors import UserError
from tests.conftest import make_target, save_target
from tests.drafters.layer_kinds import make_kind
from tests.files import load_json

KEPT = torch.arange(40, 240)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def trained(tmp_path, kind, **options):
    target = make_target(layers=8)
    make_kind(kind, target, KEPT, shake=True, **options).save_pretrained(tmp_path / "drafter")
    assert not (tmp_path / "drafter" / META_FILE).exists()
    return find_drafter(str(tmp_path / "drafter"))


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_hidden_layers": 2, "attention_bias": True, "rope_parameters": YARN}],
    ids=len,
)
def test_eagle1_files_compute_what_the_drafter_does(tmp_path, form, options):
    head = trained(tmp_path, "eagle1", **options)
    kind = check_expressible(head, form)
    kind.write(head, form, ExportRequest(tmp_path / "out", torch.float32))
    config = load_json(tmp_path / "out" / "config.json")
    assert config["architectures"] == [
        {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}[form]
    ]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["fc.weight"].shape == (32, 64) and ("fc.bias" in weights) == (form == "sglang")
    assert "layers.0.input_layernorm.weight" not in weights
    assert ("layers.1.input_layernorm.weight" in weights) == (options.get("num_hidden_layers") == 2)
    assert not [
        name for name in weights if "embed" in name or "lm_head" in name or name.startswith("norm")
    ]
    assert kind.check(head, tmp_path / "out")["max_state_difference"] < 1e-5
    weights["layers.0.mlp.up_proj.weight"] *= 1.5
    save_file(weights, tmp_path / "out" / "model.safetensors")
    with pytest.raises(UserError, match="computes something else"):
        kind.check(head, tmp_path / "out")


def test_eagle1_says_what_engines_lack(tmp_path):
    head = trained(
        tmp_path,
        "eagle1",
        qk_norm=True,
        sliding_window=6,
        hidden_act="gelu_pytorch_tanh",
        mlp_bias=True,
    )
    reasons = " ".join(shipping("eagle1").unsupported(head, "sglang"))
    for word in ("hidden_act", "sliding_window", "qk_norm", "mlp_bias"):
        assert word in reasons
    assert "mlp_bias" not in " ".join(shipping("eagle1").unsupported(head, "vllm"))
    assert shipping("eagle1").unsupported(head, "gguf") == [
        "no gguf format is known for kind 'eagle1'"
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [{}, {"num_hidden_layers": 2, "qk_norm": True, "norm_before_residual": True}],
    ids=len,
)
def test_peagle_files_compute_what_the_drafter_does(tmp_path, options):
    head = trained(tmp_path, "peagle", mask_token_id=7, **options)
    kind = check_expressible(head, "vllm")
    kind.write(head, "vllm", ExportRequest(tmp_path / "out", torch.float32, depth=4))
    config = load_json(tmp_path / "out" / "config.json")
    assert (
        config["architectures"] == ["PEagleSpeculator"]
        and config["speculators_model_type"] == "peagle"
    )
    assert config["mask_token_id"] == 7 and config["speculators_config"]["algorithm"] == "peagle"
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["mask_hidden"].shape == (1, 1, 96) and weights[
        "layers.0.self_attn.q_proj.weight"
    ].shape == (32, 64)
    assert kind.check(head, tmp_path / "out")["max_log_prob_difference"] < 1e-5
    weights["mask_hidden"] *= -1
    save_file(weights, tmp_path / "out" / "model.safetensors")
    with pytest.raises(UserError, match="computes something else"):
        kind.check(head, tmp_path / "out")


@pytest.mark.thorough
def test_mtp_files_compute_what_the_drafter_does(tmp_path):
    head = trained(tmp_path, "mtp", train_head=False)
    target = make_target(layers=8)
    save_target(target, tmp_path / "target")
    kind = check_expressible(head, "vllm")
    kind.write(
        head,
        "vllm",
        ExportRequest(tmp_path / "out", torch.float32, source=str(tmp_path / "target")),
    )
    wide = trained(tmp_path / "wide", "mtp", train_head=False, num_key_value_heads=4)
    with pytest.raises(UserError, match=r"num_key_value_heads=4 \(there 2\); train it without"):
        kind.write(
            wide,
            "vllm",
            ExportRequest(tmp_path / "out2", torch.float32, source=str(tmp_path / "target")),
        )
    config = load_json(tmp_path / "out" / "config.json")
    assert (
        config["architectures"] == ["MiMoForCausalLM"] and config["num_nextn_predict_layers"] == 1
    )
    weights = load_file(tmp_path / "out" / "model.safetensors")
    place = "model.mtp_layers.0."
    block = head.load().blocks[0]
    assert all(name.startswith(place) for name in weights)
    state, embed = weights[f"{place}input_proj.weight"].chunk(
        2, dim=1
    )  # the state's half comes first there
    assert torch.equal(torch.cat((embed, state), dim=1), block.eh_proj.weight)
    assert torch.equal(weights[f"{place}hidden_layernorm.weight"], block.hnorm.weight)
    assert not weights[f"{place}self_attn.k_proj.bias"].any()
    assert kind.check(head, tmp_path / "out")["max_log_prob_difference"] < 1e-5
    for name, said in (
        ("input_proj.weight", "computes something else"),
        ("self_attn.q_proj.bias", "self_attn.q_proj.bias is not zero"),
    ):
        save_file(
            {**weights, place + name: weights[place + name] + 1.0},
            tmp_path / "out" / "model.safetensors",
        )
        with pytest.raises(UserError, match=said):
            kind.check(head, tmp_path / "out")


def test_what_vllm_cannot_run_of_mtp(tmp_path):
    head = trained(tmp_path, "mtp", modules=2, qk_norm=True, attention_bias=True)
    reasons = " ".join(shipping("mtp").unsupported(head, "vllm"))
    assert all(
        word in reasons for word in ("train_head=true", "modules=2", "qk_norm", "attention_bias")
    )


def test_what_no_engine_reads_is_refused(tmp_path):
    assert (
        "fc_norm"
        in shipping("peagle").unsupported(trained(tmp_path / "p", "peagle", fc_norm=True), "vllm")[
            0
        ]
    )
    with pytest.raises(UserError, match="out of the target's own checkpoint"):
        check_expressible(trained(tmp_path / "m", "mtp"), "sglang")
