"""The keyword arguments of `drafttrain.generate` and `stream`: ours, and transformers' spellings of
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor
from transformers import GenerationConfig

from drafttrain.errors import UserError, shown
from drafttrain.files import Json
from drafttrain.inference.decode import DecoderOptions
from drafttrain.ops.sampling import SamplingParams
from drafttrain.target import Target
from drafttrain.target.generation import SAMPLING, UNSUPPORTED, AppliedKeys, LogitsRules
from drafttrain.target.target import Tokenizer
from drafttrain.values import Count, Size, check, refuse_options

Rows = Tensor | Sequence[int] | Sequence[Sequence[int]]
Options = Mapping[str, object]
MOST_NEW_TOKENS = 256  # of an answer, unless the call limits it
APPLIED = tuple(AppliedKeys.__annotations__)  # rules for the logits, by transformers' names
_TOP_K = 50  # of transformers' generate, where neither call nor config says
_NO_EFFECT = (
    "pad_token_id",
    "token_type_ids",
    "use_cache",
)  # answers are not padded, the cache is always used
_NAMED_OTHERWISE = {
    "assistant_model": "drafter",
    "prompt_lookup_num_tokens": "drafter",
    "streamer": "drafttrain.stream",
    "inputs": "prompt",
    "messages": "prompt",
    "max_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "tokenizers": "tokenizer",
}


class StreamOptions(AppliedKeys, total=False):
    """Keyword arguments of `stream`, the rules for the logits among them; see `generate`."""

    tokenizer: Tokenizer
    tree: str | None
    max_new_tokens: int | None
    max_length: int | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int
    stop: str | Sequence[str]
    stop_strings: str | Sequence[str] | None
    eos_token_id: int | Sequence[int] | None
    generation_config: GenerationConfig | Mapping[str, object] | None
    input_ids: Rows | None
    attention_mask: Rows | None
    tools: Sequence[Json]
    chat_template_kwargs: Json | None


class GenerateOptions(StreamOptions, total=False):
    """Keyword arguments of `generate`, but for `num_return_sequences`."""

    batch_size: int
    category: str | Sequence[str]


class CallLimits(NamedTuple):
    """How long answers may be, and how many there are. total: tokens of prompt and answer, None for
    no limit.
    """

    new_tokens: int
    total: int | None
    answers: int | None

    def of(self, prompt_tokens: int) -> int:
        """Most new tokens behind a prompt. Raises UserError: max_length leaves none."""
        if self.total is not None and self.total <= prompt_tokens:
            raise UserError(
                f"max_length={self.total} includes the prompt's {prompt_tokens} tokens; set max_new_tokens"
            )
        if self.total is None:
            return self.new_tokens
        return self.total - prompt_tokens


def read_options(target: Target, call: str, given: Options) -> tuple[DecoderOptions, CallLimits]:
    """A decoder's options and the limits of a call.

    Args:
        call: its name, for errors. given: its keyword arguments; None for what the caller leaves
            out.

    Raises:
        UserError: an unknown option, options that contradict each other, or values out of range.
    """
    given = {name: value for name, value in given.items() if value is not None}
    rules = {}
    for name in APPLIED:
        if name in given and name != "repetition_penalty":  # which `SamplingParams` takes
            rules[name] = given.pop(name)
    asked = _config_of(given.get("generation_config", {}))
    known = (*get_type_hints(GenerateOptions), "num_return_sequences")
    others = {name: value for name, value in given.items() if name not in (*known, *_NO_EFFECT)}
    for name, value in {**asked, **others}.items():
        if name in _NAMED_OTHERWISE:
            raise UserError(f"{call}: {name}= is named {_NAMED_OTHERWISE[name]} here")
        if name in UNSUPPORTED and name not in known and value != UNSUPPORTED[name]:
            raise UserError(
                f"{call}: {name}={shown(value)} has no counterpart in speculative decoding; leave it out"
            )
    refuse_options(
        call,
        {name: others[name] for name in others.keys() - UNSUPPORTED.keys()},
        (*known, *APPLIED),
    )
    own = target.generation.config
    settings = {} if own is None else own.to_dict()
    settings = {**settings, **asked, **rules}  # the call's rules overrule all
    options = DecoderOptions(sampling=_sampling(given, asked, settings))
    if asked or rules:
        options["rules"] = _rules(settings, target, call)
    stop = given.get("stop", ())
    strings = given.get("stop_strings", asked.get("stop_strings"))
    if stop != () and "stop_strings" in given:
        raise UserError("stop= and stop_strings= mean the same; give one")
    if stop == () and strings is not None:
        stop = strings
    options["stop"] = stop  # type: ignore[typeddict-item]  # Decoder checks it
    ends = given.get("eos_token_id", asked.get("eos_token_id"))
    if ends is not None:
        if isinstance(ends, Tensor):
            ends = ends.tolist()
        ids = check("eos_token_id", ends, Size | tuple[Size, ...])
        if not isinstance(ids, tuple):
            ids = (ids,)
        options["eos_ids"] = ids
        if beyond := [one for one in ids if one >= target.vocab_size]:
            raise UserError(
                f"eos_token_id={beyond[0]} is outside the {target.vocab_size} tokens of {target.name!r}"
            )
    return options, _limits(given, asked)


def _config_of(config: object) -> dict[str, Any]:
    """What the caller's generation_config sets."""
    if isinstance(config, Mapping):
        refuse_options("generation_config", config, GenerationConfig().to_dict())
    elif isinstance(config, GenerationConfig):
        config = config.to_dict()
    else:
        raise UserError(
            f"generation_config={shown(config)} must be a GenerationConfig, or a dict of its keys"
        )
    return {name: value for name, value in config.items() if value is not None}


