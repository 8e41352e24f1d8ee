"""The Python API of decoding: `from drafttrain import generate, stream, load_drafter`.

A thin layer over `drafttrain.inference` that turns names into models and prompts of any form into
token ids. train, tune, evaluate, export and push are commands, in drafttrain/commands/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any, overload

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import TypedDict, Unpack

from drafttrain.data.chat import NO_INPUTS, ChatInputs, has_template, prompt_ids
from drafttrain.data.image_parts import content_text, read_images, read_parts, sources_in
from drafttrain.data.image_prompts import chat_prompt
from drafttrain.data.row_formats import PromptInputs
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import decoding_settings, default_tree, prepare
from drafttrain.drafters.registry import load_drafter as load_for_target
from drafttrain.errors import UserError, first_line, shown
from drafttrain.files import Json, check_json
from drafttrain.images import PictureStore
from drafttrain.inference import Decoder, Generation
from drafttrain.inference.call_options import (
    CallLimits,
    GenerateOptions,
    Rows,
    StreamOptions,
    read_options,
)
from drafttrain.inference.engine import Prompt as DecoderPrompt
from drafttrain.inference.sequence import TextStream, token_ids
from drafttrain.target import Target
from drafttrain.target.sight import ImagePrompt
from drafttrain.values import AnyText, Place, check, refuse_options


class Turn(TypedDict):
    """A chat message."""

    role: AnyText
    content: AnyText | list[Json]


# Text, token ids, chat messages [{"role": ..., "content": ...}, ...], or a prompt with images.
OnePrompt = str | Sequence[int] | Sequence[Mapping[str, object]] | ImagePrompt
Prompt = OnePrompt | Tensor
# Several prompts: a list of them, or a tokenizer's output (input_ids, attention_mask), which may
# also hold one.
Prompts = Prompt | Sequence[Prompt] | Mapping[str, Any]
TextPrompt = AnyText | list[Turn]
Model = str | PreTrainedModel | Target
Drafting = str | Drafter | None
Tokenizer = PreTrainedTokenizerBase | None


@overload
def generate(  # type: ignore[overload-overlap]  # a text is also a sequence of texts
    model: Model,
    prompt: OnePrompt,
    drafter: Drafting = None,
    **options: Unpack[GenerateOptions],
) -> Generation: ...
@overload
def generate(
    model: Model,
    prompt: Sequence[Prompt],
    drafter: Drafting = None,
    **options: Unpack[GenerateOptions],
) -> list[Generation]: ...
@overload
def generate(
    model: Model, prompt: Prompts | None = None, drafter: Drafting = None, *, num_return_sequences: int,
    **options: Unpack[GenerateOptions],
) -> list[Generation]: ...  # fmt: skip
@overload  # of a tensor, only its dimensions say whether it is a batch
def generate(
    model: Model,
    prompt: Prompts | None = None,
    drafter: Drafting = None,
    **options: Unpack[GenerateOptions],
) -> Generation | list[Generation]: ...
def generate(
    model: Model, prompt: Prompts | None = None, drafter: Drafting = None, *, tokenizer: Tokenizer = None,
    tree: str | None = None, max_new_tokens: int | None = None, max_length: int | None = None, do_sample: bool | None = None,
    temperature: float | None = None, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
    repetition_penalty: float | None = None, seed: int = 0, num_return_sequences: int | None = None,
    stop: str | Sequence[str] = (), stop_strings: str | Sequence[str] | None = None,
    eos_token_id: int | Sequence[int] | None = None, generation_config: GenerationConfig | Mapping[str, object] | None = None,
    input_ids: Rows | None = None, attention_mask: Rows | None = None, batch_size: int = 8, category: str | Sequence[str] = "",
    tools: Sequence[Json] = (), chat_template_kwargs: Json | None = None, **others: object,
) -> Generation | list[Generation]:  # fmt: skip
    """Continues a prompt or a list of prompts; the output is the model's own, a drafter only makes
    it faster.

    Args:
        model: a name, folder or Hub id; a loaded transformers model; or a `Target`. A name is
            loaded on every call, so create a Target for several calls:
            `Target.from_pretrained(name)`. A loaded model is frozen and gets our attention, which
            is sdpa outside of our decoder: its own `generate` works as before.
        prompt: text; token ids; chat messages, to which the chat template is applied, also with
            images as parts of their content; a tokenizer's output (input_ids with attention_mask,
            padded on either side); a prompt with images (`Target.image_prompt`); or a list of
            texts, ids, chats or prompts with images.
        drafter: a name as in `load_drafter`, a drafter of `load_drafter` or
            `Drafter.from_pretrained`, or None.
        tokenizer: of a loaded transformers model; without one, prompts are token ids and there is
            no text.
        tree: the tree of a round, such as chain:3, fanout:4x2x1 or dynamic:5,8,24. Defaults to the
            drafter's decoding.json, else chain:3.
        max_new_tokens: upper limit per prompt, 256 unless given. max_length: the same with the
            prompt's tokens counted.
        do_sample: True samples as transformers does: by the arguments, else the target's
            generation_config, else temperature 1 and top_k 50. False decodes greedily. Left out,
            temperature decides.
        temperature, top_k, top_p, min_p: as in transformers, all off unless given; temperature 0
            decodes greedily.
        repetition_penalty: as in transformers; 1 turns it off, None is what the model's
            generation_config says.
        seed: answer i of the result samples with seed + i.
        num_return_sequences: samples per prompt, next to each other in the result, which is then a
            list.
        stop, stop_strings: strings that end an answer; the text ends before them.
        eos_token_id: token ids that end an answer, in place of the target's own.
        generation_config: in place of the target's own; arguments of the call come before it.
        input_ids, attention_mask: a tokenizer's output as keywords, in place of `prompt`.
        batch_size: prompts at a time.
        category: the category of the request, or a list with one per prompt. Categories that the
            drafter's decoding.json lists as `off` are decoded plainly; needs the drafter's name.
        tools, chat_template_kwargs: what the chat template reads besides the messages: JSON schemas
            of functions, and its variables, such as {"enable_thinking": False}.
        others: rules for the logits as transformers names them: no_repeat_ngram_size,
            bad_words_ids, min_new_tokens, ...

    Returns:
        A `Generation` (text, tokens, stats), or a list of them for a list of prompts, a padded
        batch or num_return_sequences.

    Raises:
        UserError: an unknown option, bad values, an empty or too long prompt, or text without a
            tokenizer.
    """
    options = {**locals(), **others}  # every argument by its name
    target, prompts, several = _opened(options)
    decoder, limits = _decoder(target, drafter, "generate", options)
    ids = _all_ids(target, prompts, options)
    if isinstance(drafter, str):
        off = decoding_settings(drafter).get("off", [])
    else:
        off = []
    category = check("category", category, AnyText | tuple[AnyText, ...])
    categories = [category] * len(ids) if isinstance(category, str) else category
    if len(categories) != len(ids):
        raise UserError(
            f"category has {len(categories)} entries for {len(ids)} prompts; give one each, or one for all"
        )
    copies = limits.answers or 1
    if copies > 1 and decoder.sampling.greedy:
        raise UserError(
            f"num_return_sequences={copies} needs sampling: greedy answers are equal; set do_sample=True"
        )
    made = decoder.generate(
        [each for each in ids for _ in range(copies)],
        max_new_tokens=[most for most in _most(target, limits, ids) for _ in range(copies)],
        seed=seed,
        speculate=[each not in off for each in categories for _ in range(copies)],
    )
    if target.tokenizer is not None:
        for generation in made:
            text = TextStream(target.tokenizer, decoder.stop)
            text.push(generation.tokens)
            generation.text = text.take(last=True)
    if several or limits.answers is not None:
        return made
    return made[0]


def stream(
    model: Model,
    prompt: Prompt | None = None,
    drafter: Drafting = None,
    **options: Unpack[StreamOptions],
) -> Iterator[str]:
    """Yields the text of `generate` for one prompt in pieces. See `generate` for the arguments."""
    given: dict[str, Any] = {"model": model, "prompt": prompt, "drafter": drafter, **options}
    target, prompts, several = _opened(given)
    if several or (given.get("num_return_sequences") or 1) > 1:
        raise UserError("stream gives the text of one answer; use generate for several")
    if target.tokenizer is None:
        raise UserError("stream gives text, but the model has no tokenizer; pass tokenizer=")
    refuse_options(
        "stream",
        {name: given[name] for name in ("batch_size", "category") if name in given},
        StreamOptions.__annotations__,
    )
    decoder, limits = _decoder(target, drafter, "stream", given)
    ids = _all_ids(target, prompts, given)
    rounds = decoder.stream(
        ids,
        max_new_tokens=_most(target, limits, ids),
        seed=given.get("seed", 0),
    )
    return _pieces(TextStream(target.tokenizer, decoder.stop), rounds)


def load_drafter(name: str, model: Model, tokenizer: Tokenizer = None) -> Drafter | None:
    """A drafter bound to its target.

    name: a folder or Hub id, also with :OPTION=VALUE, `ngram`, `suffix:FILE`, FIRST+ngram, or
    `none`.

    Raises:
        UserError: nothing there, not one of our drafters, or trained for another target.
    """
    return load_for_target(
        check("drafter", name, Place), Target.from_pretrained(model, tokenizer=tokenizer)
    )


def _pieces(text: TextStream, rounds: Iterator[tuple[int, list[int]]]) -> Iterator[str]:
    for _, tokens in rounds:
        text.push(tokens)
        if piece := text.take():
            yield piece
    if piece := text.take(last=True):
        yield piece


def _opened(options: dict[str, Any]) -> tuple[Target, list[Any], bool]:
    """The target, the prompts, and whether there are several; takes the arguments for them out of
    `options`.
    """
    model, prompt, drafter = (options.pop(name) for name in ("model", "prompt", "drafter"))
    options.pop("others", None)
    if not (drafter is None or isinstance(drafter, str | Drafter)):
        raise UserError(
            f"drafter={shown(drafter)} must be a name, a drafter from load_drafter, or None"
        )
    ids = options.pop("input_ids", None)
    mask = options.pop("attention_mask", None)
    if ids is not None and prompt is not None:
        raise UserError("prompt and input_ids= are both given; give one")
    if ids is not None or mask is not None:
        prompt = {"input_ids": prompt if ids is None else ids, "attention_mask": mask}
    several = _is_several(prompt)
    target = Target.from_pretrained(model, tokenizer=options.get("tokenizer"))
    return target, _split(prompt) if several else [prompt], several


def _decoder(
    target: Target,
    drafter: Drafting,
    call: str,
    options: Mapping[str, Any],
) -> tuple[Decoder, CallLimits]:
    found, limits = read_options(target, call, options)
    tree = options.get("tree")
    if isinstance(drafter, str):
        if tree is None:
            tree = default_tree(drafter)
        drafter = load_for_target(check("drafter", drafter, Place), target)
    elif drafter is not None:
        prepare(drafter, target)
    if tree is None:
        found["spec"] = None
    else:
        found["spec"] = TreeSpec.parse(tree)
    found["max_rows"] = options.get("batch_size", 1)
    return Decoder(target, drafter, **found), limits


def _most(target: Target, limits: CallLimits, ids: Sequence[DecoderPrompt]) -> list[int]:
    """Most new tokens of each prompt."""
    return [limits.of(0 if limits.total is None else len(token_ids(target, each))) for each in ids]


def _is_several(prompt: Any) -> bool:
    """Whether this is a list of prompts or a padded batch. One prompt is text, ids in one
    dimension, or a list of messages.
    """
    if isinstance(prompt, Mapping):
        return _is_several(prompt.get("input_ids"))
    if isinstance(prompt, ImagePrompt):
        return False
    if hasattr(prompt, "shape"):  # of torch or numpy
        return len(prompt.shape) > 1
    if not isinstance(prompt, Sequence):
        raise UserError(
            f"prompt={shown(prompt)} must be text, token ids, messages, a tokenizer's output, or a list"
        )
    return (
        not isinstance(prompt, str)
        and len(prompt) > 0
        and not isinstance(prompt[0], (Number, Mapping))
    )


def _split(prompts: Any) -> list[Any]:
    """The prompts of a list or a padded batch."""
    if not isinstance(prompts, Mapping):
        return list(prompts)
    ids = list(prompts["input_ids"])
    mask = prompts.get("attention_mask")
    if mask is None:
        masks = [None] * len(ids)
    else:
        masks = list(mask)
    if len(masks) != len(ids):
        raise UserError(
            f"attention_mask has {len(masks)} rows for {len(ids)} input_ids; pass both from one call"
        )
    return [
        {"input_ids": row, "attention_mask": each} for row, each in zip(ids, masks, strict=True)
    ]


def _all_ids(
    target: Target,
    prompts: Sequence[Any],
    options: Mapping[str, Any],
) -> list[DecoderPrompt]:
    """Token ids of every prompt. Raises UserError: tools or chat_template_kwargs of another form."""
    found = {
        "tools": list(options.get("tools", ())),
        "chat_template_kwargs": options.get("chat_template_kwargs"),
    }
    check_json(
        found,
        "prompt",
        "give tools as JSON schemas, and chat_template_kwargs as a dict",
        PromptInputs,
    )
    return [_ids(target, each, ChatInputs.of(found)) for each in prompts]


def _ids(target: Target, prompt: Any, inputs: ChatInputs = NO_INPUTS) -> DecoderPrompt:
    """Token ids of one prompt, or the prompt with its images."""
    if isinstance(prompt, Mapping):
        ids = prompt.get("input_ids")
        mask = prompt.get("attention_mask")
        if mask is None or isinstance(ids, str):
            return _ids(target, ids, inputs)
        # [s] each
        ids = token_ids(target, () if ids is None else ids)
        kept = torch.as_tensor(mask).bool().flatten()
        if len(ids) != len(kept):
            raise UserError(
                f"attention_mask has {len(kept)} entries for {len(ids)} input_ids; pass both from one call"
            )
        return ids[kept.to(ids.device)]
    chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if not chat and inputs != NO_INPUTS:
        raise UserError(
            "tools and chat_template_kwargs need a chat as prompt: they are read by the chat template"
        )
    if not isinstance(prompt, str) and not chat:
        return prompt
    if chat:
        prompt = [_turn(turn) for turn in prompt]
    check("prompt", prompt, TextPrompt)
    if target.tokenizer is None:
        raise UserError(
            f"prompt={prompt!r} is text, but the model has no tokenizer; pass tokenizer= or token ids"
        )
    shown = chat and bool(sources_in(prompt))
    if chat and not shown and not has_template(target.tokenizer):
        raise UserError(
            f"prompt is a chat, but the tokenizer of {target.name!r} has no chat template; give text"
        )
    try:
        if shown:
            return chat_prompt(target, read_images(prompt, PictureStore(Path()).read), inputs)
        return prompt_ids(target.tokenizer, prompt, inputs)
    except TemplateError as error:
        raise UserError(
            f"prompt: the chat template of {target.name!r} refuses it ({first_line(error)})"
        ) from error


def _turn(turn: object) -> object:
    """A chat message with its parts in the stored form, or with text where no part is an image.

    Raises UserError: a part that is neither text nor an image.
    """
    if not isinstance(turn, Mapping):
        return turn
    content = turn.get("content")
    if not isinstance(content, list | tuple):
        return dict(turn)
    parts = read_parts(content)
    if parts is None:
        raise UserError(
            "prompt: a message has a part that is neither text nor an image; write {'type': 'text', 'text': ...} or "
            "{'type': 'image', 'image': PATH}"
        )
    if all(part["type"] == "text" for part in parts):
        return {**turn, "content": content_text(parts)}
    return {**turn, "content": parts}
