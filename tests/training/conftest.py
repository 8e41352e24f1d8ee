"""What the tests of training runs share."""

from __future__ import annotations

import pytest

from tests.conftest import make_target, save_target
from tests.training.runs import write_data


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """(folder of a tiny target, folder of data for it); nobody writes to either."""
    folder = tmp_path_factory.mktemp("tiny")
    target = make_target()
    save_target(target, folder / "target")
    return folder / "target", write_data(folder / "data", target)
