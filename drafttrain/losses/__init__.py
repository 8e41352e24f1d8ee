"""Divergences between target and drafter, applied over the vocabulary in chunks."""

from drafttrain.losses.divergence import DIVERGENCES
from drafttrain.losses.linear import DivergenceOutput, linear_divergence
from drafttrain.losses.spec import Loss, parse_loss
from drafttrain.losses.targets import StoredLogits, StoredTopK, TargetRows, Targets

__all__ = [
    "DIVERGENCES",
    "DivergenceOutput",
    "Loss",
    "StoredLogits",
    "StoredTopK",
    "TargetRows",
    "Targets",
    "linear_divergence",
    "parse_loss",
]
