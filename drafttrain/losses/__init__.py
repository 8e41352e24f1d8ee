"""Divergences between target and drafter, applied over the vocabulary in chunks."""

from drafttrain.losses.divergence import DIVERGENCES
from drafttrain.losses.linear import DivergenceOutput, TargetRows, linear_divergence
from drafttrain.losses.topk import StoredTopK

__all__ = ["DIVERGENCES", "DivergenceOutput", "StoredTopK", "TargetRows", "linear_divergence"]
