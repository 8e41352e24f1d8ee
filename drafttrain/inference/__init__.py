"""Lossless speculative decoding: draft -> verify -> commit."""

from drafttrain.inference.engine import (
    Decoder,
    Generation,
    Stats,
    generate,
    generate_batch,
    stream,
    strip_padding,
    token_limit,
)
from drafttrain.ops.sampling import SamplingParams

__all__ = [
    "Decoder",
    "Generation",
    "SamplingParams",
    "Stats",
    "generate",
    "generate_batch",
    "stream",
    "strip_padding",
    "token_limit",
]
