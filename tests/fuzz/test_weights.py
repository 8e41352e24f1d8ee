"""Damaged targets, drafters and published heads: loading them is success or one line."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

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

KINDS = sorted(f"drafters/{path.name}" for path in (FIXTURES / "drafters").glob("*"))


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


def load_target(folder):
    return Target.load(str(folder), "float32", "cpu")


def shell_of(folder):
    return load_shell(str(folder))


def decoding_of(folder):
    return decoding_settings(str(folder))


def load_head(folder):
    return load_drafter(str(folder), target())


def read(folder, pickles=False):
    return import_drafter.find_kind(folder).read(folder, target().identity(), pickles)


class Border(NamedTuple):
    """A file that is read from folders of the fixtures.

    Attributes:
        name: in the report of counts. examples: faults that are tried. faults: those that may occur.
        refuses: the faults in `REFUSED` must not load. quick: it runs in every check.
    """

    name: str
    examples: int
    faults: st.SearchStrategy[Fault]
    folders: list[str]
    files: list[str]
    read: Callable[[Path], object]
    refuses: bool = False
    quick: bool = False

    def case(self):
        marks = [] if self.quick else [pytest.mark.thorough]
        return pytest.param(self, marks=marks, id=self.name)


WEIGHTS = st.one_of(file_faults(), st.sampled_from(TENSOR_FAULTS))
TEXT = st.one_of(text_faults(), json_faults())
FORMS = ["exports/eagle3_vllm", "exports/eagle3_sglang"]
TENSORS = ["model.safetensors"]
CONFIG = ["config.json"]
TOKENIZER = ["tokenizer.json", "tokenizer_config.json"]
EAGLE3 = ["drafters/eagle3"]
LM = ["drafters/draft_model"]
BORDERS = [
    Border("target: weights", 8, WEIGHTS, ["target"], TENSORS, load_target, refuses=True),
    Border("target: config.json", 4, TEXT, ["target"], CONFIG, load_target),
    Border("target: generation_config.json", 4, TEXT, ["target"], ["generation_config.json"], load_target),
    Border("target without weights: config.json", 15, TEXT, ["target"], CONFIG, shell_of, quick=True),
    Border("target: tokenizer files", 4, text_faults(), ["target"], TOKENIZER, load_target),
    Border("drafter: weights", 15, WEIGHTS, KINDS, TENSORS, load_head, refuses=True),
    Border("drafter: config.json", 18, TEXT, KINDS, CONFIG, load_head),
    Border("drafter: decoding.json", 18, TEXT, EAGLE3, ["decoding.json"], decoding_of, quick=True),
    Border("drafter: drafttrain.json", 4, TEXT, LM, ["drafttrain.json"], load_head),
    Border("import: weights", 15, WEIGHTS, FORMS, TENSORS, read),
    Border("import: config.json", 18, TEXT, FORMS, CONFIG, read),
]  # fmt: skip


@pytest.mark.parametrize("border", [border.case() for border in BORDERS])
def test_one_file(border, folder):
    @fuzz(border.examples)
    @given(
        fault=border.faults,
        source=st.sampled_from(border.folders),
        file=st.sampled_from(border.files),
        seed=seeds(),
    )
    def with_fault(fault, source, file, seed):
        changed(FIXTURES / source, folder, file, fault, seed)
        text = outcome(border.name, fault.name, lambda: border.read(folder))
        loads = not (border.refuses and fault.name in REFUSED)
        assert text or loads, f"{fault.name} loaded"

    with_fault()


@pytest.mark.thorough
@fuzz(examples=8)
@given(
    fault=TEXT,
    seed=seeds(),
    sharded=st.sampled_from(["target", FORMS[0]]),
)
def test_index(fault, seed, sharded, folder, tmp_path_factory):
    original = tmp_path_factory.mktemp("sharded") / "it"
    shutil.copytree(FIXTURES / sharded, original)
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
    call = load_target if sharded == "target" else read
    outcome("index of shards", fault.name, lambda: call(folder))


@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
@pytest.mark.parametrize("recorded", [3, "x", ["x"], {"name": 3}])
def test_a_drafters_record_of_its_target(folder, kind, recorded):
    shutil.copytree(FIXTURES / "drafters" / kind, folder)
    file = folder / ("drafttrain.json" if kind == "draft_model" else "config.json")
    file.write_text(json.dumps({**load_json(file), "target": recorded}))
    with pytest.raises(UserError, match=r"drafter='.*': target.*=.*: input should be a valid"):
        find_drafter(str(folder))


@pytest.mark.thorough
@fuzz(examples=10)
@given(fault=file_faults(), form=st.sampled_from(FORMS), seed=seeds())
def test_import_pickles(fault, form, seed, folder, tmp_path_factory):
    original = tmp_path_factory.mktemp("pickled") / "it"
    shutil.copytree(FIXTURES / form, original)
    torch.save(load_file(original / "model.safetensors"), original / "pytorch_model.bin")
    (original / "model.safetensors").unlink()
    changed(original, folder, "pytorch_model.bin", fault, seed)
    outcome("import: pickled weights", fault.name, lambda: read(folder, pickles=True))
