"""Moves slots of many key and value buffers at once, in place: what a cache does with an accepted path.

    slots       ...  10  11  12  13  14          sources 12, 14   goals 11, 12
    before           r   a   b   a1  b1
    after            r   b   b1  -   -

All layers, heads and paths take one launch on a GPU and one call of ops/cpu.c on a CPU; elsewhere each buffer is gathered and
written in torch.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.tree_attention_triton import has_triton

Moves = Sequence[tuple[int, Sequence[int]]]


class SlotMover:
    """Copies slots to other slots in every one of some buffers.

    Args:
        buffers: [kv_heads, slots, e] each, the last dimension contiguous.
    """

    def __init__(self, buffers: Iterable[Tensor]):
        alike = defaultdict(list)
        for buffer in buffers:
            alike[buffer.device, buffer.shape, buffer.stride(), buffer.dtype].append(buffer)
        addresses = lambda group: np.array([buffer.data_ptr() for buffer in group], dtype=np.int64)  # noqa: E731
        self._groups = [(group, addresses(group)) for group in alike.values()]

    def move(self, moves: Moves) -> None:
        """Copies.

        Args:
            moves: paths, each its first goal and its sources, which go to the slots from there on. Sources ascend and none
                is below its goal; paths touch no slots of each other.
        """
        for buffers, addresses in self._groups:
            if buffers[0].is_cuda and has_triton():
                _launch(buffers[0], addresses, moves)
            elif buffers[0].device.type == "cpu" and cpu_kernels() is not None:
                _copy(buffers[0], addresses, moves)
            else:
                _gather(buffers, moves)


def _pairs(moves: Moves) -> list[tuple[int, int]]:
    """Goal and source of every slot that moves, path after path."""
    return [pair for first, sources in moves for pair in enumerate(sources, first)]


def _gather(buffers: Sequence[Tensor], moves: Moves) -> None:
    goals, sources = torch.tensor(_pairs(moves), device=buffers[0].device).unbind(1)
    for buffer in buffers:
        buffer.index_copy_(1, goals, buffer.index_select(1, sources))


def _copy(like: Tensor, addresses: np.ndarray, moves: Moves) -> None:
    # In the order of the pairs no slot is overwritten before it is read: sources ascend, goals lie below.
    pairs, size = _pairs(moves), like.element_size()
    numbers = (ctypes.c_int64 * (2 * len(pairs)))(*chain.from_iterable(pairs))
    heads, _, width = like.shape
    form = (heads, like.stride(0) * size, like.stride(1) * size, width * size)
    kernels = cpu_kernels()
    assert kernels is not None
    kernels.move_slots(addresses.ctypes.data, len(addresses), *form, ctypes.addressof(numbers), len(pairs))


def _launch(like: Tensor, addresses: np.ndarray, moves: Moves) -> None:
    from drafttrain.ops.tree_attention_kernels import move_paths

    count, longest = len(addresses), max(len(sources) for _, sources in moves)
    heads, _, width = like.shape
    path = 1 << (longest - 1).bit_length()
    numbers = np.full(count + len(moves) * (path + 1), -1, dtype=np.int64)
    numbers[:count] = addresses
    table = numbers[count:].reshape(len(moves), path + 1)
    for row, (first, sources) in zip(table, moves, strict=True):
        row[0], row[1 : len(sources) + 1] = first, sources
    # Pageable memory is staged before the call returns.
    uploaded = torch.from_numpy(numbers).to(like.device, non_blocking=True)
    move_paths[(count * heads, len(moves))](
        uploaded,
        uploaded[count:],
        like,
        like.stride(0),
        like.stride(1),
        HEADS=heads,
        WIDTH=width,
        PADDED=1 << (width - 1).bit_length(),
        PATH=path,
    )
