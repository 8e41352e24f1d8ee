"""The target's generation_config: its keys that decoding applies as logits processors, and those
that it does not.

transformers builds the processors (`GenerationMixin._get_logits_processor`), so a key means here
what it means in its `generate` for a single prompt without padding. Temperature, top-k, top-p and
min-p are the caller's (`SamplingParams`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor
from transformers.utils import GENERATION_CONFIG_NAME, cached_file
from typing_extensions import TypedDict

from drafttrain.errors import UserError, first_line
from drafttrain.files import Json, read_json, violation
from drafttrain.ops.sampling import SamplingParams

logger = logging.getLogger(__name__)
_FIX = f"correct the target's {GENERATION_CONFIG_NAME}, or remove the key"


def _bias(pair: list) -> list:
    if len(pair) == 2:
        ids, bias = pair
    else:
        ids = None
        bias = None
    if (
        not isinstance(ids, list)
        or not ids
        or any(type(token) is not int or token < 0 for token in ids)
    ):
        raise ValueError("must be [[token ids], bias]")
    if not isinstance(bias, (int, float)) or not bias < float("inf"):
        raise ValueError("the bias must be a number, or -inf")
    return pair


def _decay(pair: list) -> list:
    if len(pair) != 2 or type(pair[0]) is not int or pair[0] < 0 or not 0 <= pair[1] <= 10:
        raise ValueError("must be [tokens before it begins, factor from 0 to 10]")
    return pair


Count = Annotated[int, Field(ge=0)]
Tokens = list[Count]
Penalty = Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)]


class AppliedKeys(TypedDict, total=False):
    """The keys of a generation_config that decoding applies; all others are kept as they are."""

    repetition_penalty: Penalty | None
    encoder_repetition_penalty: Penalty | None
    no_repeat_ngram_size: Count | None
    encoder_no_repeat_ngram_size: Count | None
    bad_words_ids: list[Annotated[Tokens, Field(min_length=1)]] | None
    sequence_bias: list[Annotated[list, AfterValidator(_bias)]] | None
    min_length: Count | None
    min_new_tokens: Count | None
    forced_bos_token_id: Count | None
    forced_eos_token_id: Count | Tokens | None
    suppress_tokens: Tokens | None
    begin_suppress_tokens: Tokens | None
    exponential_decay_length_penalty: Annotated[list[int | float], AfterValidator(_decay)] | None
    remove_invalid_values: bool | None


class _File(AppliedKeys, total=False):
    eos_token_id: int | list[int] | None


_OFF = {"repetition_penalty": 1, "encoder_repetition_penalty": 1} | dict.fromkeys(
    (
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "min_length",
        "min_new_tokens",
        "remove_invalid_values",
    ),
    0,
)
_TOKENS = (
    "bad_words_ids",
    "sequence_bias",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
)
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_LIMITS = ("max_length", "max_new_tokens", "max_time", "stop_strings")
# Keys without a counterpart here, with the value that means off (None always does).
UNSUPPORTED: Json = dict.fromkeys(
    ("top_h", "watermarking_config", "penalty_alpha", "constraints", "force_words_ids")
)
UNSUPPORTED |= dict.fromkeys(
    ("num_beams", "num_return_sequences", "num_beam_groups", "typical_p", "guidance_scale"), 1
)
UNSUPPORTED |= dict.fromkeys(
    ("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "token_healing", "dola_layers"), 0
)


@dataclass(frozen=True)
class LogitsRules:
    """How a target's generation_config changes logits before a token is chosen; none by default.

    Attributes:
        settings: keys of `AppliedKeys` that are not off, with checked values.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: object, vocab_size: int, target: str) -> LogitsRules:
        """The rules of a loaded model. Raises UserError: a value of the wrong type, or a token id
        outside the vocabulary.
        """
        values = {key: getattr(config, key, None) for key in AppliedKeys.__annotations__}
        if isinstance(
            values["sequence_bias"], dict
        ):  # transformers' form in Python: {(1, 2): -5.0}
            values["sequence_bias"] = [
                [list(ids), bias] for ids, bias in values["sequence_bias"].items()
            ]
        if isinstance(values["exponential_decay_length_penalty"], tuple):
            values["exponential_decay_length_penalty"] = list(
                values["exponential_decay_length_penalty"]
            )
        try:
            TypeAdapter(AppliedKeys).validate_python(values, strict=True)
        except ValidationError as error:
            raise UserError(
                f"target={target!r}: generation_config has {violation(error)}; {_FIX}"
            ) from error
        if (
            values["min_new_tokens"] is not None
        ):  # takes precedence in transformers, also if it is 0
            values["min_length"] = None
        settings = {
            key: value for key, value in values.items() if value not in (None, [], _OFF.get(key))
        }
        for key in (*_TOKENS, "begin_suppress_tokens"):
            beyond = [token for token in _ids(key, settings.get(key)) if token >= vocab_size]
            if beyond:
                rule = f"outside the vocabulary of {vocab_size} tokens"
                raise UserError(
                    f"target={target!r}: generation_config has {key} with token id {beyond[0]}, {rule}; {_FIX}"
                )
        for key in {"repetition_penalty", "encoder_repetition_penalty"} & settings.keys():
            settings[key] = float(settings[key])  # transformers refuses a penalty of 2
        if "sequence_bias" in settings:
            settings["sequence_bias"] = [
                [ids, float(bias)] for ids, bias in settings["sequence_bias"]
            ]
        return cls(settings)

    def __bool__(self) -> bool:
        return bool(self.settings)

    @property
    def repetition_penalty(self) -> float:
        return self.settings.get("repetition_penalty", 1.0)

    @property
    def reads_text(self) -> bool:
        """Whether the processed logits depend on the tokens before them, or on their number."""
        alone = {"suppress_tokens", "remove_invalid_values", "bad_words_ids", "sequence_bias"}
        longest = [len(word) for word in self.settings.get("bad_words_ids", ())]
        longest += [len(ids) for ids, _ in self.settings.get("sequence_bias", ())]
        return not self.settings.keys() <= alone or max(longest, default=1) > 1

    def under(self, sampling: SamplingParams) -> LogitsRules:
        """The rules for a call: its own repetition penalty, where it gives one, replaces the
        target's.
        """
        if sampling.repetition_penalty is None:
            return self
        others = {key: value for key, value in self.settings.items() if key != "repetition_penalty"}
        own = float(sampling.repetition_penalty)
        return LogitsRules(others | ({} if own == 1 else {"repetition_penalty": own}))

    def recorded(self, sampling: SamplingParams) -> Json:
        """What results and data sets record of a call: sampling parameters, penalty, and the other
        keys if there are any.
        """
        others = {key: value for key, value in self.settings.items() if key != "repetition_penalty"}
        penalty = {"repetition_penalty": self.under(sampling).repetition_penalty}
        return asdict(sampling) | penalty | ({"generation_config": others} if others else {})

    def processors(
        self,
        model: Any,
        prompt: Tensor,
        limit: int,
        eos_ids: Collection[int],
    ) -> list[LogitsProcessor]:
        """transformers' processors for one sequence.

        Args:
            model: the target's. prompt: [L] int64, all tokens before the answer. limit: most tokens
                of the answer.
            eos_ids: tokens that end it; a rule that bans or raises the end means them.

        Raises:
            UserError: rules that contradict each other.
        """
        settings = {
            key: value
            for key, value in self.settings.items()
            if key != "exponential_decay_length_penalty" or eos_ids
        }
        try:
            config = GenerationConfig(
                **copy.deepcopy(settings),
                do_sample=False,
                max_length=len(prompt) + limit,
            )
            if eos_ids:
                config._eos_token_tensor = torch.tensor(sorted(eos_ids), device=prompt.device)
            else:
                config._eos_token_tensor = None
            return model._get_logits_processor(
                config,
                input_ids_seq_length=len(prompt),
                encoder_input_ids=prompt[None],
                device=prompt.device,
            )
        except (ValueError, TypeError) as error:
            raise UserError(
                f"generation_config cannot be applied ({first_line(error)}); {_FIX}"
            ) from error


