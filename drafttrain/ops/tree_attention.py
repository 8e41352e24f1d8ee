"""Attention of new tokens over a prefix and over their own ancestors: the plain torch reference.

A forward of tree verification holds L committed keys followed by n new ones (the root and the tree's nodes). Every new
token sees the prefix, its ancestors and itself; a sliding window counts positions, not slots, because siblings share a
position. The mask depends on the tree alone, so a `TreeLayout` builds it once and all layers share it.

Which formulation runs where follows one timing (float32, 2-core CPU, L 100-1500; 9 query heads on 3 of width 64, and
4 on 1 of width 256). One row without a mask: fused attention with a group's query heads folded into rows. Several rows:
two matrix products over folded rows, 1.0-2.5x as fast as the better fused form at 24 and 32 rows. At 4 and 8 rows they
were 0.6-1.7x as fast with narrow heads and 0.4-0.9x with wide ones. No form repeats keys or values in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Long chains (prefill under a window or a soft cap) attend in blocks of rows, so that no mask is quadratic in length.
_BLOCK = 256


class TreeLayout:
    """Where the new tokens of one forward stand: behind which prefix, and below which ancestors.

    Attributes:
        prefix_len: L, committed positions; slot and position agree there.
        parents: per tree node the index of its parent among the nodes, -1 below the root; None for a plain chain.
        count: n, new tokens. With parents, new token 0 is the root and new token i+1 is node i.
        depths: [n] int array; new token i stands at position L + depths[i].
    """

    def __init__(self, prefix_len: int, parents: Sequence[int] | None = None, count: int | None = None):
        self.prefix_len, self.parents = prefix_len, parents
        if parents is None:
            assert count is not None, "a chain needs its length"
            self.count, self.depths = count, np.arange(count)
        else:
            self.count = len(parents) + 1
            depths = [0]
            for parent in parents:
                depths.append(depths[parent + 1] + 1)
            self.depths = np.asarray(depths)
        self._masks: dict[tuple, tuple[int, Tensor | None]] = {}

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """[1, n] int64 position ids."""
        return torch.from_numpy(self.depths + self.prefix_len).to(device)[None]

    def mask(self, window: int | None, repeats: int, like: Tensor) -> tuple[int, Tensor | None]:
        """The additive mask over the keys that any new token can see.

        Args:
            window: visible positions, own included; None for all.
            repeats: how many query heads share a key head; the rows are tiled that often.
            like: gives dtype and device.

        Returns:
            The first visible key slot, and [repeats*n, L+n-first] of 0 and -inf, or None where everything is visible.
        """
        reach = self.prefix_len + int(self.depths.max(initial=0)) + 1
        window = None if window is None or window >= reach else window
        key = (window, repeats, like.dtype, like.device)
        if key not in self._masks:
            first = 0 if window is None else max(0, self.prefix_len + 1 - window)
            bias = None if self.count == 1 else self._bias(first, window)
            tiled = None if bias is None else torch.from_numpy(np.tile(bias, (repeats, 1))).to(like.device, like.dtype)
            self._masks[key] = (first, tiled)
        return self._masks[key]

    def _bias(self, first: int, window: int | None) -> np.ndarray:
        prefix, n = self.prefix_len - first, self.count
        bias = np.zeros((n, prefix + n), dtype=np.float32)
        if self.parents is None:
            bias[:, prefix:] = np.triu(np.full((n, n), -np.inf, dtype=np.float32), 1)
        else:
            tree = bias[:, prefix:]
            tree[:] = -np.inf
            tree[0, 0] = 0
            for node, parent in enumerate(self.parents, 1):
                tree[node] = tree[parent + 1]
                tree[node, node] = 0
        if window is not None:
            new = self.prefix_len + self.depths
            keys = np.concatenate((np.arange(first, self.prefix_len), new))
            bias[new[:, None] - keys[None, :] >= window] = -np.inf
        return bias


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends with n new tokens over L committed and n new keys, as `layout` says who sees whom.

    Args:
        query: [b, heads, n, head_dim], RoPE applied.
        key: [b, kv_heads, L+n, head_dim]; query head i reads key head i // (heads / kv_heads).
        value: [b, kv_heads, L+n, value_dim].
        layout: the same for all b rows.
        scaling: factor of the dot products.
        window: visible positions, own included; None for all.
        softcap: c in c * tanh(score / c), applied to scaled scores (Gemma 2).
        sinks: [heads], a logit per head that takes part in the softmax and contributes no value (gpt-oss).

    Returns:
        [b, heads, n, value_dim].
    """
    n, prefix = query.shape[2], layout.prefix_len
    options: Any = {"scaling": scaling, "softcap": softcap, "sinks": sinks}
    if layout.parents is None and n > 1:
        plain = softcap is None and sinks is None
        if plain and prefix == 0 and (window is None or window >= n):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        if n > _BLOCK:
            return _in_blocks(query, key, value, prefix, window, options)
    first, mask = layout.mask(window, query.shape[1] // key.shape[1], query)
    return _attend(query, key[:, :, first:], value[:, :, first:], mask, **options)


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, prefix: int, window: int | None, options: Any) -> Tensor:
    parts = []
    for start in range(0, query.shape[2], _BLOCK):
        rows = query[:, :, start : start + _BLOCK]
        end = prefix + start + rows.shape[2]
        # Without a window all earlier keys are visible, so the mask is the block's own triangle.
        before = 0 if window is None or window >= end else prefix + start
        first, mask = TreeLayout(before, count=rows.shape[2]).mask(window, query.shape[1] // key.shape[1], query)
        seen = slice(first, end)
        parts.append(_attend(rows, key[:, :, seen], value[:, :, seen], mask, **options))
    return torch.cat(parts, dim=2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with the query heads of a group folded into rows, under an additive mask [groups*n, T] of T keys.

    A narrower mask covers the last keys; all before them are visible.
    """
    b, heads, n, _ = query.shape
    kv_heads = key.shape[1]
    rows = heads // kv_heads * n
    folded = query.reshape(b, kv_heads, rows, -1)
    plain = softcap is None and sinks is None
    hidden = 0 if mask is None else mask.shape[1]
    if plain and (mask is None or query.device.type != "cpu" or query.dtype != torch.float32):
        if mask is not None and hidden < key.shape[2]:
            mask = F.pad(mask, (key.shape[2] - hidden, 0))
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(b, heads, n, -1)
    keys = key.flatten(0, 1).transpose(1, 2)
    if softcap is None and mask is not None and hidden == key.shape[2]:
        scores = torch.baddbmm(mask, folded.flatten(0, 1), keys, alpha=scaling)
    else:
        scores = torch.bmm(folded.flatten(0, 1), keys) * scaling
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores[..., -hidden:] += mask
    if sinks is None:
        weights = scores.softmax(dim=-1, dtype=torch.float32)
    else:
        column = sinks.view(kv_heads, -1, 1).expand(-1, -1, n).reshape(kv_heads, rows, 1).repeat(b, 1, 1)
        weights = torch.cat((scores, column.to(scores.dtype)), dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]
    return torch.bmm(weights.to(value.dtype), value.flatten(0, 1)).view(b, heads, n, -1)
