"""The inference engine: continuous batching with lossless speculative decoding.

engine.py                    `Decoder` and the round: draft, verify, commit
verify.py, rejection.py      which draft tokens the target accepts, greedy and sampled
sequence.py                  a sequence: limits, stop strings, text, statistics
adaptive.py                  `@adapt`: the tree of each round by measured cost
static.py                    target passes as CUDA graphs
decode.py, call_options.py   `generate` and `stream` as functions; their keyword arguments
responses.py                 responses for data generation
"""

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
