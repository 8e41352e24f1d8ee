"""Damaged targets, drafters and published heads: loading them is success or one line."""

from __future__ import annotations

import functools
import json
import shutil
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save, save_file

from drafttrain.drafters.registry import decoding_settings, load_drafter
from drafttrain.drafters.shipping import find_drafter
from drafttrain.errors import UserError
from drafttrain.export import import_drafter
from drafttrain.target import Target, load_shell
from tests.files import FIXTURES, dump_json, load_json
from tests.fuzz import (
    JSON_FAULTS,
    Fault,
    file_faults,
    fuzz,
    json_faults,
    outcome,
    seeds,
    text_faults,
)

KINDS = sorted(path.name for path in (FIXTURES / "drafters").glob("*"))


def _tensors(name, change):
    """A fault of one tensor of a safetensors file."""

    def apply(content, random):
        tensors = load(content)
        key = random.choice(sorted(tensors))
        change(tensors, key, tensors[key], random)
        return save({name: value.contiguous() for name, value in tensors.items()}, {"format": "pt"})

    return Fault(name, apply)


def _set(value):
    def change(tensors, key, tensor, random):
        if tensor.is_floating_point():
            tensors[key] = tensor.clone()
            tensors[key].view(-1)[random.randrange(tensor.numel())] = value
        else:
            tensors[key] = torch.full_like(tensor, random.choice((-1, 0, 10**6)))

    return change


TENSOR_FAULTS = (
    _tensors("tensor missing", lambda tensors, key, tensor, random: tensors.pop(key)),
    _tensors(
        "tensor renamed",
        lambda tensors, key, tensor, random: tensors.update({f"{key}.x": tensors.pop(key)}),
    ),
    _tensors(
        "tensor added",
        lambda tensors, key, tensor, random: tensors.update({f"{key}_2": tensor.clone()}),
    ),
    _tensors(
        "another shape",
        lambda tensors, key, tensor, random: tensors.update({key: torch.cat((tensor, tensor))}),
    ),
    _tensors(
        "flattened",
        lambda tensors, key, tensor, random: tensors.update({key: tensor.reshape(1, -1)}),
    ),
    _tensors("NaN", _set(float("nan"))),
    _tensors("infinite", _set(float("-inf"))),
)
# These make a file that must not load.
REFUSED = {fault.name for fault in TENSOR_FAULTS} | {"cut off", "empty", "another file"}


def tensor_faults() -> st.SearchStrategy[Fault]:
    return st.sampled_from(TENSOR_FAULTS)


