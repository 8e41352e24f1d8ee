"""Engines' own drafting from earlier tokens, for which nothing is written.

Sources: vLLM 0.32 config/speculative.py and docs/features/spec_decode; llama.cpp b11549
common/arg.cpp; transformers 5.23 generation/configuration_utils.py.
"""

from __future__ import annotations

from drafttrain.drafters.shipping import Shipping


class NgramShipping(Shipping):
    """Settings only. vLLM's suffix decoding also reads the answers to earlier requests."""

    own_drafting = {
        "vLLM, n-grams": """vllm serve {target} --speculative-config \\
  '{{"method": "ngram", "num_speculative_tokens": {depth}, "prompt_lookup_max": 4, "prompt_lookup_min": 2}}'""",
        "vLLM, suffixes": """pip install arctic-inference==0.1.1  # vLLM stops without it
vllm serve {target} --speculative-config '{{"method": "suffix", "num_speculative_tokens": {depth}}}'""",
        "llama.cpp": """# target.gguf: the target as GGUF of any type
llama-server -m target.gguf --spec-type ngram-simple \\
  --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m {depth}""",
        "transformers": "model.generate(**inputs, prompt_lookup_num_tokens={depth})",
    }


SHIPPING = NgramShipping()
