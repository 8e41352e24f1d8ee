"""Sampling probabilities by transformers' own processors."""

from __future__ import annotations

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
