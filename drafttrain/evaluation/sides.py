"""The sides of a comparison: our engine with the drafter, our engine without, and transformers' own generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from drafttrain.evaluation.metrics import Record, side_record
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.target import Target, resolve_target

# (prompts' ids, most new tokens of each, seed) -> per prompt its new tokens, and what is kept of the generation
Side = Callable[..., list[tuple[list[int], Record]]]


def engine_side(decoder: Decoder) -> Side:
    """Our engine; without a drafter it decodes plainly by the same code. All prompts of a call are one batch.

    It takes a fourth argument: per prompt, whether to speculate.
    """

    def run(
        prompts: Sequence[list[int]], limits: Sequence[int], seed: int, speculate: Sequence[bool] | None = None
    ) -> list[tuple[list[int], Record]]:
        start = time.perf_counter()
        made = decoder.generate(prompts, max_new_tokens=max(limits), seed=seed, speculate=speculate)
        share = (time.perf_counter() - start) / len(prompts) if len(prompts) > 1 else None
        return [(generation.tokens, side_record(generation, share)) for generation in made]

    return run


def hf_sides(
    target: Target,
    dtype: torch.dtype,
    sampling: SamplingParams,
    names: Sequence[str],
    assistant: str = "",
    trust_remote_code: bool = False,
) -> dict[str, Side]:
    """transformers' generate, plain and with its own speculative decoding, on a model that these sides share.

    The model is loaded anew, in the dtype asked for, with the attention that transformers chooses for the family (sdpa,
    or eager where sdpa cannot express it). Its generation settings are replaced by ours, so that all sides choose tokens
    by the same rule and end alike.

    Args:
        names: of hf_generate, hf_prompt_lookup (10 tokens from the prompt) and hf_assisted.
        assistant: the draft model of hf_assisted; the target's own first layers (a third of them) if empty.
    """
    load: Callable[[str], Any] = partial(
        AutoModelForCausalLM.from_pretrained, dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True
    )
    model: Any = load(target.path)
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

    ways: dict[str, dict[str, Any]] = {"hf_generate": {}, "hf_prompt_lookup": {"prompt_lookup_num_tokens": 10}}
    if "hf_assisted" in names:
        ways["hf_assisted"] = {"assistant_early_exit": max(1, target.num_layers // 3)}
        if assistant:
            ways["hf_assisted"] = {"assistant_model": load(resolve_target(assistant)).to(target.device).eval()}
    return {name: _hf_side(model, target, {**choice, **ways[name]}) for name in names}


def _hf_side(model: Any, target: Target, choice: dict[str, Any]) -> Side:
    def run(prompts: Sequence[list[int]], limits: Sequence[int], seed: int) -> list[tuple[list[int], Record]]:
        torch.manual_seed(seed)
        start = time.perf_counter()
        width = max(map(len, prompts))
        fill = model.generation_config.pad_token_id or 0
        ids = torch.tensor([[fill] * (width - len(prompt)) + prompt for prompt in prompts], device=target.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
        mask = (torch.arange(width, device=target.device) >= width - lengths[:, None]).long()
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max(limits), use_cache=True, **choice)
        rows = [row[:limit] for row, limit in zip(out[:, width:].tolist(), limits, strict=True)]
        share = round((time.perf_counter() - start) / len(prompts), 6)
        # Rows that have ended are padded until the last one has.
        ends = [next((i + 1 for i, token in enumerate(row) if token in target.eos_ids), len(row)) for row in rows]
        return [(row[:end], {"tokens": end, "seconds": share}) for row, end in zip(rows, ends, strict=True)]

    return run
