"""Drawing tokens from logits quickly on a CPU: temperature, top-k, top-p in HF's order, in float32.

`torch.multinomial` costs more than a small model's whole forward pass on a CPU. Inverting the cumulative distribution
in two levels costs a few passes over the logits: sums over blocks of the vocabulary choose the block, the cumulative
sum inside that one block chooses the token. Both levels are exact up to float32 probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.errors import UserError

_BLOCK = 256
# Nuclei are looked for among this many likeliest tokens first; a row whose nucleus is larger is sorted completely.
_NUCLEUS = 1024


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy; top_k 0 and top_p 1 keep the whole vocabulary."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            UserError: a value outside its range.
        """
        rules: list[tuple[str, Any, bool, str]] = [
            ("temperature", self.temperature, self.temperature >= 0, "be >= 0 (0 = greedy)"),
            ("top_k", self.top_k, self.top_k >= 0, "be >= 0 (0 = the whole vocabulary)"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "be in (0, 1] (1 = the whole distribution)"),
        ]
        for key, value, holds, rule in rules:
            if not holds:
                raise UserError(f"{key}={value} must {rule}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def sample(logits: Tensor, sampling: Sampling, uniforms: Tensor | None = None) -> Tensor:
    """Draws one token per row.

    Args:
        logits: [n, v] float32.
        sampling: temperature, then top-k, then top-p.
        uniforms: [n] float64 in [0, 1), one per row; not read when greedy.

    Returns:
        [n] int64.
    """
    if sampling.greedy:
        return _argmax(logits)
    assert uniforms is not None
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        values, ids = logits.topk(sampling.top_k, dim=-1)
        return _from_sorted(torch.softmax(values, -1), ids, sampling.top_p, uniforms)
    if sampling.top_p < 1.0:
        return _nucleus(logits, sampling.top_p, uniforms)
    return _two_level(torch.softmax(logits, -1), uniforms)


def _blocks(x: Tensor, fill: float) -> Tensor:
    """[n, v] -> [n, ceil(v / block), block], padded with `fill`."""
    short = -x.shape[-1] % _BLOCK
    return (F.pad(x, (0, short), value=fill) if short else x).view(x.shape[0], -1, _BLOCK)


def _argmax(logits: Tensor) -> Tensor:
    """First index of each row's maximum; two levels because torch's argmax over long rows is slow on a CPU."""
    blocks = _blocks(logits, float("-inf"))
    block = blocks.amax(-1).argmax(-1)
    rows = torch.arange(len(block), device=logits.device)
    return block * _BLOCK + blocks[rows, block].argmax(-1)


def _invert(weights: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """Finds where the cumulative sum of a row passes a point.

    Args:
        weights: [n, m] float64, non-negative, with a positive sum per row.
        point: [n] float64 in [0, row sum].

    Returns:
        index [n] of an entry with positive weight, and the sum [n] of the entries before it.
    """
    total = weights.cumsum(-1)
    # Rounding may put the point on the row's end; just below it, the first sum beyond is always an entry with weight.
    point = torch.minimum(point, torch.nextafter(total[:, -1], torch.zeros_like(point)))
    index = torch.searchsorted(total, point[:, None], right=True)
    before = (total - weights).gather(-1, index)
    return index[:, 0], before[:, 0]


def _two_level(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling of [n, v] float32 probabilities, whose sum need not be exactly one."""
    blocks = _blocks(probs, 0.0)
    mass = blocks.sum(-1).double()
    point = uniforms * mass.sum(-1)
    block, before = _invert(mass, point)
    inside = blocks[torch.arange(len(block), device=probs.device), block].double()
    # The block's float32 sum and the sum of its entries differ by rounding: spread the point over the latter.
    share = (point - before).clamp_min(0) / mass.gather(-1, block[:, None])[:, 0]
    token, _ = _invert(inside, share * inside.sum(-1))
    return block * _BLOCK + token


def _from_sorted(probs: Tensor, ids: Tensor, top_p: float, uniforms: Tensor) -> Tensor:
    """Samples from descending probabilities [n, m] of tokens `ids`, cut after the nucleus of mass top_p."""
    weights = probs.double()
    if top_p < 1.0:
        weights = weights.masked_fill(weights.cumsum(-1) - weights >= top_p, 0.0)
    index, _ = _invert(weights, uniforms * weights.sum(-1))
    return ids.gather(-1, index[:, None])[:, 0]


def _nucleus(logits: Tensor, top_p: float, uniforms: Tensor, width: int = _NUCLEUS) -> Tensor:
    width = min(width, logits.shape[-1])
    values, ids = logits.topk(width, dim=-1)
    probs = (values - logits.logsumexp(-1, keepdim=True)).exp()
    tokens = _from_sorted(probs, ids, top_p, uniforms)
    wide = (probs.sum(-1) < top_p).nonzero()[:, 0]
    if width < logits.shape[-1] and len(wide):
        tokens[wide] = _nucleus(logits[wide], top_p, uniforms[wide], width=logits.shape[-1])
    return tokens
