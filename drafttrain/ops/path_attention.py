"""Attention of training-time test: a causal prefix shared by all depths, plus each anchor's own path of later depths."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class PathAttention:
    """What training-time test has to remember between depths: the first depth's keys, and each anchor's path since.

    Args:
        b, s: rows and positions. where: [t] int64 flat positions of the tokens that give first-depth keys.
    """

    def __init__(self, b: int, s: int, where: Tensor):
        self.b, self.s, self.where = b, s, where
        self.base: tuple[Tensor, Tensor] | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def keep(self, going_on: Tensor) -> None:
        """Drops the paths of anchors that end; going_on [t] bool."""
        self.keys = [key[going_on] for key in self.keys]
        self.values = [value[going_on] for value in self.values]

    def attend(self, asking: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The attention of one depth, whose queries stand at flat positions `asking`."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if self.base is None:
                self.base = self._dense(key), self._dense(value)
            else:
                self.keys.append(key)
                self.values.append(value)
            return path_attention(query, asking, *self.base, self.keys, self.values)

        return attend

    def _dense(self, flat: Tensor) -> Tensor:
        """[t, kv_heads, e] -> [b, kv_heads, s, e], zeros where no token stands."""
        out = flat.new_zeros(self.b * self.s, *flat.shape[1:]).index_copy(0, self.where, flat)
        return out.view(self.b, self.s, *flat.shape[1:]).transpose(1, 2)


def path_attention(
    query: Tensor,
    where: Tensor,
    base_key: Tensor,
    base_value: Tensor,
    path_keys: list[Tensor],
    path_values: list[Tensor],
) -> Tensor:
    """Each query sees base keys at positions up to its own, and one key per later depth: its own.

    The [s, k*s] mask of the textbook form is never built: the path part is a row-wise product.

    Args:
        query: [t, heads, e]; where: [t] int64 flat positions (row * s + position), ascending.
        base_key, base_value: [b, kv_heads, s, e].
        path_keys, path_values: k tensors [t, kv_heads, e].

    Returns:
        [t, heads * e].
    """
    t, heads, e = query.shape
    b, kv, s, _ = base_key.shape
    groups = heads // kv
    scale = e**-0.5
    dense = query.new_zeros(b * s, heads, e).index_copy(0, where, query * scale)
    dense = dense.view(b, s, kv, groups, e).permute(0, 2, 3, 1, 4).reshape(b, kv, groups * s, e)
    scores = (dense @ base_key.transpose(-1, -2)).view(b, kv, groups, s, s)
    hidden = torch.ones(s, s, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(hidden, float("-inf"))
    if path_keys:
        grouped = (query * scale).view(t, kv, groups, e)
        path = torch.stack([(grouped * key.unsqueeze(2)).sum(-1) for key in path_keys], dim=-1)
        k = len(path_keys)
        path = path.new_zeros(b * s, kv, groups, k).index_copy(0, where, path)
        scores = torch.cat((scores, path.view(b, s, kv, groups, k).permute(0, 2, 3, 1, 4)), dim=-1)
    weights = torch.softmax(scores.float(), dim=-1).to(query.dtype)
    out = weights[..., :s].reshape(b, kv, groups * s, s) @ base_value
    out = out.view(b, kv, groups, s, e).permute(0, 3, 1, 2, 4).reshape(b * s, kv, groups, e)[where]
    if path_keys:
        own = weights[..., s:].permute(0, 3, 1, 2, 4).reshape(b * s, kv, groups, -1)[where]
        for j, value in enumerate(path_values):
            out = out + own[..., j, None] * value.unsqueeze(2)
    return out.reshape(t, heads * e)
