"""Sampling probabilities by transformers' own processors."""

from __future__ import annotations

import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def transformers_says(logits, params, history=None):
    """[n, v] probabilities by transformers' own processors, in the order of its generate()."""
    scores = logits
    if params.repetition_penalty:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(history, scores)
    if params.temperature != 1:
        scores = TemperatureLogitsWarper(params.temperature)(history, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(history, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(history, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(history, scores)
    return scores.softmax(-1)


def p_value(seen: Tensor, probs: Tensor) -> float:
    """Chi-square; cells that expect fewer than five share one."""
    if seen[probs == 0].any():
        return 0.0
    want = probs * seen.sum()
    rare = (want < 5) & (want > 0)
    counts = seen[want >= 5].double()
    expected = want[want >= 5]
    if rare.any():
        counts = torch.cat((counts, seen[rare].sum()[None]))
        expected = torch.cat((expected, want[rare].sum()[None]))
    return float(chisquare(counts.numpy(), expected.numpy()).pvalue)
