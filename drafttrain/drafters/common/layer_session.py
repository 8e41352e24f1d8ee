"""The session of drafters with decoder layers: a key-value cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.context_tokens import ContextTokens
from drafttrain.drafters.common.layers import CacheShape
from drafttrain.drafters.common.rows import JointSession, Steps
from drafttrain.ops.cpu_draft import KeyStore
from drafttrain.ops.tree_attention import TreeLayout, tree_attention

_ROOM = 64  # slots behind a window for a round's tokens; more are added where they are needed


class LayerSession(JointSession):
    """One sequence's key-value cache.

    Per layer it holds keys and values [kv_heads, capacity, e] of committed positions, then of this
    round's nodes in the order they were opened. A window bounds it: positions that no later token
    sees are dropped.

    Attributes:
        length: committed positions in the cache. dropped: those before them.
        text: tokens that joined the vocabulary; None where none may, as with static steps.
    """

    def __init__(
        self,
        drafter: Drafter,
        shape: CacheShape,
        max_length: int,
        text: ContextTokens | None = None,
    ):
        super().__init__(drafter)
        self.shape = shape
        self.text = text
        self.capacity = max_length  # slots per layer
        if shape.window:
            self.capacity = min(max_length, 2 * shape.window + _ROOM)
        # Keys and values per layer, allocated when the first key shows dtype and device.
        self.layers: list[tuple[Tensor, Tensor]] = []
        self._store: KeyStore | None = None  # of the present buffers

    @property
    def held(self) -> int:
        return self.length

    def advance(self, count: int) -> None:
        self.length += count

    def commit(self, tokens: Tensor, root: Tensor) -> None:
        super().commit(tokens, root)
        self.length += len(tokens)
        self.trim()
        if self.text is not None:
            self.text.read(tokens.tolist())

    def place(self, steps: Steps, row: int) -> None:
        super().place(steps, row)
        self.text = None
        self.capacity = steps.cache.capacity
        self.layers = []
        for layer in range(self.shape.layers):
            keys, values = steps.cache.by_row(layer)  # [rows, kv_heads, capacity, e] each
            self.layers.append((keys[row], values[row]))
        self._store = None

    def trim(self) -> None:
        """Keeps the last window of committed positions once there are two windows of them.

        Static steps keep all positions in their own cache.
        """
        window = self.shape.window
        if not window or self.steps is not None or self.length <= 2 * window:
            return
        gone = self.length - window
        self.layers = self._resized(slice(gone, self.length), window + _ROOM)
        self.dropped += gone
        self.length = window
        self.capacity = 2 * window + _ROOM
        self._store = None

    def _resized(self, kept: slice, more: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of the buffers' slots `kept`, with `more` empty slots behind them."""
        padding = (0, 0, 0, more)
        resized = []
        for keys, values in self.layers:
            resized.append((F.pad(keys[:, kept], padding), F.pad(values[:, kept], padding)))
        return resized

    def attend(
        self,
        layer: int,
        layout: TreeLayout,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Stores a layer's new keys and values, and attends over the keys that `layout` selects.

        Args:
            query: [n, heads, e] of the last n new tokens. key, value: [m, kv_heads, e] of all.

        Returns:
            [n, heads * e].
        """
        end = layout.prefix_len + layout.held + layout.count
        window = self.shape.window or None
        keys, values = self.buffers(layer, end, key)
        scaling = query.shape[-1] ** -0.5
        plan = layout.plan
        # The kernel stores as many tokens as it attends for.
        if key.shape[0] == layout.count and plan is not None and plan.serves(query, keys, values):
            out = plan.attend(
                query,
                keys,
                values,
                new=(key, value),
                softcap=None,
                sinks=None,
                scaling=scaling,
                window=window,
            )
            return out.view(layout.count, -1)

        self.store(layer, end - key.shape[0], key, value)
        queries = query.transpose(0, 1)[None]  # [1, heads, n, e]
        keys = keys[None, :, :end].to(query.dtype)  # [1, kv_heads, end, e]
        values = values[None, :, :end].to(query.dtype)
        out = tree_attention(
            queries,
            keys,
            values,
            layout,
            scaling=scaling,
            window=window,
        )
        return out[0].transpose(0, 1).reshape(layout.count, -1)

    def buffers(self, layer: int, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values [kv_heads, capacity, e], with at least `end` slots."""
        if not self.layers:
            shape = (self.shape.kv_heads, self.capacity, self.shape.head_dim)
            dtype = self.drafter.stored or like.dtype
            for _ in range(self.shape.layers):
                keys = like.new_empty(shape, dtype=dtype)
                self.layers.append((keys, torch.empty_like(keys)))
        if end > self.capacity:  # a tree may reach beyond the longest sequence
            self.layers = self._resized(slice(None), end - self.capacity)
            self.capacity = end
            self._store = None
        return self.layers[layer]

    def store_of(self, end: int, like: Tensor) -> KeyStore:
        """The buffers of all layers for a CPU kernel, with at least `end` slots."""
        if self._store is None or end > self.capacity:
            self.buffers(0, end, like)
            self._store = KeyStore(self.layers)
        return self._store

    def store(
        self,
        layer: int,
        start: int,
        key: Tensor,
        value: Tensor,
    ) -> None:
        """Writes a layer's keys and values [m, kv_heads, e] to slots from `start` on."""
        end = start + key.shape[0]
        for buffer, new in zip(self.buffers(layer, end, key), (key, value), strict=True):
            buffer[:, start:end] = new.transpose(0, 1)