def _rules(settings: Options, target: Target, call: str) -> LogitsRules:
    try:
        return LogitsRules.of(SimpleNamespace(**settings), target.vocab_size, target.name)
    except UserError as error:  # which names the target's file
        problem = str(error).partition("generation_config has ")[2].partition("; correct")[0]
        raise UserError(f"{call}: {problem}") from error


def _sampling(given: Options, asked: Options, settings: Options) -> SamplingParams:
    """The sampling of a call. asked: its own generation_config; settings: that on top of the
    target's.
    """
    sampled = check("do_sample", given.get("do_sample", asked.get("do_sample")), bool | None)
    values = {name: given[name] for name in (*SAMPLING, "repetition_penalty") if name in given}
    if sampled:
        defaults = {"temperature": 1.0, "top_k": _TOP_K}
        found = {name: settings[name] for name in SAMPLING if settings.get(name) is not None}
        values = {**defaults, **found, **values}
        if not values["temperature"]:
            raise UserError(
                "do_sample=True contradicts temperature=0; set a temperature above 0, or drop do_sample"
            )
    elif sampled is False and values.get("temperature"):
        raise UserError(
            f"do_sample=False is greedy, but temperature={values['temperature']!r} samples; drop one"
        )
    return SamplingParams(**values)  # type: ignore[arg-type]  # which checks them


def _limits(given: Options, asked: Options) -> CallLimits:
    if {"max_new_tokens", "max_length"} <= given.keys():
        raise UserError(
            "max_length= counts prompt and answer, max_new_tokens= the answer alone; give one"
        )
    if {"max_new_tokens", "max_length"} & given.keys():
        source = given
    else:
        source = asked
    beside = source.get("max_new_tokens") is not None
    if beside:
        total = None
    else:
        total = check("max_length", source.get("max_length"), Count | None)
    copies = given.get("num_return_sequences", asked.get("num_return_sequences"))
    answers = check("num_return_sequences", copies, Count | None)
    return CallLimits(
        check("max_new_tokens", source.get("max_new_tokens", MOST_NEW_TOKENS), Count),
        total,
        answers,
    )
