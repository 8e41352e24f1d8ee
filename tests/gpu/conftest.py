"""GPUs as fixtures. On a machine with a real one, the tests that need a pretend one are skipped."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import has_gpu


class RealGpu:
    """The machine's own GPU. replays: of CUDA graphs, since the test began."""

    replays = 0


@pytest.fixture
def any_gpu(request, monkeypatch):
    """The machine's GPU, or a pretend one. Tests that use it are marked `any_gpu`."""
    if not has_gpu():
        return request.getfixturevalue("gpu")
    counted = RealGpu()
    replay = torch.cuda.CUDAGraph.replay

    def counting(graph):
        counted.replays += 1
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counting)
    return counted


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
