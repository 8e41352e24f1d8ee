"""The sides of a comparison: our engine with the drafter, our engine without, and transformers' own generate."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from drafttrain.decode import SamplingParams, generate
from drafttrain.drafters.base import Drafter, TreeSpec
from drafttrain.evaluation.metrics import Record, side_record
from drafttrain.target import Target

# (prompt ids, most new tokens, seed) -> (new tokens, what is kept of the generation)
Side = Callable[[list[int], int, int], tuple[list[int], Record]]


def engine_side(target: Target, drafter: Drafter | None, spec: TreeSpec, sampling: SamplingParams) -> Side:
    """Our engine; without a drafter it decodes plainly by the same code."""

    def run(prompt: list[int], limit: int, seed: int) -> tuple[list[int], Record]:
        generation = generate(target, drafter, prompt, max_new_tokens=limit, spec=spec, sampling=sampling, seed=seed)
        return generation.tokens, side_record(generation)

    return run


def hf_side(target: Target, dtype: torch.dtype, sampling: SamplingParams, trust_remote_code: bool = False) -> Side:
    """transformers' generate on a model of its own: loaded anew, with sdpa attention, in the dtype asked for.

    Its generation settings are replaced by ours, so that both sides choose tokens by the same rule and end alike.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(
        target.path,
        dtype=dtype,
        attn_implementation="sdpa",
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
    )
    model.to(target.device).eval()
    end = target.eos_ids or None
    pad = getattr(target.tokenizer, "pad_token_id", None)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end[0] if pad is None and end else pad)
    choice: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        choice = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    choice["repetition_penalty"] = float(sampling.repetition_penalty)

    def run(prompt: list[int], limit: int, seed: int) -> tuple[list[int], Record]:
        torch.manual_seed(seed)
        start = time.perf_counter()
        ids = torch.tensor([prompt], device=target.device)
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=limit, use_cache=True, **choice)
        tokens = out[0, len(prompt) :].tolist()
        return tokens, {"tokens": len(tokens), "seconds": round(time.perf_counter() - start, 6)}

    return run
