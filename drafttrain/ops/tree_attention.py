"""Attention of new tokens over a prefix and over their own ancestors.

A forward of tree verification holds L committed keys followed by n new ones (the root and the tree's nodes). Every new
token sees the prefix, its ancestors and itself; a sliding window counts positions, not slots, because siblings share a
position. The mask depends on the tree alone, so a `TreeLayout` builds it once and all layers share it.

On a CPU, up to 64 new tokens take the kernel of ops/cpu_layers.c, whose result for a token is the same to the bit in any tree.
Everything else is plain torch: one row without a mask in fused attention with a group's query heads folded into rows,
several rows in two matrix products over folded rows. No form repeats keys or values in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.ops.native import cpu_kernels

# The CPU kernel keeps a token's ancestors in one word, and its scores in the core's own cache: 0.3-0.9x of torch's time
# up to 1000 keys, as much at 2000, more beyond.
_FEW, _NEAR = 64, 2048
# Long chains (prefill under a window or a soft cap) attend in blocks of rows, so that no mask is quadratic in length.
_BLOCK = 256


class TreeLayout:
    """Where the new tokens of one forward stand: behind which prefix, and below which ancestors.

    Attributes:
        prefix_len: L, committed positions; slot and position agree there.
        parents: per tree node the index of its parent among the nodes, -1 below the root; None for a plain chain.
        held: the tree's first tokens, whose keys lie behind the prefix since earlier forwards: a tree that grows.
        count: n, new tokens. With parents, token 0 of a tree is the root and token i+1 is node i.
        depths: [n] int array; new token i stands at position L + depths[i].
    """

    def __init__(self, prefix_len: int, parents: Sequence[int] | None = None, count: int | None = None, held: int = 0):
        self.prefix_len, self.parents, self.held = prefix_len, parents, held
        if parents is None:
            assert count is not None, "a chain needs its length"
            self.count, self.tree_depths = count, np.arange(count)
        else:
            self.count = len(parents) + 1 - held
            depths = [0]
            for parent in parents:
                depths.append(depths[parent + 1] + 1)
            self.tree_depths = np.asarray(depths)
        self.depths = self.tree_depths[held:]
        self._masks: dict[tuple, tuple[int, Tensor | None]] = {}
        self._bits: tuple[np.ndarray, np.ndarray] | None = None

    @cached_property
    def plan(self) -> CpuPlan | None:
        """The CPU kernel's, for a sequence whose keys begin with the buffer; None where the kernel does not serve."""
        return CpuPlan.build([(0, self)])

    def bits(self) -> tuple[np.ndarray, np.ndarray]:
        """Per token of a tree of at most 64: uint64, bit j set where token j is an ancestor or itself; int32 depth."""
        if self._bits is None:
            seen: list[int] = []
            parents = range(-1, self.count - 1) if self.parents is None else [-1, *(p + 1 for p in self.parents)]
            for token, parent in enumerate(parents):
                seen.append((seen[parent] if parent >= 0 else 0) | 1 << token)
            self._bits = np.array(seen, dtype=np.uint64), self.tree_depths.astype(np.int32)
        return self._bits

    def positions(self) -> Tensor:
        """[1, n] int64 position ids."""
        return torch.from_numpy((self.depths + self.prefix_len)[None])

    def mask(self, window: int | None, repeats: int, like: Tensor) -> tuple[int, Tensor | None]:
        """The additive mask over the keys that any new token can see.

        Args:
            window: visible positions, own included; None for all.
            repeats: how many query heads share a key head; the rows are tiled that often.
            like: gives dtype and device.

        Returns:
            The first visible key slot, and [repeats*n, L+held+n-first] of 0 and -inf, or None where all is visible.
        """
        reach = self.prefix_len + int(self.tree_depths.max(initial=0)) + 1
        window = None if window is None or window >= reach else window
        key = (window, repeats, like.dtype, like.device)
        if key not in self._masks:
            first = 0 if window is None else max(0, self.prefix_len + 1 - window)
            bias = None if self.count == 1 and not self.held else self._bias(first, window)
            tiled = None if bias is None else torch.from_numpy(np.tile(bias, (repeats, 1))).to(like.device, like.dtype)
            self._masks[key] = (first, tiled)
        return self._masks[key]

    def _bias(self, first: int, window: int | None) -> np.ndarray:
        prefix, n = self.prefix_len - first, self.held + self.count
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
            new = self.prefix_len + self.tree_depths
            keys = np.concatenate((np.arange(first, self.prefix_len), new))
            bias[new[:, None] - keys[None, :] >= window] = -np.inf
        return bias[self.held :]


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
    """Attends with n new tokens over L committed, the held and n new keys, as `layout` says who sees whom.

    Args:
        query: [b, heads, n, head_dim], RoPE applied.
        key: [b, kv_heads, L+held+n, head_dim]; query head i reads key head i // (heads / kv_heads).
        value: [b, kv_heads, L+held+n, value_dim].
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
    plan = layout.plan if key.shape[0] == 1 and query.device.type == "cpu" else None
    if plan is not None and plan.serves(query, key, value):
        return plan.attend(query, key[0], value[0], window=window, **options).transpose(1, 2)
    if layout.parents is None and n > 1:
        plain = softcap is None and sinks is None
        if plain and prefix == 0 and (window is None or window >= n):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        if n > _BLOCK:
            return _in_blocks(query, key, value, prefix, window, options)
    first, mask = layout.mask(window, query.shape[1] // key.shape[1], query)
    return _attend(query, key[:, :, first:], value[:, :, first:], mask, **options)


class CpuPlan:
    """What the CPU kernel knows about a packed forward: several sequences' new tokens, one after the other.

    Args:
        parts: per sequence the first slot of its keys on the slot axis, and its layout.

    Attributes:
        pointers: the kernel's arguments: parts, their count, ancestors, depths.
    """

    def __init__(self, parts: Sequence[tuple[int, TreeLayout]]):
        rows, begin, node = [], 0, 0
        for slot, layout in parts:
            rows.append((slot, layout.prefix_len, begin, layout.count, layout.held, node))
            begin += layout.count
            node += layout.held + layout.count
        bits = [layout.bits() for _, layout in parts]
        self._parts = np.array(rows, dtype=np.int64)
        self._ancestors = bits[0][0] if len(bits) == 1 else np.concatenate([ancestors for ancestors, _ in bits])
        self._depths = bits[0][1] if len(bits) == 1 else np.concatenate([depths for _, depths in bits])
        self.pointers = (self._parts.ctypes.data, len(rows), self._ancestors.ctypes.data, self._depths.ctypes.data)

    @staticmethod
    def build(parts: Sequence[tuple[int, TreeLayout]]) -> CpuPlan | None:
        """None where a sequence has too many tokens for the kernel, or keys enough for torch to be faster."""
        if any(layout.held + layout.count > _FEW or layout.prefix_len > _NEAR for _, layout in parts):
            return None
        return CpuPlan(parts) if cpu_kernels() is not None else None

    def serves(self, query: Tensor, keys: Tensor, values: Tensor) -> bool:
        """Float32 on a CPU, without gradients, in the widths that the kernel is written for. Shapes as in `attend`."""
        if query.device.type != "cpu" or query.shape[-1] % 16 or values.shape[-1] % 16:
            return False
        if not query.dtype == keys.dtype == values.dtype == torch.float32 or torch.is_grad_enabled():
            return False
        in_order = keys.stride(-2) == keys.shape[-1] and values.stride(-2) == values.shape[-1]
        return in_order and query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        new: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Stores the new keys and values, if any are given, and attends.

        Args:
            query: [1, heads, N, e] or [N, heads, e]; keys, values: [kv_heads, slots, e].
            new: keys and values of the new tokens, [1, kv_heads, N, e] or as the query; None if they are in place.

        Returns:
            [1, N, heads, value_dim].
        """
        kernels = cpu_kernels()
        assert kernels is not None
        tokens = 0 if query.dim() == 3 else 2
        heads, n, e, kv_heads, ve = (
            query.shape[1],
            query.shape[tokens],
            query.shape[-1],
            keys.shape[0],
            values.shape[-1],
        )
        out = torch.empty((1, n, heads, ve))
        if sinks is not None:
            sinks = sinks.float().contiguous()
        rows = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in new or ()]
        fresh = [number for tensor in rows for number in (tensor.data_ptr(), tensor.stride(1), tensor.stride(tokens))]
        kernels.tree_attention(
            *(query.data_ptr(), query.stride(1), query.stride(tokens)),
            *(fresh or (None, 0, 0, None, 0, 0)),
            *(keys.data_ptr(), keys.stride(0), values.data_ptr(), values.stride(0), out.data_ptr()),
            *(heads, kv_heads, e, ve, *self.pointers),
            *(
                scaling,
                window or 0,
                softcap or 0.0,
                None if sinks is None else sinks.data_ptr(),
                torch.get_num_threads(),
            ),
        )
        return out


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
