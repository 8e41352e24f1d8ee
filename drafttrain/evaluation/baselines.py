"""Names of what a drafter is compared with."""

from __future__ import annotations

from drafttrain.drafters.kinds import baseline_kind
from drafttrain.errors import UserError, shown

BASELINES = ("autoregressive", "hf_generate")
# Our engine with n-gram matches alone, which cost nothing: what a trained drafter must beat.
NGRAM, NGRAM_TREE = baseline_kind()
# Optional: transformers' own speculative decoding. The claimed speed-up compares with the plain
# baselines above only.
HF_SPECULATIVE = ("hf_prompt_lookup", "hf_assisted")
ALL_BASELINES = (*BASELINES, NGRAM, *HF_SPECULATIVE)
BASELINE_NAMES = {
    "autoregressive": "plain decoding",
    "hf_generate": "transformers generate",
    NGRAM: "n-grams alone",
    "hf_prompt_lookup": "transformers prompt lookup",
    "hf_assisted": "transformers assisted",
}


def parse_baselines(text: str) -> list[str]:
    """Reads a comma-separated list of baselines, or `none`. Raises UserError for an unknown name."""
    if text == "none":
        return []
    names = []
    for word in text.split(","):
        name = word.strip()
        if name not in ALL_BASELINES:
            known = ", ".join(ALL_BASELINES)
            raise UserError(
                f"baselines={shown(text)}: {shown(name)} is not one of {known}; or write none"
            )
        names.append(name)
    return names
