"""A training run's configuration: one YAML file, dotted overrides, and errors that name the neighbours of a typo."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from drafttrain.errors import UserError


@dataclass
class TrainConfig:
    """What to train, on what, from where. Keys that are not listed here are transformers TrainingArguments.

    Attributes:
        kind: drafter kind, a module of drafttrain/drafters.
        target: short name, folder or Hub id. data: folder written by `drafttrain generate`.
        output_dir: the drafter, its checkpoints and training.json go here.
        init: 'target' starts from the target's weights, 'random' does not, 'native' takes the drafter that the target's
            checkpoint holds; anything else is a drafter to continue.
        drafter: options of the kind's config (draft_vocab_size, ttt_steps, feature_layers, ...).
        loss: between target and drafter, see docs/training.md: kl, js:0.5, lk_lambda, 0.9*kl+0.1*ce, kl@2, ...
            next_token pretrains a draft model without the target.
        on_policy: a share of the responses is sampled by the drafter itself, see training/on_policy.py; empty for none.
        dtype: the frozen target's: auto, float32, bfloat16.
        target_device_map: 'auto' spreads a target that is too large for one GPU over several; empty keeps it on one.
        max_length: tokens of a conversation that are used.
        packing: fill rows of max_length tokens with several conversations, which do not see each other.
        validation: share of conversations held out.
        max_minutes: stop after so much training time, the learning rate decaying by time; 0 means by steps.
        cache_gb: memory for target features kept across epochs; -1 means 4 on a CPU and none on a GPU.
        decode_prompts: held-out prompts that the real decoder continues during training; 0 for none. decode_steps: how
            often; 0 means with every checkpoint. decode_tokens: of each answer. decode_tree: greedy, see `drafttrain eval`.
        resume: go on from the newest checkpoint in output_dir, if there is one; false deletes them and begins anew.
        trainer: the remaining keys, for TrainingArguments.
    """

    kind: str = "eagle3"
    target: str = ""
    data: str = ""
    output_dir: str = ""
    init: str = "target"
    drafter: dict[str, Any] = field(default_factory=dict)
    loss: str = "kl"
    on_policy: dict[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    target_device_map: str = ""
    max_length: int = 2048
    packing: bool = False
    validation: float = 0.02
    max_minutes: float = 0.0
    cache_gb: float = -1.0
    decode_prompts: int = 8
    decode_steps: int = 0
    decode_tokens: int = 64
    decode_tree: str = "chain:4"
    resume: bool = True
    trust_remote_code: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)


def neighbours(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; known keys: {', '.join(sorted(known)[:40])}"


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """['a.b=1', 'c=x'] -> {'a': {'b': 1}, 'c': 'x'}; values are YAML.

    Raises:
        UserError: a word without '='.
    """
    result: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UserError(f"override {word!r} is not of the form key=value (for example max_steps=100)")
        place = result
        *parents, last = key.lstrip("-").split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = _scalar(yaml.safe_load(value) if value else "")
    return result


def _scalar(value: Any) -> Any:
    """YAML 1.1 reads 3e-3 as text; people mean the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def load_config(path: str, overrides: list[str], trainer_keys: list[str]) -> TrainConfig:
    """Reads a YAML recipe and lays overrides on top.

    Args:
        trainer_keys: names of TrainingArguments, which may stand beside our own keys.

    Raises:
        UserError: missing file, broken YAML, an unknown key (with its neighbours), a wrong type, a missing needed key.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"config={path!r}: no such file; recipes are under configs/, a folder per target")
    try:
        raw = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise UserError(f"config={path!r} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise UserError(f"config={path!r} must hold key: value lines, not {type(raw).__name__}")
    for key, value in parse_overrides(overrides).items():
        if isinstance(value, dict) and value and isinstance(raw.get(key), dict):  # {} empties
            raw[key] = {**raw[key], **value}
        else:
            raw[key] = value

    own = {f.name: f for f in fields(TrainConfig) if f.name != "trainer"}
    values: dict[str, Any] = {"trainer": {}}
    for key, value in raw.items():
        if key in own:
            values[key] = _typed(key, _scalar(value), type(getattr(TrainConfig(), key)))
        elif key in trainer_keys:
            values["trainer"][key] = _scalar(value)
        else:
            raise UserError(f"unknown config key {key!r} in {path}{neighbours(key, [*own, *trainer_keys])}")
    config = TrainConfig(**values)
    for key in ("target", "data", "output_dir"):
        if not getattr(config, key):
            raise UserError(f"config key {key!r} is missing in {path}; set it there or on the command line: {key}=...")
    return config


def _typed(key: str, value: Any, wanted: type) -> Any:
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, wanted) or (wanted is not bool and isinstance(value, bool)):
        raise UserError(f"{key}={value!r} must be of type {wanted.__name__}, not {type(value).__name__}")
    return value
