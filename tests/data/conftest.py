"""What tests of states share."""

from __future__ import annotations

import json

import pytest

from drafttrain.target import Target
from tests.training.test_train import write_data


@pytest.fixture
def data(tmp_path, target_dir):
    folder = write_data(tmp_path / "data", Target.load(str(target_dir)), rows=6)
    meta = json.loads((folder / "meta.json").read_text())
    meta["target"]["name"] = str(target_dir)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder
