"""Divergences between target and drafter, applied over the vocabulary in chunks."""

from drafttrain.losses.divergence import (
    DIVERGENCES,
    Aligned,
    DivergenceOutput,
    LazyRows,
    SharedHead,
    TargetRows,
    Targets,
    linear_divergence,
    sums_by_depth,
    tempered,
)
from drafttrain.losses.spec import Loss, parse_loss
from drafttrain.losses.stored import StoredLogits, StoredTopK

__all__ = [
    "DIVERGENCES",
    "Aligned",
    "DivergenceOutput",
    "LazyRows",
    "Loss",
    "SharedHead",
    "StoredLogits",
    "StoredTopK",
    "TargetRows",
    "Targets",
    "linear_divergence",
    "parse_loss",
    "sums_by_depth",
    "tempered",
]
