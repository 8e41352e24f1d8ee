"""The target's generation_config: the keys that decoding applies as logits processors, and others.

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
    """Checks an entry of sequence_bias."""
    ids, bias = pair if len(pair) == 2 else (None, None)
    if not isinstance(ids, list) or not ids:
        raise ValueError("must be [[token ids], bias]")
    for token in ids:
        if type(token) is not int or token < 0:
            raise ValueError("must be [[token ids], bias]")
    if not isinstance(bias, (int, float)) or not bias < float("inf"):
        raise ValueError("the bias must be a number, or -inf")
    return pair


def _decay(pair: list) -> list:
    """Checks exponential_decay_length_penalty."""
    start, factor = pair if len(pair) == 2 else (None, None)
    if type(start) is not int or factor is None or start < 0 or not 0 <= factor <= 10:
        raise ValueError("must be [tokens before it begins, factor from 0 to 10]")
    return pair


Count = Annotated[int, Field(ge=0)]
Tokens = list[Count]
Penalty = Annotated[
    float,
    Field(
        ge=0.01,
        le=100,
        allow_inf_nan=False,
    ),
]


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


_APPLIED = TypeAdapter(AppliedKeys)
# Values that turn a key off; None always does.
_OFF = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "remove_invalid_values": 0,
}
# Keys whose values are token ids.
_TOKENS = (
    "bad_words_ids",
    "sequence_bias",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
)
# Keys that the caller's `SamplingParams` replace, and those that the caller's limits replace.
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_LIMITS = ("max_length", "max_new_tokens", "max_time", "stop_strings")
# Keys without a counterpart here, with the value that means off (None always does).
UNSUPPORTED: Json = {
    "top_h": None,
    "watermarking_config": None,
    "penalty_alpha": None,
    "constraints": None,
    "force_words_ids": None,
    "num_beams": 1,
    "num_return_sequences": 1,
    "num_beam_groups": 1,
    "typical_p": 1,
    "guidance_scale": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "diversity_penalty": 0,
    "token_healing": 0,
    "dola_layers": 0,
}


@dataclass(frozen=True)
class LogitsRules:
    """How a target's generation_config changes logits before a token is chosen; none by default.

    Attributes:
        settings: keys of `AppliedKeys` that are not off, with checked values.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: object,
        vocab_size: int,
        target: str,
    ) -> LogitsRules:
        """The rules of a loaded model's generation_config.

        Raises:
            UserError: a value of the wrong type, or a token id outside the vocabulary.
        """
        values = {key: getattr(config, key, None) for key in AppliedKeys.__annotations__}
        biases = values["sequence_bias"]
        if isinstance(biases, dict):  # transformers' form in Python: {(1, 2): -5.0}
            values["sequence_bias"] = [[list(ids), bias] for ids, bias in biases.items()]
        decay = values["exponential_decay_length_penalty"]
        if isinstance(decay, tuple):
            values["exponential_decay_length_penalty"] = list(decay)
        try:
            _APPLIED.validate_python(values, strict=True)
        except ValidationError as error:
            raise UserError(
                f"target={target!r}: generation_config has {violation(error)}; {_FIX}"
            ) from error
        # In transformers min_new_tokens takes precedence, also if it is 0.
        if values["min_new_tokens"] is not None:
            values["min_length"] = None
        settings: Json = {}
        for key, value in values.items():
            if value not in (None, [], _OFF.get(key)):
                settings[key] = value
        # A token that the head lacks would fail deep inside transformers' processors.
        for key in _TOKENS:
            for token in _ids(key, settings.get(key)):
                if token >= vocab_size:
                    rule = f"outside the vocabulary of {vocab_size} tokens"
                    raise UserError(
                        f"target={target!r}: generation_config has {key} with token id {token}, {rule}; {_FIX}"
                    )
        # transformers refuses integers here.
        for key in ("repetition_penalty", "encoder_repetition_penalty"):
            if key in settings:
                settings[key] = float(settings[key])
        if "sequence_bias" in settings:
            biases = settings["sequence_bias"]
            settings["sequence_bias"] = [[ids, float(bias)] for ids, bias in biases]
        return cls(settings)

    def __bool__(self) -> bool:
        return bool(self.settings)

    @property
    def repetition_penalty(self) -> float:
        return self.settings.get("repetition_penalty", 1.0)

    @property
    def reads_text(self) -> bool:
        """Whether the processed logits depend on the tokens before them, or on their number."""
        # These change one token's logit whatever stands before it, unless their words are longer.
        alone = {"suppress_tokens", "remove_invalid_values", "bad_words_ids", "sequence_bias"}
        longest = [len(word) for word in self.settings.get("bad_words_ids", ())]
        longest += [len(ids) for ids, _ in self.settings.get("sequence_bias", ())]
        return not self.settings.keys() <= alone or max(longest, default=1) > 1

    def under(self, sampling: SamplingParams) -> LogitsRules:
        """The rules for a call: its own repetition penalty, if it has one, replaces the target's."""
        if sampling.repetition_penalty is None:
            return self
        settings = self._without_penalty()
        own = float(sampling.repetition_penalty)
        if own != 1:
            settings["repetition_penalty"] = own
        return LogitsRules(settings)

    def recorded(self, sampling: SamplingParams) -> Json:
        """The record of a call in results and data sets.

        It has sampling parameters, penalty, and the other keys if there are any.
        """
        record = asdict(sampling)
        record["repetition_penalty"] = self.under(sampling).repetition_penalty
        others = self._without_penalty()
        if others:
            record["generation_config"] = others
        return record

    def _without_penalty(self) -> Json:
        """A copy of the settings without the repetition penalty."""
        settings = dict(self.settings)
        settings.pop("repetition_penalty", None)
        return settings

    def processors(
        self,
        model: Any,
        prompt: Tensor,
        limit: int,
        eos_ids: Collection[int],
    ) -> list[LogitsProcessor]:
        """transformers' processors for one sequence.

        Args:
            model: the target's.
            prompt: [L] int64, all tokens before the answer.
            limit: most tokens of the answer.
            eos_ids: tokens that end it; rules that ban or raise the end apply to them.

        Raises:
            UserError: rules that contradict each other.
        """
        settings = copy.deepcopy(dict(self.settings))
        ends = None
        if eos_ids:
            ends = torch.tensor(sorted(eos_ids), device=prompt.device)
        else:  # the penalty raises the end, which there is none of
            settings.pop("exponential_decay_length_penalty", None)
        try:
            # transformers counts a sequence's length, prompt included.
            longest = len(prompt) + limit
            config = GenerationConfig(
                **settings,
                do_sample=False,
                max_length=longest,
            )
            # What `generate` would set itself; processors that ban the end read it.
            config._eos_token_tensor = ends
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
    """The rules that a target's generation_config sets for decoding.

    Args:
        model: the target's.
        vocab_size: rows of its head.
        name: the target's, for messages.

    Raises:
        UserError: wrong values.
    """

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        name: str,
    ):
        self.model = model
        self.vocab_size = vocab_size
        self.name = name
        self._named = False
        # The line on keys that are not applied is logged once per target.
        _ = self.rules  # checks the values

    @property
    def config(self) -> GenerationConfig | None:
        return getattr(self.model, "generation_config", None)

    @property
    def rules(self) -> LogitsRules:
        """The rules of the config as it is now."""
        return LogitsRules.of(self.config, self.vocab_size, self.name)

    def rules_for(
        self,
        sampling: SamplingParams,
        rules: LogitsRules | None = None,
    ) -> LogitsRules:
        """The rules of a call: its own, else the target's, under the call's repetition penalty.

        The first call with the target's rules logs a line on the keys of its generation_config that
        decoding does not apply.
        """
        if rules is None:
            if not self._named:
                self._named = True
                line = ignored_line(self.config, sampling, self.name)
                if line:
                    logger.warning(line)
            rules = self.rules
        return rules.under(sampling)


