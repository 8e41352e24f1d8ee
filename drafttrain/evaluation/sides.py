"""The sides of a comparison: our engine with the drafter, our engine without it, and transformers' own generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from drafttrain.evaluation.metrics import Record, side_record
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.target import Target, resolve_target

# (token ids of the prompts, max new tokens of each, seed) -> per prompt: new tokens, and the record of the generation
Side = Callable[..., list[tuple[list[int], Record]]]


def engine_side(decoder: Decoder) -> Side:
    """Our engine; a decoder without a drafter decodes plainly by the same code. All prompts of a call form one batch.

    The side takes a fourth argument: whether to speculate, per prompt.
    """

    def run(
        prompts: Sequence[list[int]], limits: Sequence[int], seed: int, speculate: Sequence[bool] | None = None
    ) -> list[tuple[list[int], Record]]:
        start = time.perf_counter()
        generations = decoder.generate(prompts, max_new_tokens=max(limits), seed=seed, speculate=speculate)
        share = (time.perf_counter() - start) / len(prompts) if len(prompts) > 1 else None
        return [(generation.tokens, side_record(generation, share)) for generation in generations]

    return run


def hf_sides(
    target: Target,
    sampling: SamplingParams,
    names: Sequence[str],
    assistant: str = "",
    trust_remote_code: bool = False,
) -> dict[str, Side]:
    """transformers' generate, plain and with its own speculative decoding, on one shared model.

    Loads a second copy of the target in its dtype, with the attention that transformers chooses for the family (sdpa, or
    eager where sdpa cannot express it). Replaces the model's generation settings by ours, so that all sides choose tokens
    and end by the same rules.

    Args:
        names: of hf_generate, hf_prompt_lookup (10 tokens from the prompt) and hf_assisted.
        assistant: the draft model of hf_assisted; empty for the target's own first third of layers.
    """

    def load(path: str) -> Any:  # transformers' stubs know no `generate` on its models
        options = {"dtype": target.dtype, "trust_remote_code": trust_remote_code, "use_safetensors": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, **options)
        return loaded.to(target.device).eval()

    model = load(target.path)
    end = target.eos_ids or None
    pad = target.tokenizer.pad_token_id if target.tokenizer is not None else None
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end[0] if pad is None and end else pad)
    choice: dict[str, object] = {"do_sample": not sampling.greedy}
    if not sampling.greedy:
        choice |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        choice["min_p"] = sampling.min_p or None
    choice["repetition_penalty"] = float(sampling.repetition_penalty)
    methods: dict[str, dict[str, object]] = {"hf_generate": {}, "hf_prompt_lookup": {"prompt_lookup_num_tokens": 10}}
    if "hf_assisted" in names:
        own_layers = {"assistant_early_exit": max(1, target.num_layers // 3)}
        methods["hf_assisted"] = {"assistant_model": load(resolve_target(assistant))} if assistant else {**own_layers}
    return {name: _hf_side(model, target, {**choice, **methods[name]}) for name in names}


def _hf_side(model: Any, target: Target, options: dict[str, object]) -> Side:
    pad = model.generation_config.pad_token_id or 0

    def run(prompts: Sequence[list[int]], limits: Sequence[int], seed: int) -> list[tuple[list[int], Record]]:
        torch.manual_seed(seed)
        start = time.perf_counter()
        width = max(map(len, prompts))
        ids = torch.tensor(
            [[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=target.device
        )  # [b, s]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)  # [b]
        mask = (torch.arange(width, device=target.device) >= width - lengths[:, None]).long()  # [b, s]
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max(limits), use_cache=True, **options)
        rows = [row[:limit] for row, limit in zip(out[:, width:].tolist(), limits, strict=True)]
        share = round((time.perf_counter() - start) / len(prompts), 6)
        # generate pads a row after its end until the last row ends.
        ends = [next((i + 1 for i, token in enumerate(row) if token in target.eos_ids), len(row)) for row in rows]
        return [(row[:end], {"tokens": end, "seconds": share}) for row, end in zip(rows, ends, strict=True)]

    return run
