"""Targets without weights, and the dtypes of files and devices."""

from __future__ import annotations

import pytest
import torch

from drafttrain.errors import UserError
from drafttrain.target import Target, architectures_of, load_shell, resolve_dtype


def test_a_shell_has_the_identity_of_its_target_and_no_weights(target_dir):
    shell, target = load_shell(str(target_dir)), Target.load(str(target_dir), device="cpu")
    assert shell.identity() == target.identity()
    assert shell.device.type == "meta" and shell.forms == [] and len(target.forms) == target.num_layers
    assert architectures_of(str(target_dir)) == ["LlamaForCausalLM"]


def test_a_missing_target_is_an_error_for_shells_and_no_architectures(tmp_path):
    missing = str(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"target=.*no model folder with a config\.json there"):
        load_shell(missing)
    assert architectures_of(missing) == architectures_of("") == []


def test_auto_is_the_dtype_of_a_device_and_none_of_a_file():
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16") == torch.float16
    with pytest.raises(UserError, match=r"dtype='auto' is not one of float32, bfloat16, float16$"):
        resolve_dtype("auto")
    with pytest.raises(UserError, match=r"dtype='int3' is not one of auto, float32"):
        resolve_dtype("int3", torch.device("cpu"))
