"""vLLM's own drafting from suffixes, for which nothing is written.

Source: vLLM 0.32 config/speculative.py and docs/features/spec_decode.
"""

from __future__ import annotations

from drafttrain.drafters.shipping import Shipping


class SuffixShipping(Shipping):
    """Settings only.

    vLLM's memory of earlier answers is on unless its cache is set to 0; ours is off by default.
    """

    own_drafting = {
        "vLLM": """pip install arctic-inference==0.1.1  # vLLM stops without it
vllm serve {target} --speculative-config '{{"method": "suffix", "num_speculative_tokens": {depth}}}'""",
    }


SHIPPING = SuffixShipping()
