"""Keys and values of many slots, and attention of ragged rows over them.

Keys are held transposed, [slots, kv_heads, head_dim, columns]: with one query per sequence attention is bound by
reading the cache, and on a CPU a matrix product reads transposed keys about a third faster than row-major ones.
Product, softmax, product beat scaled_dot_product_attention there. Query heads that share a key head are rows of one
product, so nothing is repeated. Only the columns that some row can see are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.target import Target

_BUCKET = 64


class SlotCache:
    """A growing cache that is the target's attention context.

    Args:
        target: whose layers call `attend`.
        slots: rows of the cache.
        feature_layers: also keep these target states and the last hidden ones, in bfloat16.
    """

    def __init__(self, target: Target, slots: int, feature_layers: Sequence[int] = ()):
        self.target, self.slots, self.feature_layers = target, slots, tuple(feature_layers)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.captured: Tensor | None = None
        self.capacity = 0
        self.prefix_length = 0
        self.prefix: dict[int, tuple[Tensor, Tensor]] = {}
        self.prefix_captured: Tensor | None = None

    @torch.inference_mode()
    def forward(self, slots: list[int] | None, ids: Tensor, starts: Tensor) -> Tensor:
        """Runs the target on new tokens of some slots.

        Args:
            slots: one per row; None means slot i for row i, which reads the cache in place.
            ids: [b, n] int64, right-padded; padding lands behind a row's tokens and is overwritten by its next ones.
            starts: [b] int64, tokens that the row's slot already holds.

        Returns:
            [b, n, h] last hidden states.
        """
        b, n = ids.shape
        device = ids.device
        self._front = slots is None
        self._rows = torch.arange(b, device=device) if slots is None else torch.tensor(slots, device=device)
        self._positions = starts[:, None] + torch.arange(n, device=device)
        last = int(starts.max()) + n
        self._columns = -(-last // _BUCKET) * _BUCKET
        self._biases: dict[tuple[int | None, int, int], tuple[Tensor, int]] = {}
        if self._columns > self.capacity:
            self.capacity = max(self._columns, self.capacity * 3 // 2 // _BUCKET * _BUCKET)
        out = self.target.forward(ids, self.feature_layers, position_ids=self._positions, context=self)
        if self.feature_layers:
            self._capture(torch.cat([out.features, out.last_hidden], dim=-1))
        return out.last_hidden

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
        """See AttentionContext: stores key and value [b, kv_heads, n, d], attends with query [b, heads, n, d]."""
        keys, values = self._store(layer, key, value)
        b, heads, n, d = query.shape
        kv_heads, groups = key.shape[1], heads // key.shape[1]
        bias, first = self._bias(window, kv_heads, groups)
        keys, values = keys[..., first : self._columns], values[:, :, first : self._columns]
        if self._front:
            keys, values = keys[:b], values[:b]
        else:
            keys, values = keys.index_select(0, self._rows), values.index_select(0, self._rows)
        rows = query.reshape(b * kv_heads, groups * n, d)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        if softcap is None:
            scores = torch.baddbmm(bias, rows, keys, alpha=scaling)
        else:
            scores = torch.tanh(torch.bmm(rows, keys) * (scaling / softcap)) * softcap + bias
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
        if sinks is not None:
            # A sink is one more logit in the softmax whose value is zero: the other weights shrink by its share.
            sink = sinks.float().view(1, kv_heads, groups, 1, 1).expand(b, -1, -1, n, -1)
            total = scores.float().logsumexp(-1, keepdim=True)
            weights = weights * torch.sigmoid(total - sink.reshape(total.shape))
        out = torch.bmm(weights.to(values.dtype), values)
        return out.view(b, heads, n, -1).transpose(1, 2)

    def _store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes new columns, growing the layer's cache when the sequences have outgrown it."""
        if layer not in self.keys or self.keys[layer].shape[-1] < self.capacity:
            # Zeros, not garbage: masked columns are multiplied by a weight of zero, which NaN would survive.
            keys = key.new_zeros(self.slots, key.shape[1], key.shape[-1], self.capacity)
            values = value.new_zeros(self.slots, value.shape[1], self.capacity, value.shape[-1])
            if layer in self.keys:
                held = self.keys[layer].shape[-1]
                keys[..., :held], values[:, :, :held] = self.keys[layer], self.values[layer]
            self.keys[layer], self.values[layer] = keys, values
        keys, values = self.keys[layer], self.values[layer]
        rows = self._rows[:, None]
        keys[rows, :, :, self._positions] = key.transpose(1, 2)
        values[rows, :, self._positions] = value.transpose(1, 2)
        return keys, values

    def _bias(self, window: int | None, kv_heads: int, groups: int) -> tuple[Tensor, int]:
        """0 where a row may look and -inf elsewhere, the same for all layers of a kind; and the first column to read.

        Returns:
            [b * kv_heads, groups * n, columns - first], or with 1 in the middle when n is 1.
        """
        kind = (window, kv_heads, groups)
        if kind not in self._biases:
            b, n = self._positions.shape
            first = 0 if window is None else max(0, int(self._positions.min()) - window + 1)
            columns = torch.arange(first, self._columns, device=self._positions.device)
            ahead = self._positions[:, :, None] - columns
            hidden = ahead < 0 if window is None else (ahead < 0) | (ahead >= window)
            bias = torch.zeros(hidden.shape, dtype=self.target.compute_dtype, device=columns.device)
            bias = bias.masked_fill_(hidden, float("-inf"))[:, None, None]
            bias = bias.expand(b, kv_heads, 1 if n == 1 else groups, n, -1).reshape(b * kv_heads, -1, len(columns))
            self._biases[kind] = (bias, first)
        return self._biases[kind]

    def _capture(self, states: Tensor) -> None:
        if self.captured is None or self.captured.shape[1] < self.capacity:
            grown = states.new_zeros(self.slots, self.capacity, states.shape[-1], dtype=torch.bfloat16)
            if self.captured is not None:
                grown[:, : self.captured.shape[1]] = self.captured
            self.captured = grown
        self.captured[self._rows[:, None], self._positions] = states.bfloat16()

    def features(self, slot: int, length: int) -> tuple[Tensor | None, Tensor | None]:
        """A slot's captured features [length, f*h] and last hidden states [length, h], on the CPU; else two Nones."""
        if self.captured is None:
            return None, None
        held = self.captured[slot, :length].cpu()
        width = held.shape[-1] - self.target.hidden_size
        return held[:, :width].clone(), held[:, width:].clone()

    # -- slots --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def keep_prefix(self, slot: int, length: int) -> None:
        """Remembers a slot's first columns as the prefix that `paste_prefix` puts into others."""
        self.prefix_length = length
        for layer, keys in self.keys.items():
            self.prefix[layer] = (keys[slot, ..., :length].clone(), self.values[layer][slot, :, :length].clone())
        if self.captured is not None:
            self.prefix_captured = self.captured[slot, :length].clone()

    @torch.inference_mode()
    def paste_prefix(self, slot: int) -> None:
        for layer, (keys, values) in self.prefix.items():
            self.keys[layer][slot, ..., : self.prefix_length] = keys
            self.values[layer][slot, :, : self.prefix_length] = values
        if self.captured is not None and self.prefix_captured is not None:
            self.captured[slot, : self.prefix_length] = self.prefix_captured

    @torch.inference_mode()
    def move(self, source: int, destination: int, length: int) -> None:
        """Copies a slot's first `length` columns to another slot."""
        for keys, values in zip(self.keys.values(), self.values.values(), strict=True):
            keys[destination, ..., :length] = keys[source, ..., :length]
            values[destination, :, :length] = values[source, :, :length]
        if self.captured is not None:
            self.captured[destination, :length] = self.captured[source, :length]
