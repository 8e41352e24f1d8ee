"""EAGLE-1, P-EAGLE and MTP: what engines lack, and MTP's layout; test_read_back drafts with their files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafters.registry import META_FILE
from drafttrain.drafters.shipping import ExportRequest, check_expressible, find_drafter, shipping
from drafttrain.errors import UserError
from tests.conftest import make_target, save_target
from tests.drafters.layer_kinds import make_kind
from tests.files import load_json

KEPT = torch.arange(40, 240)


def trained(tmp_path, kind, **options):
    target = make_target(layers=8)
    make_kind(kind, target, KEPT, shake=True, **options).save_pretrained(tmp_path / "drafter")
    assert not (tmp_path / "drafter" / META_FILE).exists()
    return find_drafter(str(tmp_path / "drafter"))


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
def test_mtp_files_have_the_layout_of_mimo(tmp_path):
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
