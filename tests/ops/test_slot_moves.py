"""Paths move together in every buffer, by torch and by the kernel (in Triton's interpreter where there is no GPU)."""

from __future__ import annotations

import pytest
import torch

from drafttrain.ops import slot_moves

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOVES = [(3, [5]), (11, [12, 13, 17]), (30, [31, 32, 33, 34, 38])]


def moved(buffers, moves):
    want = [buffer.clone() for buffer in buffers]
    for old, new in zip(buffers, want, strict=True):
        for first, sources in moves:
            new[:, first : first + len(sources)] = old[:, sources]
    return want


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("moves", [MOVES[:1], MOVES[1:2], MOVES], ids=str)
def test_paths_move_together(kernel, dtype, moves):
    if kernel:
        pytest.importorskip("triton", reason="triton has no build for this platform")
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.randn(2, 40, 20, generator=generator).to(DEVICE, dtype) for _ in range(4)]
    want = moved(buffers, moves)
    (slot_moves._launch if kernel else slot_moves._move)(buffers, moves)
    for got, wanted in zip(buffers, want, strict=True):
        assert torch.equal(got, wanted)


def test_buffers_of_several_kinds():
    kinds = [(2, 40, 8), (2, 40, 12), (1, 40, 8), (2, 40, 8)]
    buffers = [torch.randn(kind, device=DEVICE) for kind in kinds]
    buffers[3] = buffers[3].double()
    want = moved(buffers, MOVES)
    slot_moves.move_slots(iter(buffers), MOVES)
    for got, wanted in zip(buffers, want, strict=True):
        assert torch.equal(got, wanted)
