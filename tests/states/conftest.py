"""What tests of states share."""

from __future__ import annotations

import functools

import httpx
import pytest

from drafttrain.states import served
from drafttrain.target import Target
from tests.files import dump_json, load_json
from tests.training.runs import write_data


@pytest.fixture
def data(tmp_path, target_dir):
    folder = write_data(tmp_path / "data", Target.load(str(target_dir)), rows=6)
    meta = load_json(folder / "meta.json")
    meta["target"]["name"] = str(target_dir)
    dump_json(folder / "meta.json", meta)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Servers are asked again at once, and files settle at once."""
    monkeypatch.setattr(served, "_FIRST_PAUSE", 0.002)
    monkeypatch.setattr(served, "_LONGEST_PAUSE", 0.02)
    monkeypatch.setattr("drafttrain.states.transports.folder._SETTLE", 0.02)
    # Reading certificates takes 0.1 s.
    without = functools.partial(httpx.AsyncClient, verify=False)
    monkeypatch.setattr(httpx, "AsyncClient", without)
