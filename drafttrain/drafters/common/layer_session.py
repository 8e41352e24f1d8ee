"""The session of drafters with decoder layers: a cache of keys and values."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from drafttrain.drafters.base import Drafter, JointSession
from drafttrain.drafters.common.layers import CacheShape
from drafttrain.drafters.common.static_draft import DraftSteps
from drafttrain.ops.cpu_draft import KeyStore
from drafttrain.ops.tree_attention import TreeLayout, tree_attention


class LayerSession(JointSession):
    """One sequence's cache: per layer, keys and values [kv_heads, capacity, e] of committed positions, then of this round's
    nodes in the order they were opened.

    Attributes:
        length: committed positions. root: [1, h] output at the last committed token, from the first `extend` on.
        read: [1, h] input of the head there; None if not computed.
    """

    def __init__(self, drafter: Drafter, shape: CacheShape, max_length: int):
        self.drafter, self.shape, self.capacity = drafter, shape, max_length
        self.layers: list[tuple[Tensor, Tensor]] = []  # allocated when the first key shows dtype and device
        self.length = 0
        self.read: Tensor | None = None
        self._store: KeyStore | None = None  # of the present buffers

    @property
    def held(self) -> int:
        return self.length

    def advance(self, count: int) -> None:
        self.length += count
        self.read = None

    def place(self, steps: DraftSteps, row: int) -> None:
        super().place(steps, row)
        self.capacity = steps.cache.capacity
        both = [steps.cache.by_row(layer) for layer in range(self.shape.layers)]
        self.layers, self._store = [(keys[row], values[row]) for keys, values in both], None

    def attend(self, layer: int, layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores a layer's new keys and values [m, kv_heads, e] and attends with queries [n, heads, e] of the last n of those
        tokens over the keys that `layout` selects. Returns [n, heads * e].
        """
        end, window = layout.prefix_len + layout.held + layout.count, self.shape.window or None
        keys, values = self.buffers(layer, end, key)
        scaling, plan = query.shape[-1] ** -0.5, layout.plan
        if key.shape[0] == layout.count and plan is not None and plan.serves(query, keys, values):
            new = (key, value)
            out = plan.attend(query, keys, values, new=new, softcap=None, sinks=None, scaling=scaling, window=window)
            return out.view(layout.count, -1)
        self.store(layer, end - key.shape[0], key, value)
        each = query.transpose(0, 1)[None], keys[None, :, :end], values[None, :, :end]  # [1, heads, n, e], ...
        out = tree_attention(*each, layout, scaling=scaling, window=window)
        return out[0].transpose(0, 1).reshape(layout.count, -1)

    def buffers(self, layer: int, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [kv_heads, capacity, e], with at least `end` slots: trees may exceed the longest sequence."""
        if not self.layers:
            shape = (self.shape.kv_heads, self.capacity, self.shape.head_dim)
            self.layers = [(like.new_empty(shape), like.new_empty(shape)) for _ in range(self.shape.layers)]
        if end > self.capacity:
            more = (0, 0, 0, end - self.capacity)
            self.layers = [(F.pad(keys, more), F.pad(values, more)) for keys, values in self.layers]
            self.capacity, self._store = end, None
        return self.layers[layer]

    def store_of(self, end: int, like: Tensor) -> KeyStore:
        """The buffers of all layers for a CPU kernel, with at least `end` slots."""
        if self._store is None or end > self.capacity:
            self.buffers(0, end, like)
            self._store = KeyStore(self.layers)
        return self._store

    def store(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Writes a layer's keys and values [m, kv_heads, e] to slots from `start` on."""
        end = start + key.shape[0]
        for buffer, new in zip(self.buffers(layer, end, key), (key, value), strict=True):
            buffer[:, start:end] = new.transpose(0, 1)
