"""The inference engine: continuous batching with lossless speculative decoding."""

from drafttrain.inference.decode import generate, generate_batch, stream, strip_padding
from drafttrain.inference.engine import Decoder
from drafttrain.inference.sequence import Generation, Stats, token_limit
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
