"""Moves slots of many key and value buffers at once, in place: what a cache does with an accepted path.

    slots       ...  10  11  12  13  14          sources 12, 14   goals 11, 12
    before           r   a   b   a1  b1
    after            r   b   b1  -   -

On a GPU one launch serves all layers, heads and paths; elsewhere each buffer is gathered and written in torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from drafttrain.ops.tree_attention_triton import has_triton


def move_slots(buffers: Iterable[Tensor], moves: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Copies slots to other slots in every buffer.

    Args:
        buffers: [kv_heads, slots, e] each, the last dimension contiguous.
        moves: paths, each its first goal and its sources, which go to the slots from there on. Sources ascend and none is
            below its goal; paths touch no slots of each other.
    """
    buffers = list(buffers)
    if not (buffers and buffers[0].is_cuda and has_triton()):
        return _move(buffers, moves)
    alike = defaultdict(list)
    for buffer in buffers:
        alike[buffer.device, buffer.shape, buffer.stride(), buffer.dtype].append(buffer)
    for group in alike.values():
        _launch(group, moves)


def _move(buffers: Sequence[Tensor], moves: Sequence[tuple[int, Sequence[int]]]) -> None:
    if not buffers:
        return
    device = buffers[0].device
    source = torch.tensor([slot for _, sources in moves for slot in sources], device=device)
    first, end = moves[0][0], moves[0][0] + len(moves[0][1])
    # The goals of one path are a range, and a plain copy is cheaper than a scatter.
    goal = None
    if len(moves) > 1:
        goal = torch.tensor([first + i for first, sources in moves for i in range(len(sources))], device=device)
    for buffer in buffers:
        held = buffer.index_select(1, source.to(buffer.device))
        if goal is None:
            buffer[:, first:end] = held
        else:
            buffer.index_copy_(1, goal.to(buffer.device), held)


def _launch(buffers: Sequence[Tensor], moves: Sequence[tuple[int, Sequence[int]]]) -> None:
    from drafttrain.ops.tree_attention_kernels import move_paths

    like, longest = buffers[0], max(len(sources) for _, sources in moves)
    heads, _, width = like.shape
    path = 1 << (longest - 1).bit_length()
    numbers = np.full(len(buffers) + len(moves) * (path + 1), -1, dtype=np.int64)
    numbers[: len(buffers)] = [buffer.data_ptr() for buffer in buffers]
    table = numbers[len(buffers) :].reshape(len(moves), path + 1)
    for row, (first, sources) in zip(table, moves, strict=True):
        row[0], row[1 : len(sources) + 1] = first, sources
    # Pageable memory is staged before the call returns.
    uploaded = torch.from_numpy(numbers).to(like.device, non_blocking=True)
    move_paths[(len(buffers) * heads, len(moves))](
        uploaded,
        uploaded[len(buffers) :],
        like,
        like.stride(0),
        like.stride(1),
        HEADS=heads,
        WIDTH=width,
        PADDED=1 << (width - 1).bit_length(),
        PATH=path,
    )