def changed(original, folder, name, fault, seed):
    """A copy of a folder with one faulty file."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    file = folder / name
    random = Random(seed)
    if fault in JSON_FAULTS:
        file.write_text(json.dumps(fault.apply(load_json(file), random)))
    else:
        file.write_bytes(fault.apply(file.read_bytes(), random))
    return folder


@functools.cache
def target():
    return Target.load(str(FIXTURES / "target"), "float32", "cpu")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "changed"


def check(border, fault, call):
    text = outcome(border, fault.name, call)
    assert text or fault.name not in REFUSED, f"{fault.name} loaded"


# -- targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@fuzz(examples=8)
@given(fault=st.one_of(file_faults(), tensor_faults()), seed=seeds())
def test_target_weights(fault, seed, folder):
    changed(FIXTURES / "target", folder, "model.safetensors", fault, seed)
    check("target: weights", fault, lambda: Target.load(str(folder), "float32", "cpu"))


@pytest.mark.thorough
@fuzz(examples=8)
@given(
    fault=st.one_of(text_faults(), json_faults()),
    name=st.sampled_from(["config", "generation_config"]),
    seed=seeds(),
)
def test_target_config(fault, name, seed, folder):
    changed(FIXTURES / "target", folder, f"{name}.json", fault, seed)
    outcome(f"target: {name}.json", fault.name, lambda: Target.load(str(folder), "float32", "cpu"))


@fuzz(examples=15)
@given(fault=st.one_of(text_faults(), json_faults()), seed=seeds())
def test_shell_config(fault, seed, folder):
    changed(FIXTURES / "target", folder, "config.json", fault, seed)
    outcome("target without weights: config.json", fault.name, lambda: load_shell(str(folder)))


@pytest.mark.thorough
@fuzz(examples=4)
@given(
    fault=text_faults(),
    name=st.sampled_from(["tokenizer.json", "tokenizer_config.json"]),
    seed=seeds(),
)
def test_target_tokenizer(fault, name, seed, folder):
    changed(FIXTURES / "target", folder, name, fault, seed)
    outcome(
        "target: tokenizer files", fault.name, lambda: Target.load(str(folder), "float32", "cpu")
    )


@pytest.mark.thorough
@fuzz(examples=8)
@given(
    fault=st.one_of(text_faults(), json_faults()),
    seed=seeds(),
    sharded=st.sampled_from(["target", "eagle3_vllm"]),
)
def test_index(fault, seed, sharded, folder, tmp_path_factory):
    original = tmp_path_factory.mktemp("sharded") / "it"
    shutil.copytree(
        FIXTURES / ("target" if sharded == "target" else f"exports/{sharded}"), original
    )
    tensors = load_file(original / "model.safetensors")
    (original / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for part, mine in parts.items():
        save_file({name: tensors[name] for name in mine}, original / part, {"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {name: part for part, mine in parts.items() for name in mine},
    }
    dump_json(original / "model.safetensors.index.json", index)
    changed(original, folder, "model.safetensors.index.json", fault, seed)
    if sharded == "target":
        call = lambda: Target.load(str(folder), "float32", "cpu")  # noqa: E731
    else:
        call = lambda: import_drafter.find_kind(folder).read(folder, target().identity())  # noqa: E731
    outcome("index of shards", fault.name, call)


# -- drafters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
@pytest.mark.parametrize("recorded", [3, "x", ["x"], {"name": 3}])
def test_a_drafters_record_of_its_target(folder, kind, recorded):
    shutil.copytree(FIXTURES / "drafters" / kind, folder)
    file = folder / ("drafttrain.json" if kind == "draft_model" else "config.json")
    file.write_text(json.dumps({**load_json(file), "target": recorded}))
    with pytest.raises(UserError, match=r"drafter='.*': target.*=.*: input should be a valid"):
        find_drafter(str(folder))


@pytest.mark.thorough
@fuzz(examples=15)
@given(fault=st.one_of(file_faults(), tensor_faults()), kind=st.sampled_from(KINDS), seed=seeds())
def test_drafter_weights(fault, kind, seed, folder):
    changed(FIXTURES / "drafters" / kind, folder, "model.safetensors", fault, seed)
    check("drafter: weights", fault, lambda: load_drafter(str(folder), target()))


@pytest.mark.thorough
@fuzz(examples=18)
@given(fault=st.one_of(text_faults(), json_faults()), kind=st.sampled_from(KINDS), seed=seeds())
def test_drafter_config(fault, kind, seed, folder):
    changed(FIXTURES / "drafters" / kind, folder, "config.json", fault, seed)
    outcome("drafter: config.json", fault.name, lambda: load_drafter(str(folder), target()))


@fuzz(examples=18)
@given(fault=st.one_of(text_faults(), json_faults()), seed=seeds())
def test_drafter_decoding(fault, seed, folder):
    changed(FIXTURES / "drafters" / "eagle3", folder, "decoding.json", fault, seed)
    outcome("drafter: decoding.json", fault.name, lambda: decoding_settings(str(folder)))


@pytest.mark.thorough
@fuzz(examples=4)
@given(fault=st.one_of(text_faults(), json_faults()), seed=seeds())
def test_draft_model_meta(fault, seed, folder):
    changed(FIXTURES / "drafters" / "draft_model", folder, "drafttrain.json", fault, seed)
    outcome("drafter: drafttrain.json", fault.name, lambda: load_drafter(str(folder), target()))


# -- imports ----------------------------------------------------------------------------------------------------------

FORMS = ["eagle3_vllm", "eagle3_sglang"]


def read(folder, pickles=False):
    return import_drafter.find_kind(folder).read(folder, target().identity(), pickles)


@pytest.mark.thorough
@fuzz(examples=15)
@given(fault=st.one_of(file_faults(), tensor_faults()), form=st.sampled_from(FORMS), seed=seeds())
def test_import_weights(fault, form, seed, folder):
    changed(FIXTURES / "exports" / form, folder, "model.safetensors", fault, seed)
    outcome("import: weights", fault.name, lambda: read(folder))


@pytest.mark.thorough
@fuzz(examples=18)
@given(fault=st.one_of(text_faults(), json_faults()), form=st.sampled_from(FORMS), seed=seeds())
def test_import_config(fault, form, seed, folder):
    changed(FIXTURES / "exports" / form, folder, "config.json", fault, seed)
    outcome("import: config.json", fault.name, lambda: read(folder))


@pytest.mark.thorough
@fuzz(examples=10)
@given(fault=file_faults(), form=st.sampled_from(FORMS), seed=seeds())
def test_import_pickles(fault, form, seed, folder, tmp_path_factory):
    original = tmp_path_factory.mktemp("pickled") / "it"
    shutil.copytree(FIXTURES / "exports" / form, original)
    torch.save(load_file(original / "model.safetensors"), original / "pytorch_model.bin")
    (original / "model.safetensors").unlink()
    changed(original, folder, "pytorch_model.bin", fault, seed)
    outcome("import: pickled weights", fault.name, lambda: read(folder, pickles=True))