class TargetGeneration:
    """What a target's generation_config asks of decoding.

    Args:
        model: the target's. vocab_size: rows of its head. name: the target's, for messages.

    Raises:
        UserError: wrong values.
    """

    def __init__(self, model: Any, vocab_size: int, name: str):
        self.model = model
        self.vocab_size = vocab_size
        self.name = name
        self._named = False
        _ = self.rules  # checks the values

    @property
    def config(self) -> GenerationConfig | None:
        return getattr(self.model, "generation_config", None)

    @property
    def rules(self) -> LogitsRules:
        """The rules of the config as it is now."""
        return LogitsRules.of(self.config, self.vocab_size, self.name)

    def rules_for(self, sampling: SamplingParams, rules: LogitsRules | None = None) -> LogitsRules:
        """How a call processes logits: its own rules, else the target's; a repetition penalty in
        `sampling` replaces theirs.

        The first call that uses the target's logs a line on what its generation_config sets and
        decoding does not apply.
        """
        if rules is None and not self._named:
            self._named = True
            if line := ignored_line(self.config, sampling, self.name):
                logger.warning(line)
        return (self.rules if rules is None else rules).under(sampling)


def end_tokens(sources: Iterable[Any], vocab_size: int) -> list[int]:
    """The eos_token_id of all sources that can occur; some models write -1 for none. Raises
    UserError for other values.
    """
    found: list[object] = []
    for source in sources:
        eos = getattr(source, "eos_token_id", None)
        if isinstance(eos, (list, tuple)):
            found += eos
        elif eos is None:
            found += []
        else:
            found += [eos]
    ids = {token for token in found if isinstance(token, int) and not isinstance(token, bool)}
    if wrong := [token for token in found if not isinstance(token, int) or isinstance(token, bool)]:
        raise UserError(
            f"eos_token_id={wrong[0]!r:.80} of the target must be a token id; correct its config.json"
        )
    return sorted(token for token in ids if 0 <= token < vocab_size)


