"""Attention of training-time test: a causal prefix shared by all depths, plus each anchor's own path of later depths."""

from __future__ import annotations

import torch
from torch import Tensor


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
