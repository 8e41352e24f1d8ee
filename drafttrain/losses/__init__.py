"""Divergences between target and drafter, applied over the vocabulary in chunks."""

from drafttrain.losses.divergence import DIVERGENCES
from drafttrain.losses.linear import DivergenceOutput, TargetRows, linear_divergence

__all__ = ["DIVERGENCES", "DivergenceOutput", "TargetRows", "linear_divergence"]
