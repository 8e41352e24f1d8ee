"""Attention of blocks as one softmax under a dense mask."""

from __future__ import annotations

import torch


def textbook(query, own, base, spans, window=0, causal=False):
    """own: keys and values, and perhaps sinks: a further column without a value."""
    base_key, base_value = base
    key, value, *sinks = own
    heads, e = query.shape[1:]
    blocks = len(spans.last)
    kv = key.shape[1]
    of_query = torch.arange(blocks).repeat_interleave(len(query) // blocks)
    of_key = torch.arange(blocks).repeat_interleave(len(key) // blocks)
    at = torch.arange(len(base_key))
    context = (at >= spans.first[of_query, None]) & (at <= spans.last[of_query, None])
    if window:  # by distance: a block begins right behind its last context token
        place = (
            spans.last[:, None] + 1 + torch.arange(len(key) // blocks)[-(len(query) // blocks) :]
        )  # [m, A]
        context &= place.flatten()[:, None] - at < window
    blocked = of_query[:, None] == of_key
    if causal:
        size = len(key) // blocks
        place_of_key = torch.arange(size).repeat(blocks)
        place_of_query = torch.arange(size)[-(len(query) // blocks) :].repeat(blocks)
        blocked &= place_of_key <= place_of_query[:, None]
    mask = torch.cat((context, blocked), dim=1)
    keys, values = (
        torch.cat(x).repeat_interleave(heads // kv, 1)
        for x in ((base_key, key), (base_value, value))
    )
    scores = torch.einsum("the,she->hts", query, keys) * e**-0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    columns = [sink[:, None, None].expand(-1, len(query), 1) for sink in sinks]
    weights = torch.cat((scores, *columns), dim=-1).softmax(-1)[..., : len(keys)]
    return torch.einsum("hts,she->the", weights, values).flatten(1)
