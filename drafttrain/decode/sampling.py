"""From logits to probabilities and tokens: temperature, then top-k, then top-p, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.errors import UserError


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