def _ids(key: str, value: Any) -> Iterator[int]:
    """All token ids of a checked value."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _ids("", each[0] if key == "sequence_bias" else each)


def read_generation_config(path: str, target: str) -> GenerationConfig | None:
    """The checked generation_config.json of a folder or Hub id; None if it has none.

    transformers reads it while it loads a model, but replaces a damaged one by defaults without a
    word.

    Raises:
        UserError: not JSON, or a value that transformers or decoding refuses.
    """
    quiet = {
        f"_raise_exceptions_for_{cause}": False
        for cause in ("missing_entries", "gated_repo", "connection_errors")
    }
    file = cached_file(path, GENERATION_CONFIG_NAME, **quiet)  # type: ignore[arg-type]
    if file is None:
        return None
    content: Json = {**read_json(Path(file), "target", _FIX, _File)}
    try:
        return GenerationConfig.from_dict(content)
    except Exception as error:  # wrong values raise errors of many classes there
        raise UserError(
            f"target={target!r}: {GENERATION_CONFIG_NAME} is refused ({first_line(error)}); {_FIX}"
        ) from error


def ignored_line(config: GenerationConfig | None, sampling: SamplingParams, target: str) -> str:
    """One line on the keys that a generation_config sets and decoding does not apply; empty if
    there are none.
    """
    if config is None:
        return ""
    values = {key: value for key, value in config.to_dict().items() if value is not None}
    sampled: Json = {}
    if values.get("do_sample") or not sampling.greedy:
        sampled = {
            key: values[key]
            for key in SAMPLING
            if values.get(key) not in (None, getattr(sampling, key))
        }
    if values.get("do_sample") and sampling.greedy:
        sampled |= {"temperature": values.get("temperature", 1.0), "do_sample": True}
    limits = {key: values[key] for key in _LIMITS if key in values}
    others = {
        key: values[key] for key, off in UNSUPPORTED.items() if values.get(key) not in (None, off)
    }
    known = GenerationConfig().to_dict()
    others |= {key: value for key, value in values.items() if key not in known}
    fixes = {
        f"to sample as it says, set {', '.join(key for key in sampled if key != 'do_sample')}": sampled,
        "limit answers by max_new_tokens and stop": limits,
        "the others have no counterpart"
        if sampled or limits
        else "they have no counterpart": others,
    }
    shown = [f"{key}={value!r}"[:60] for key, value in (sampled | limits | others).items()]
    more = ""
    if len(shown) > 8:
        more = f" and {len(shown) - 8} more"
    fix = "; ".join(text for text, keys in fixes.items() if keys)
    line = f"target {target!r}: decoding does not apply {', '.join(shown[:8])}{more} of its generation_config; {fix}"
    if shown:
        return " ".join(line.split())
    return ""
