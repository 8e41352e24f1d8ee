"""Paths move together in every buffer, by torch, in C and by Triton's kernel (in its interpreter where there is no GPU)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafttrain.ops import tree_cache
from drafttrain.ops.native import cpu_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOVES = [(3, [5]), (11, [12, 13, 17]), (30, [31, 32, 33, 34, 38])]


def moved(buffers, moves):
    want = [buffer.clone() for buffer in buffers]
    for old, new in zip(buffers, want, strict=True):
        for first, sources in moves:
            new[:, first : first + len(sources)] = old[:, sources]
    return want


def moving(way, buffers, moves):
    if way == "gather":
        return tree_cache._gather(buffers, moves)
    addresses = np.array([buffer.data_ptr() for buffer in buffers])
    (tree_cache._launch if way == "launch" else tree_cache._copy)(buffers[0], addresses, moves)


@pytest.mark.parametrize("way", ["gather", "copy", "launch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("moves", [MOVES[:1], MOVES[1:2], MOVES], ids=str)
def test_paths_move_together(way, dtype, moves):
    if way == "launch":
        pytest.importorskip("triton", reason="triton has no build for this platform")
    if way == "copy" and cpu_kernels() is None:
        pytest.skip("no C compiler")
    generator = torch.Generator().manual_seed(0)
    buffers = [
        torch.randn(2, 40, 20, generator=generator).to("cpu" if way == "copy" else DEVICE, dtype)
        for _ in range(4)
    ]
    want = moved(buffers, moves)
    moving(way, buffers, moves)
    for got, wanted in zip(buffers, want, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("native", [True, False])
def test_buffers_of_several_kinds(native, monkeypatch):
    if not native:
        monkeypatch.setattr(tree_cache, "cpu_kernels", lambda: None)
    kinds = [(2, 40, 8), (2, 40, 12), (1, 40, 8), (2, 40, 8), (2, 40, 16)]
    buffers = [torch.randn(kind, device=DEVICE) for kind in kinds]
    buffers[3] = buffers[3].double()
    buffers[4] = buffers[4][:, :, :8]  # slots further apart than they are wide
    mover = tree_cache.SlotMover(iter(buffers))
    for _ in range(2):
        want = moved(buffers, MOVES)
        mover.move(MOVES)
        for got, wanted in zip(buffers, want, strict=True):
            assert torch.equal(got, wanted)