def end_tokens(sources: Iterable[Any], vocab_size: int) -> list[int]:
    """The eos_token_id of all sources that can occur; some models write -1 for none.

    Raises:
        UserError: a value that is not a token id.
    """
    ids = set()
    for source in sources:
        eos = getattr(source, "eos_token_id", None)
        if eos is None:
            continue
        for token in eos if isinstance(eos, (list, tuple)) else [eos]:
            if not isinstance(token, int) or isinstance(token, bool):
                raise UserError(
                    f"eos_token_id={token!r:.80} of the target must be a token id; correct its config.json"
                )
            if 0 <= token < vocab_size:
                ids.add(token)
    return sorted(ids)


def _ids(key: str, value: Any) -> Iterator[int]:
    """All token ids of a checked value."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _ids("", each[0] if key == "sequence_bias" else each)


def read_generation_config(path: str, target: str) -> GenerationConfig | None:
    """The checked generation_config.json of a folder or Hub id; None if it has none.

    transformers reads it while it loads a model, but silently replaces a damaged one by defaults.

    Raises:
        UserError: not JSON, or a value that transformers or decoding refuses.
    """
    quiet = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    file = cached_file(path, GENERATION_CONFIG_NAME, **quiet)  # type: ignore[arg-type]
    if file is None:
        return None
    content: Json = dict(read_json(Path(file), "target", _FIX, _File))
    try:
        return GenerationConfig.from_dict(content)
    except Exception as error:  # wrong values raise errors of many classes there
        raise UserError(
            f"target={target!r}: {GENERATION_CONFIG_NAME} is refused ({first_line(error)}); {_FIX}"
        ) from error


def ignored_line(
    config: GenerationConfig | None,
    sampling: SamplingParams,
    target: str,
) -> str:
    """One line on the keys that a generation_config sets and decoding does not apply.

    It is empty if there are no such keys.
    """
    if config is None:
        return ""
    values = config.to_dict()
    ignored: Json = {}
    # What the line advises for each group of keys.
    fixes: list[str] = []

    # Sampling parameters, which matter if either side samples.
    samples = values.get("do_sample")
    sampled: list[str] = []
    if samples or not sampling.greedy:
        for key in SAMPLING:
            if values.get(key) not in (None, getattr(sampling, key)):
                sampled.append(key)
                ignored[key] = values[key]
    # The file says to sample, and the call decodes greedily: its temperature of 0 replaces the
    # file's.
    if samples and sampling.greedy:
        if "temperature" not in sampled:
            sampled.append("temperature")
        temperature = values.get("temperature")
        ignored["temperature"] = 1.0 if temperature is None else temperature
        ignored["do_sample"] = True
    if sampled:
        fixes.append(f"to sample as it says, set {', '.join(sampled)}")

    # Limits.
    limits = [key for key in _LIMITS if values.get(key) is not None]
    for key in limits:
        ignored[key] = values[key]
    if limits:
        fixes.append("limit answers by max_new_tokens and stop")

    # Keys without a counterpart, and keys that transformers does not know either.
    known = GenerationConfig().to_dict()
    others: Json = {}
    for key, off in UNSUPPORTED.items():
        if values.get(key) not in (None, off):
            others[key] = values[key]
    for key, value in values.items():
        if value is not None and key not in known:
            others[key] = value
    if others:
        fixes.append(f"{'the others' if ignored else 'they'} have no counterpart")
    ignored |= others
    if not ignored:
        return ""

    shown = [f"{key}={value!r}"[:60] for key, value in ignored.items()]
    names = ", ".join(shown[:8])
    if len(shown) > 8:
        names += f" and {len(shown) - 8} more"
    fix = "; ".join(fixes)
    # A value may hold line breaks; the line is one.
    line = f"target {target!r}: decoding does not apply {names} of its generation_config; {fix}"
    return " ".join(line.split())
