"""The Python API: `from drafttrain import generate, stream, load_drafter, evaluate`.

A thin layer over `drafttrain.inference` that turns names into models and prompts of any form into token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import TypedDict

from drafttrain.data.chat import NO_INPUTS, ChatInputs, has_template, prompt_ids
from drafttrain.data.row_formats import PromptInputs
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import decoding_settings, default_tree
from drafttrain.drafters.registry import load_drafter as load_for_target
from drafttrain.errors import UserError, first_line, shown
from drafttrain.files import Json, check_json, read_json
from drafttrain.flags import CommandParser
from drafttrain.inference import Decoder, SamplingParams, strip_padding
from drafttrain.inference.decode import DecoderOptions
from drafttrain.inference.sequence import TextStream
from drafttrain.target import Target
from drafttrain.values import AnyText, Place, check


class Turn(TypedDict):
    """A chat message."""

    role: AnyText
    content: AnyText


# Text, token ids, or chat messages [{"role": ..., "content": ...}, ...].
Prompt = str | Sequence[int] | Tensor | Sequence[Mapping[str, str]]
# Several prompts: a list of them, or a tokenizer's output (input_ids, attention_mask), which may also hold one.
Prompts = Prompt | Sequence[Prompt] | Mapping[str, Any]
TextPrompt = AnyText | list[Turn]
Model = str | PreTrainedModel | Target
Tokenizer = PreTrainedTokenizerBase | None


def generate(
    model: Model,
    prompt: Prompts,
    drafter: str | Drafter | None = None,
    *,
    tokenizer: Tokenizer = None,
    tree: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    batch_size: int = 8,
    category: str | Sequence[str] = "",
    tools: Sequence[Json] = (),
    chat_template_kwargs: Json | None = None,
) -> Any:
    """Continues a prompt or a list of prompts; the output is the model's own, a drafter only makes it faster.

    Args:
        model: a name, folder or Hub id; a loaded transformers model; or a `Target`. A name is loaded on every call, so
            create a Target for several calls: `Target.load(name).pack()`. A loaded model is frozen and gets our attention,
            which is sdpa outside of our decoder: its own `generate` works as before.
        prompt: text; token ids; chat messages, to which the chat template is applied; a tokenizer's output
            (input_ids with attention_mask, padded on either side); or a list of texts, ids or chats.
        drafter: a name as in `load_drafter`, a bound drafter, or None.
        tokenizer: of a loaded transformers model; without one, prompts are token ids and there is no text.
        tree: the tree of a round, such as chain:3, fanout:4x2x1 or dynamic:5,8,24. Defaults to the drafter's
            decoding.json, else chain:3.
        max_new_tokens: upper limit per prompt.
        temperature, top_k, top_p, min_p: as in transformers; temperature 0 decodes greedily.
        repetition_penalty: as in transformers; 1 turns it off, None is what the model's generation_config says.
        seed: prompt i samples with seed + i.
        stop: strings that end an answer; the text ends before them.
        batch_size: prompts at a time.
        category: the category of the request, or a list with one per prompt. Categories that the drafter's decoding.json
            lists as `off` are decoded plainly; needs the drafter's name.
        tools, chat_template_kwargs: what the chat template reads besides the messages: JSON schemas of functions, and its
            variables, such as {"enable_thinking": False}.

    Returns:
        A `Generation` (text, tokens, stats), or a list of them for a list of prompts or a padded batch.

    Raises:
        UserError: bad values, an empty or too long prompt, or text without a tokenizer.
    """
    sampling = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty)
    decoder = _decoder(
        model, drafter, tokenizer, tree, DecoderOptions(sampling=sampling, stop=stop, max_rows=batch_size)
    )
    several = _is_several(prompt)
    inputs = _inputs(tools, chat_template_kwargs)
    ids = [_ids(decoder.target, each, inputs) for each in (_split(prompt) if several else [prompt])]
    off = decoding_settings(drafter).get("off", []) if isinstance(drafter, str) else []
    category = check("category", category, AnyText | tuple[AnyText, ...])
    categories = [category] * len(ids) if isinstance(category, str) else category
    if len(categories) != len(ids):
        raise UserError(f"category has {len(categories)} entries for {len(ids)} prompts; give one each, or one for all")
    speculate = [each not in off for each in categories]
    made = decoder.generate(ids, max_new_tokens=max_new_tokens, seed=seed, speculate=speculate)
    if decoder.target.tokenizer is not None:
        for generation in made:
            text = TextStream(decoder.target.tokenizer, decoder.stop)
            text.push(generation.tokens)
            generation.text = text.take(last=True)
    return made if several else made[0]


def stream(
    model: Model,
    prompt: Prompt,
    drafter: str | Drafter | None = None,
    *,
    tokenizer: Tokenizer = None,
    tree: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    tools: Sequence[Json] = (),
    chat_template_kwargs: Json | None = None,
) -> Iterator[str]:
    """Yields the text of `generate` for one prompt in pieces. See `generate` for the arguments."""
    sampling = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty)
    decoder = _decoder(model, drafter, tokenizer, tree, DecoderOptions(sampling=sampling, stop=stop))
    if decoder.target.tokenizer is None:
        raise UserError("stream gives text, but the model has no tokenizer; pass tokenizer=")
    ids = _ids(decoder.target, prompt, _inputs(tools, chat_template_kwargs))
    rounds = decoder.stream([ids], max_new_tokens=max_new_tokens, seed=seed)
    return _pieces(TextStream(decoder.target.tokenizer, decoder.stop), rounds)


def load_drafter(name: str, model: Model, tokenizer: Tokenizer = None) -> Drafter | None:
    """A drafter bound to its target.

    name: a folder or Hub id, also with :OPTION=VALUE, `ngram`, `ngram_store:FILE`, FIRST+ngram, or `none`.

    Raises:
        UserError: nothing there, not one of our drafters, or trained for another target.
    """
    return load_for_target(check("drafter", name, Place), _target(model, tokenizer))


def evaluate(target: str, drafter: str, output: str | Path, **options: Any) -> dict[str, Any]:
    """`drafttrain eval` from Python: measures a drafter against plain decoding and writes the results file.

    Args:
        target, drafter: names, as in `generate`. output: the results file; an interrupted run continues from it.
        options: the command's, with underscores: suite="mt_bench.jsonl", limit=10, temperature=1.0, dtype="bfloat16", ...

    Returns:
        The file's content: overall figures, figures by category, and a record for each prompt.

    Raises:
        UserError: an unknown option, a value out of range, or anything that cannot be loaded.
    """
    from drafttrain.tuning import eval_command, eval_command_flags

    parser = CommandParser(prog="drafttrain eval", add_help=False, allow_abbrev=False)
    eval_command_flags.add_arguments(parser)
    words = []
    for name, value in {"target": target, "drafter": drafter, "output": output, **options}.items():
        flag = f"--{name.replace('_', '-')}"
        words += (
            [flag]
            if value is True
            else []
            if value is None or value is False
            else [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]
        )
    try:
        args = parser.parse_args(words)
    except UserError as error:
        raise UserError(f"evaluate: {error}") from error
    eval_command.run(args)
    return {**read_json(Path(output).expanduser(), "output", "measure again")}


def _pieces(text: TextStream, rounds: Iterator[tuple[int, list[int]]]) -> Iterator[str]:
    for _, tokens in rounds:
        text.push(tokens)
        if piece := text.take():
            yield piece
    if piece := text.take(last=True):
        yield piece


def _decoder(
    model: Model, drafter: str | Drafter | None, tokenizer: Tokenizer, tree: str | None, options: DecoderOptions
) -> Decoder:
    target = _target(model, tokenizer)
    if isinstance(drafter, str):
        tree = default_tree(drafter) if tree is None else tree
        drafter = load_for_target(check("drafter", drafter, Place), target)
    elif not (drafter is None or isinstance(drafter, Drafter)):
        raise UserError(f"drafter={shown(drafter)} must be a name, a drafter from load_drafter, or None")
    options["spec"] = None if tree is None else TreeSpec.parse(tree)
    return Decoder(target, drafter, **options)


def _target(model: Model, tokenizer: Tokenizer) -> Target:
    if isinstance(model, Target):
        return model
    if isinstance(model, str):
        return Target.load(check("model", model, Place)).pack()
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"model={shown(model)} must be a name, a loaded transformers model or a Target")
    return Target.wrap(model, tokenizer, model.name_or_path or type(model).__name__)


def _is_several(prompt: Any) -> bool:
    """Whether this is a list of prompts or a padded batch. One prompt is text, ids in one dimension, or a list of messages."""
    if isinstance(prompt, Mapping):
        return _is_several(prompt.get("input_ids"))
    if hasattr(prompt, "shape"):  # of torch or numpy
        return len(prompt.shape) > 1
    if not isinstance(prompt, Sequence):
        raise UserError(
            f"prompt={shown(prompt)} must be text, token ids, messages, a tokenizer's output, or a list of these"
        )
    return not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], (Number, Mapping))


def _split(prompts: Any) -> Sequence[Any]:
    """The prompts of a list or a padded batch."""
    if not isinstance(prompts, Mapping):
        return list(prompts)
    ids, mask = prompts["input_ids"], prompts.get("attention_mask")
    return strip_padding(ids, mask) if isinstance(ids, Tensor) and mask is not None else list(ids)


def _inputs(tools: Sequence[Json], kwargs: Json | None) -> ChatInputs:
    """What the chat template reads besides the messages. Raises UserError: another form."""
    found = {"tools": list(tools), "chat_template_kwargs": kwargs}
    check_json(found, "prompt", "give tools as JSON schemas, and chat_template_kwargs as a dict", PromptInputs)
    return ChatInputs.of(found)


def _ids(target: Target, prompt: Any, inputs: ChatInputs = NO_INPUTS) -> Tensor | Sequence[int]:
    """Token ids of one prompt."""
    if isinstance(prompt, Mapping):
        return _ids(target, prompt.get("input_ids"), inputs)
    chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if not chat and inputs != NO_INPUTS:
        raise UserError("tools and chat_template_kwargs need a chat as prompt: they are read by the chat template")
    if not isinstance(prompt, str) and not chat:
        return prompt
    check(
        "prompt", [dict(turn) if isinstance(turn, Mapping) else turn for turn in prompt] if chat else prompt, TextPrompt
    )
    if target.tokenizer is None:
        raise UserError(f"prompt={prompt!r} is text, but the model has no tokenizer; pass tokenizer= or token ids")
    if chat and not has_template(target.tokenizer):
        raise UserError(
            f"prompt is a chat, but the tokenizer of {target.name!r} has no chat template; give text instead"
        )
    try:
        return prompt_ids(target.tokenizer, prompt, inputs)
    except TemplateError as error:
        raise UserError(f"prompt: the chat template of {target.name!r} refuses it ({first_line(error)})") from error
