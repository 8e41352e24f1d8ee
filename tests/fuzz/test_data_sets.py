"""Data sets: meta.json, the lines of a part, shards of stored states, and the Arrow cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drafttrain.batch import Batch
from drafttrain.data.loader import collate, count_tokens, training_rows
from drafttrain.data.store import FeatureStore, load_records, read_meta, stored_features
from tests.files import FIXTURES, dump_jsonl, load_json, load_jsonl
from tests.fuzz import FILE_FAULTS, file_faults, fuzz, json_faults, outcome, seeds, text_faults

LAYERS = (2, 4, 5)


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path_factory):
    import datasets

    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: shutil.copytree(FIXTURES / name, tmp_path_factory.mktemp("fuzz") / name)
        for name in ("data", "data_states", "data_top_k")
    }


def restored(folder: Path) -> Path:
    """The folder as the fixtures have it, without a cache."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.unlink()
    return Path(shutil.copytree(FIXTURES / folder.name, folder, dirs_exist_ok=True))


def use(folder: Path) -> None:
    """All that training does with records before it needs a model."""
    records = load_records(folder)
    tokens = [row["tokens"] for row in records]
    assert all(0 <= token < 262 for row in tokens for token in row), "ids outside the vocabulary"
    rows, _ = training_rows(records, 64, 0.1, 0)
    count_tokens(records, 262)
    Batch.of(collate([rows[0], rows[len(rows) - 1]]))


@fuzz(examples=12)
@given(fault=text_faults(), seed=seeds())
def test_bytes_of_meta(folders, fault, seed):
    folder = restored(folders["data"])
    path = folder / "meta.json"
    path.write_bytes(fault.apply(path.read_bytes(), Random(seed)))
    outcome("data set: meta.json", fault.name, lambda: read_meta(folder))


@fuzz(examples=24)
@given(fault=json_faults(), seed=seeds())
def test_values_of_meta(folders, fault, seed):
    folder = restored(folders["data_states"])
    path = folder / "meta.json"
    path.write_text(json.dumps(fault.apply(load_json(path), Random(seed))))

    def call():
        meta = read_meta(folder)
        assert meta["target"]["name"] is not None and meta["target"]["vocab_size"] > 0
        FeatureStore.open(folder, LAYERS)

    outcome("data set: meta.json", fault.name, call)


@fuzz(examples=14)
@given(fault=text_faults(), seed=seeds())
def test_bytes_of_lines(folders, fault, seed):
    folder = restored(folders["data"])
    path = folder / "part-0000.jsonl"
    path.write_bytes(fault.apply(path.read_bytes(), Random(seed)))
    outcome("data set: lines", fault.name, lambda: use(folder))


@fuzz(examples=15)
@given(fault=json_faults(), seed=seeds())
def test_values_of_lines(folders, fault, seed):
    folder = restored(folders["data"])
    random = Random(seed)
    path = folder / "part-0000.jsonl"
    rows = load_jsonl(path)
    at = random.randrange(len(rows))
    rows[at] = fault.apply(rows[at], random)
    dump_jsonl(path, rows)
    outcome("data set: lines", fault.name, lambda: use(folder))


TORN = [
    fault for fault in FILE_FAULTS if fault.name in ("cut off", "empty", "another file", "twice")
]


@fuzz(examples=8)
@given(fault=st.sampled_from(TORN), seed=seeds())
def test_a_torn_cache_is_built_again(folders, fault, seed):
    """Arrow files have no checksums, so changed values within a sound structure go unseen."""
    folder = folders["data"]
    random = Random(seed)
    restored(folder)
    before = training_rows(load_records(folder), 64, 0.1, 0)[0][:]
    path = random.choice(sorted((folder / "arrow").glob("*.arrow")))
    path.write_bytes(fault.apply(path.read_bytes(), random))

    def call():
        assert training_rows(load_records(folder), 64, 0.1, 0)[0][:] == before

    assert outcome("data set: Arrow cache", fault.name, call) == ""


@pytest.mark.parametrize("name", ["data_states", "data_top_k"])
@fuzz(examples=14)
@given(fault=file_faults(), seed=seeds())
def test_bytes_of_shards(folders, name, fault, seed):
    folder = restored(folders[name])
    (path,) = (folder / "features").glob("part-*")
    path.write_bytes(fault.apply(path.read_bytes(), Random(seed)))

    def call():
        stored = FeatureStore.open(folder, LAYERS)
        for key in list(stored._where):
            found = stored.get(key)
            assert (
                found["features"].shape[1] == 3 * 16 and found["features"].float().isfinite().all()
            )

    outcome("data set: shards of states", fault.name, call)


TENSORS = {
    "missing": lambda tensors, key: tensors.pop(key),
    "another shape": lambda tensors, key: tensors.__setitem__(key, tensors[key][:-1].contiguous()),
    "more dimensions": lambda tensors, key: tensors.__setitem__(
        key, tensors[key][None].contiguous()
    ),
    "not finite": lambda tensors, key: tensors.__setitem__(
        key, torch.full_like(tensors[key].float(), torch.nan)
    ),
    "out of range": lambda tensors, key: tensors.__setitem__(
        key, torch.full_like(tensors[key], -5)
    ),
    "another type": lambda tensors, key: tensors.__setitem__(key, tensors[key].bool()),
    "empty": lambda tensors, key: tensors.__setitem__(key, tensors[key][:0].contiguous()),
}


@pytest.mark.parametrize("fault", TENSORS)
@pytest.mark.parametrize("name", ["data_states", "data_top_k"])
def test_tensors_of_shards(folders, name, fault):
    folder = restored(folders[name])
    (path,) = (folder / "features").glob("part-*")
    sound = load_file(path)
    conversation = next(iter(sound)).rpartition("/")[0]
    for key in [key for key in sound if key.startswith(conversation)]:
        tensors = dict(sound)
        TENSORS[fault](tensors, key)
        save_file(tensors, path)

        def call():
            stored = FeatureStore.open(folder, LAYERS)
            found = stored.get(conversation)
            if found is not None:
                assert all(tensor.float().isfinite().all() for tensor in found.values())

        said = outcome("data set: shards of states", fault, call)
        allowed = fault == "out of range" and not key.endswith("ids")  # a state of -5 is one
        assert allowed or str(path) in said, f"{key}: {said!r}"


@fuzz(examples=15)
@given(fault=json_faults(), seed=seeds())
def test_values_of_features_json(folders, fault, seed):
    folder = restored(folders["data_top_k"])
    path = folder / "features" / "features.json"
    path.write_text(json.dumps(fault.apply(load_json(path), Random(seed))))

    def call():
        stored_features(folder)
        stored = FeatureStore.open(folder, LAYERS)
        if stored is not None:
            stored.get(next(iter(stored._where)))

    outcome("data set: features.json", fault.name, call)


def test_a_read_only_data_set_is_cached_elsewhere(tmp_path, monkeypatch, capfd):
    folder = shutil.copytree(
        FIXTURES / "data", tmp_path / "data", ignore=shutil.ignore_patterns("arrow")
    )
    (folder / "arrow").write_text(
        "a file in the way: the tests may run as root, whom no mode stops"
    )
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    assert len(load_records(folder)) == 16 and list((tmp_path / "cache").rglob("*.arrow"))
    assert capfd.readouterr() == ("", "")
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    (tmp_path / "cache").write_text("")
    said = outcome("data set: Arrow cache", "nothing writable", lambda: load_records(folder))
    assert "set DRAFTTRAIN_CACHE" in said
