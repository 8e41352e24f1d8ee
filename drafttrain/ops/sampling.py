"""From logits to probabilities and tokens: temperature, then top-k, then top-p (HF's order), in float32.

`torch.multinomial` costs more than a small model's whole forward pass on a CPU. Inverting the cumulative distribution
in two levels costs a few passes over the logits: sums over blocks of the vocabulary choose the block, the cumulative
sum inside that one block chooses the token. Both levels are exact up to float32 probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.errors import UserError

_BLOCK = 256
# Nuclei are looked for among this many likeliest tokens first; a row whose nucleus is larger is sorted completely.
_NUCLEUS = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from the target's distribution.

    Attributes:
        temperature: divides the logits; 0 means greedy.
        top_k: keep the k likeliest tokens (ties with the k-th stay); 0 keeps all.
        top_p: keep the smallest set of likeliest tokens with at least this probability; 1 keeps all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} must be 0 (keep all tokens) or a positive count")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1 (1 keeps all tokens)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that tokens are drawn from.

    Args:
        logits: [..., v].
        params: not greedy.

    Returns:
        [..., v] float32, zero for tokens that top-k or top-p drop; the kept set is the one transformers' warpers keep.
    """
    scores = logits.float()
    if params.temperature != 1:
        scores = scores / params.temperature
    if params.top_k:
        worst = scores.topk(min(params.top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < worst, float("-inf"))
    if params.top_p < 1:
        ascending, order = scores.sort(dim=-1)
        drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - params.top_p
        drop[..., -1] = False
        scores = scores.masked_fill(torch.empty_like(drop).scatter_(-1, order, drop), float("-inf"))
    return scores.softmax(dim=-1)


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """Samples one index per row by inverting the cumulative sum; `torch.multinomial` takes 10x longer on a CPU.

    Args:
        probs: [..., v], non-negative; need not be normalised. Tokens with probability 0 are never drawn.
        generator: on the CPU, so that a seed means the same on every device.

    Returns:
        [...] int64.
    """
    cumulative = probs.double().cumsum(dim=-1)
    total = cumulative[..., -1:].contiguous()
    uniform = torch.rand((*probs.shape[:-1], 1), dtype=torch.float64, generator=generator).to(probs.device)
    index = torch.searchsorted(cumulative, uniform * total, right=True)
    # Rounding may carry uniform * total up to the total itself, which lies beyond the last token with any mass.
    return torch.minimum(index, torch.searchsorted(cumulative, total)).squeeze(-1)


def sample(logits: Tensor, sampling: SamplingParams, uniforms: Tensor | None = None) -> Tensor:
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
