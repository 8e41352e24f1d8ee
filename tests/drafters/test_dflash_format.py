"""Exported DFlash drafters: names, keys, and the drafts of what is read back."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.dflash.model import DFlash
from drafttrain.drafters.shipping import (
    ExportRequest,
    check_expressible,
    find_drafter,
    shipping,
)
from drafttrain.errors import UserError
from tests.conftest import save_target
from tests.drafters.block_kinds import shaken
from tests.files import load_json


def exported(target, folder, **options):
    drafter = shaken(DFlash, target, **{"feature_layers": (1, 2, 3), **options})
    save_target(target, folder / "target")
    drafter.config.target["name"] = str(folder / "target")
    drafter.save_pretrained(folder / "ours")
    trained = find_drafter(str(folder / "ours"))
    request = ExportRequest(folder, torch.float32, str(folder / "target"))
    check_expressible(trained, "vllm").write(trained, "vllm", request)
    return trained, load_json(folder / "config.json")


def test_what_vllm_cannot_compute_is_refused_with_every_reason(target, tmp_path):
    with pytest.raises(UserError, match=r"inputs of layers 1 to 3 only; .*in ascending order"):
        exported(target, tmp_path, feature_layers=(2, 0))
    assert not list(tmp_path.glob("*.*"))


def test_windows_are_written_for_engines_that_compute_them(target, tmp_path):
    _, config = exported(
        target, tmp_path, sliding_window=9, mask_token_id=290, kept=torch.arange(300)
    )
    own = config["dflash_config"]  # vLLM symmetrizes the window of a layer that is not causal
    assert own["swa_window_size"] == 9 and own["causal"] is False
    assert config["use_sliding_window"] and config["is_causal"] is False  # SGLang's names
    trained = find_drafter(str(tmp_path / "ours"))
    with pytest.raises(UserError, match=r"sliding_window=9: .* not found in SGLang 0.5.18"):
        check_expressible(trained, "sglang", "0.5.18")
    with pytest.raises(UserError, match=r"sliding_window=9: .* not found in transformers"):
        check_expressible(trained, "transformers")


@pytest.mark.parametrize("causal", [True, False, "sliding"])
def test_layers_that_differ_are_written_as_engines_read_them(target, tmp_path, causal):
    types = ["sliding_attention", "full_attention"]
    own = {"layer_types": types, "sliding_window": 9, "causal": causal, "attention_sink_bias": True}
    trained, config = exported(target, tmp_path, mask_token_id=290, **own)
    keys = config["dflash_config"]
    assert config["layer_types"] == types and keys["attention_sink_bias"] and "use_swa" not in keys
    # Without a key, engines take layers with a window for causal ones.
    wanted = None if causal == "sliding" else causal
    assert config.get("is_causal") == keys.get("causal") == wanted
    assert shipping("dflash").check(trained, tmp_path)["max_log_prob_difference"] < 1e-5
