"""Records of results files, as eval writes them."""

from __future__ import annotations

from drafttrain.evaluation.metrics import (
    by_category,
    summarize,
)


def side(tokens, seconds, rounds=(), draft=0.0, target=0.0, ttft=0.1):
    passes = sum(count for _, _, count in rounds)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "latency": seconds,
        "ttft": ttft,
        "passes": passes,
        "draft_seconds": draft,
        "target_seconds": target,
        "rounds": [list(row) for row in rounds],
    }


def record(category, ours, plain=None, hf=None, same=True, ngram=None):
    sides = {"drafter": ours}
    identical = {}
    if plain:
        sides["autoregressive"] = plain
        identical["autoregressive"] = same
    if ngram:
        sides["ngram"] = ngram
        identical["ngram"] = True
    if hf:
        sides["hf_generate"] = hf
        identical["hf_generate"] = True
    return {"category": category, "prompt_tokens": 50, "sides": sides, "identical": identical}


# 11 tokens: 1 of the prefill, then rounds that accepted 0, 2, 2, 1 of a chain of 2, and 0 of nothing offered: 10 tokens
OURS = side(11, 2.0, [(0, 0, 1), (0, 2, 1), (1, 2, 1), (2, 2, 2)], draft=0.5, target=1.0)
PLAIN = side(11, 4.0, [(0, 0, 10)], target=3.0)


def prompt(
    category="chat", accepted=1, seconds=1.0, prompt_tokens=50, covered=1.0, draft=0.1, offered=2
):
    """A prompt of 10 rounds that accept `accepted` of `offered` tokens; plain decoding takes 0.1 s a token."""
    tokens = 1 + 10 * (1 + accepted)
    ours = side(tokens, seconds, [(accepted, offered, 10)], draft=draft, target=0.5)
    plain = side(tokens, 0.1 * tokens, [(0, 0, tokens - 1)], target=0.1 * tokens)
    return {
        "question_id": "q",
        "turn": 0,
        **record(category, ours, plain),
        "prompt_tokens": prompt_tokens,
        "covered": covered,
    }


def results_of(records, temperature=0.0, **more):
    return {
        "target": "t",
        "drafter": "d",
        "kind": "eagle3",
        "suite": "s",
        "dtype": "float32",
        "decoding": {
            "temperature": temperature,
            "tree": {"spec": "chain:2", "shape": "chain", "sampled": False},
        },
        "overall": summarize(records),
        "categories": by_category(records),
        "prompts": records,
        **more,
    }
