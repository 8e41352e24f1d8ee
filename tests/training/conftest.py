"""What the tests of training runs share."""

from __future__ import annotations

import pytest

from tests.conftest import make_target, save_target
from tests.drafters.helpers import make_drafter
from tests.training.runs import write_data


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """(folder of a tiny target, folder of data for it); nobody writes to either."""
    folder = tmp_path_factory.mktemp("tiny")
    target = make_target()
    save_target(target, folder / "target")
    return folder / "target", write_data(folder / "data", target)


@pytest.fixture(scope="session")
def head_folder(tmp_path_factory):
    """The folder of an untrained EAGLE-3 head of the tiny target."""
    folder = tmp_path_factory.mktemp("head") / "drafter"
    make_drafter(make_target(), ttt_steps=2).save_pretrained(folder)
    return folder
