"""Saved targets, whole and without their layers."""

from __future__ import annotations

from tests.conftest import make_tokenizer
from tests.files import load_json


def save(model, folder, shard="50GB"):
    model.save_pretrained(folder, max_shard_size=shard)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def delete_layer_files(folder):
    """Deletes the files of a folder's layers; returns those that stay."""
    names = load_json(folder / "model.safetensors.index.json")["weight_map"]
    kept = {file for name, file in names.items() if ".layers." not in name}
    gone = set(names.values()) - kept
    assert gone
    for file in gone:
        (folder / file).unlink()
    return kept
