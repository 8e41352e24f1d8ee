"""The decoder's key/value cache: preallocated, written in place, rolled back by not committing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.ops.tree_attention import TreeLayout, tree_attention


class TreeCache:
    """Keys and values of one sequence, and the attention of a forward over them (an `AttentionContext`).

    A forward of n new tokens writes slots [L, L+n). Nothing is ever removed: `commit` moves the accepted ones together
    behind L and advances L, and the next forward overwrites the rest.

        slots       0 .. L-1    L     L+1   L+2   L+3   L+4
        forward     committed   root  a     b     a1    b1         (a, b: children of the root)
        commit      committed   root  b     b1                     kept = [0, 2, 4], L += 3

    Attributes:
        capacity: slots per layer; the longest sequence plus one round's new tokens.
        length: L.
    """

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._layout = TreeLayout(0, count=0)

    def open(self, parents: Sequence[int] | None = None, count: int | None = None) -> TreeLayout:
        """Announces the next forward: `count` tokens in a row, or a root with tree nodes below it (`parents`).

        Raises:
            UserError: it does not fit.
        """
        layout = TreeLayout(self.length, parents, count)
        if self.length + layout.count > self.capacity:
            raise UserError(
                f"the key/value cache holds {self.capacity} positions, but {self.length} + {layout.count} are needed; "
                "use a smaller tree or fewer new tokens"
            )
        self._layout = layout
        return layout

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Stores the new keys and values of a layer and attends; see `AttentionContext.attend`."""
        if layer not in self._layers:
            self._layers[layer] = (self._allocate(key), self._allocate(value))
        keys, values = self._layers[layer]
        end = self.length + key.shape[2]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        out = tree_attention(
            query,
            keys[:, :, :end],
            values[:, :, :end],
            self._layout,
            scaling=scaling,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        return out.transpose(1, 2)

    def _allocate(self, like: Tensor) -> Tensor:
        b, heads, _, width = like.shape
        return torch.empty((b, heads, self.capacity, width), dtype=like.dtype, device=like.device)

    def commit(self, kept: Sequence[int]) -> None:
        """Keeps the given new tokens of the last forward, in path order (ascending indices)."""
        moved = next((i for i, index in enumerate(kept) if i != index), len(kept))
        if moved < len(kept) and self._layers:
            device = next(iter(self._layers.values()))[0].device
            source = torch.tensor(kept[moved:], device=device) + self.length
            begin, end = self.length + moved, self.length + len(kept)
            for pair in self._layers.values():
                for buffer in pair:
                    buffer[:, :, begin:end] = buffer.index_select(2, source)
        self.length += len(kept)
