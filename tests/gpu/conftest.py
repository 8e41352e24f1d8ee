"""Pretend GPUs as fixtures. On a machine with a real one these tests are skipped: the tests marked gpu run there."""

from __future__ import annotations

import pytest

from tests.conftest import has_gpu


@pytest.fixture
def gpu():
    """One pretend GPU."""
    yield from _opened()


@pytest.fixture
def two_gpus():
    yield from _opened(devices=2)


def _opened(**options):
    if has_gpu():
        pytest.skip("has a GPU: nothing to pretend")
    from drafttrain.target.devices import usual_device
    from tests.gpu.pretend import PretendGpu

    usual_device.cache_clear()  # what it found holds with the GPU only
    try:
        with PretendGpu(**options) as device:
            yield device
    finally:
        usual_device.cache_clear()
