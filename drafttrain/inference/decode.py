"""Decoding as functions: a `Decoder` for a single call."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items
from typing import TypedDict, Unpack

from torch import Tensor

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.inference.adaptive import Pace
from drafttrain.inference.engine import Decoder, Prompt
from drafttrain.inference.sequence import Generation, Stats
from drafttrain.ops.sampling import SamplingParams
from drafttrain.target import Target
from drafttrain.target.generation import LogitsRules


class DecoderOptions(TypedDict, total=False):
    """Keyword arguments of `Decoder`."""

    spec: TreeSpec | None
    sampling: SamplingParams | None
    eos_ids: Collection[int] | None
    stop: str | Items[str]
    max_rows: int
    pace: Pace | None
    graphs: bool | None
    rules: LogitsRules | None


def generate(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: Prompt,
    *,
    max_new_tokens: int,
    seed: int = 0,
    **options: Unpack[DecoderOptions],
) -> Generation:
    """Continues one prompt; the output is the target's own, whatever the drafter.

    See `Decoder` for the arguments.
    """
    decoder = Decoder(target, drafter, **options)
    made = decoder.generate(
        [prompt_ids],
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    return made[0]


def generate_batch(
    target: Target,
    drafter: Drafter | None,
    prompts: Items[Prompt],
    *,
    max_new_tokens: int,
    seed: int = 0,
    **options: Unpack[DecoderOptions],
) -> list[Generation]:
    """Continues many prompts, `max_rows` (8) at a time; each output is the same as alone.

    See `Decoder` for the arguments.
    """
    options.setdefault("max_rows", 8)
    decoder = Decoder(target, drafter, **options)
    return decoder.generate(prompts, max_new_tokens=max_new_tokens, seed=seed)


def stream(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: Prompt,
    *,
    max_new_tokens: int,
    seed: int = 0,
    stats: Stats | None = None,
    **options: Unpack[DecoderOptions],
) -> Iterator[list[int]]:
    """Like `generate`, but yields each round's tokens as they are committed; fills `stats`."""
    decoder = Decoder(target, drafter, **options)
    if stats is None:
        stats = Stats()
    rounds = decoder.stream(
        [prompt_ids],
        max_new_tokens=max_new_tokens,
        seed=seed,
        stats=[stats],
    )
    return (tokens for _, tokens in rounds)  # not a generator function: errors are raised here


def strip_padding(input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
    """The prompts [L] of a padded batch, as transformers' tokenizers make it.

    Args:
        input_ids: [b, s].
        attention_mask: [b, s], 0 at padding, left or right.
    """
    return [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]
