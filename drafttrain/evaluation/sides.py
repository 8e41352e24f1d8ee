"""The sides of a comparison: what answers the same prompts, by turns.

Our engine with a drafter, our engine without one, and transformers' own generate.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from drafttrain.environment import peak_memory, reset_peak
from drafttrain.errors import UserError
from drafttrain.evaluation.metrics import side_record
from drafttrain.evaluation.results_schema import EngineSide, PlainSide
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.target import Target, resolve_target
from drafttrain.target.sight import ImagePrompt


class SideRequest(NamedTuple):
    """Prompts that are answered at once.

    Attributes:
        prompts: token ids, or prompts with images. limits: most new tokens of each.
        speculate: whether our engine drafts, per prompt; None drafts for all.
    """

    prompts: Sequence[list[int] | ImagePrompt]
    limits: Sequence[int]
    seed: int = 0
    speculate: Sequence[bool] | None = None


class SideAnswer(NamedTuple):
    """A prompt's answer by a side. memory: peak bytes of the whole request, if they were watched."""

    tokens: list[int]
    figures: EngineSide | PlainSide
    memory: int | None = None


Side = Callable[[SideRequest], list[SideAnswer]]


def prompt_tokens(prompt: list[int] | ImagePrompt) -> list[int]:
    """The token ids of a prompt."""
    if isinstance(prompt, ImagePrompt):
        ids: list[int] = prompt.ids.tolist()
        return ids
    return prompt


def by_turns(
    sides: Mapping[str, Side],
    request: SideRequest,
    turn: int,
) -> Iterator[tuple[str, list[SideAnswer]]]:
    """Answers of every side to the same prompts, one side after the other.

    Args:
        turn: number of the request. Each one begins with the next side, so that no side always
            answers on a warm or a busy machine.
    """
    names = list(sides)
    first = turn % len(names)
    for name in names[first:] + names[:first]:
        yield name, sides[name](request)


def engine_side(decoder: Decoder, watch_memory: bool = False) -> Side:
    """Our engine; a decoder without a drafter decodes plainly by the same code.

    All prompts of a request form one batch.
    """

    def answer(request: SideRequest) -> list[SideAnswer]:
        memory = None
        if watch_memory:
            reset_peak(decoder.target.device)
        start = time.perf_counter()
        generations = decoder.generate(
            request.prompts,
            max_new_tokens=max(request.limits),
            seed=request.seed,
            speculate=request.speculate,
        )
        seconds = time.perf_counter() - start - decoder.capture_seconds
        if watch_memory:
            memory = peak_memory(decoder.target.device)

        share = None
        if len(request.prompts) > 1:
            share = seconds / len(request.prompts)
        answers = []
        for made in generations:
            answers.append(SideAnswer(made.tokens, side_record(made, share), memory))
        return answers

    return answer


def hf_sides(
    target: Target,
    sampling: SamplingParams,
    names: Sequence[str],
    assistant: str = "",
    trust_remote_code: bool = False,
) -> dict[str, Side]:
    """transformers' generate, plain and with its own speculative decoding, on one shared model.

    The model has the attention that transformers chooses for the family (sdpa, or eager where sdpa
    cannot express it). It shares the target's weights on a GPU, and loads them again on a CPU. Replaces the model's generation
    settings by what ours applies, so that all sides choose tokens and end by the same rules.

    Args:
        names: of hf_generate, hf_prompt_lookup (10 tokens from the prompt) and hf_assisted.
        assistant: the draft model of hf_assisted; empty for the target's own first third of layers.
    """

    def load(path: str) -> Any:  # transformers' stubs know no `generate` on its models
        options = {
            "dtype": target.dtype,
            "trust_remote_code": trust_remote_code,
            "use_safetensors": True,
        }
        sees = path == target.path and target.sight is not None
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        loaded: Any = kind.from_pretrained(path, **options)
        return loaded.to(target.device).eval()

    model = None
    if target.sight is None:  # a target that reads images is without its towers
        model = target.unwrapped()
    if model is None and not target.path:
        fix = "give its folder as target, or baselines='autoregressive'"
        raise UserError(
            f"baselines={','.join(names)} load target {target.name!r} again, but it has no files; {fix}"
        )
    if model is None:
        model = load(target.path)

    # The rules by which our engine chooses tokens.
    end = target.eos_ids or None
    pad = None
    if target.tokenizer is not None:
        pad = target.tokenizer.pad_token_id
    if pad is None and end:
        pad = end[0]
    rules = target.generation.rules_for(sampling)
    model.generation_config = GenerationConfig(
        **rules.settings,
        eos_token_id=end,
        pad_token_id=pad,
    )
    choice: dict[str, object] = {"do_sample": not sampling.greedy}
    if not sampling.greedy:
        choice |= dataclasses.asdict(sampling)
        choice["min_p"] = sampling.min_p or None
        choice["repetition_penalty"] = rules.repetition_penalty

    methods: dict[str, dict[str, object]] = {
        "hf_generate": {},
        "hf_prompt_lookup": {"prompt_lookup_num_tokens": 10},
        "hf_assisted": {"assistant_early_exit": max(1, target.num_layers // 3)},
    }
    if assistant and "hf_assisted" in names:
        methods["hf_assisted"] = {"assistant_model": load(resolve_target(assistant))}

    def padded(rows: Sequence[list[int]], value: int) -> Tensor:  # [b, s]
        tensors = [torch.tensor(row, device=target.device) for row in rows]
        return pad_sequence(
            tensors,
            batch_first=True,
            padding_value=value,
            padding_side="left",
        )

    def answered(row: list[int]) -> list[int]:
        """Tokens up to EOS; generate pads a row behind it until the last row ends."""
        for count, token in enumerate(row, 1):
            if token in target.eos_ids:
                return row[:count]
        return row

    def side(method: dict[str, object]) -> Side:
        def answer(request: SideRequest) -> list[SideAnswer]:
            torch.manual_seed(request.seed)
            start = time.perf_counter()
            rows = [prompt_tokens(prompt) for prompt in request.prompts]
            ids = padded(rows, pad or 0)  # [b, s]
            mask = padded([[1] * len(row) for row in rows], 0)
            limit = max(request.limits)
            options = {"max_new_tokens": limit, "use_cache": True, **choice, **method}
            for prompt in request.prompts:
                if isinstance(prompt, ImagePrompt):  # it is the only one
                    for name, value in prompt.tensors.items():
                        if value.is_floating_point():
                            value = value.to(model.dtype)
                        options[name] = value.to(target.device)
            out = model.generate(ids, attention_mask=mask, **options)  # [b, s + new]
            rows = out[:, ids.shape[1] :].tolist()
            share = round((time.perf_counter() - start) / len(request.prompts), 6)
            answers = []
            for row, most in zip(rows, request.limits, strict=True):
                tokens = answered(row[:most])
                answers.append(SideAnswer(tokens, PlainSide(tokens=len(tokens), seconds=share)))
            return answers

        return answer

    return {name: side(methods[name]) for name in names}
