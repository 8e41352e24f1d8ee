"""Lossless speculative decoding: draft -> verify -> commit."""

from drafttrain.decode.engine import Generation, Stats, generate, stream, token_limit
from drafttrain.ops.sampling import SamplingParams

__all__ = ["Generation", "SamplingParams", "Stats", "generate", "stream", "token_limit"]
