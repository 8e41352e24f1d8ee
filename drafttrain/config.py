"""A training run's configuration: a YAML file, dotted overrides, and errors that suggest the key that was meant."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from drafttrain.errors import UserError

Options = dict[str, Any]  # keys of a recipe


@dataclass
class TrainConfig:
    """The recipe's keys of ours. All other keys of a recipe are fields of transformers TrainingArguments."""

    kind: str = "eagle3"  # drafter kind, a folder of drafttrain/drafters
    target: str = ""  # short name, folder or Hub id
    data: str = ""  # folder written by `drafttrain generate`; a text file for loss=next_token
    output_dir: str = ""  # receives the drafter, its checkpoints and training.json
    # 'target' copies the target's weights, 'random' does not, 'native' takes the drafter that the target's checkpoint holds;
    # any other value names a drafter to continue.
    init: str = "target"
    drafter: Options = field(
        default_factory=dict
    )  # of the kind's config: draft_vocab_size, ttt_steps, feature_layers, ...
    # Between target and drafter, see docs/training.md: kl, js:0.5, lk_lambda, 0.9*kl+0.1*ce, kl@2, ...
    # next_token pretrains a draft model without the target.
    loss: str = "kl"
    # Of training/on_policy.py, which lets the drafter write a share of the responses; empty for none.
    on_policy: Options = field(default_factory=dict)
    dtype: str = "auto"  # the frozen target's: auto, float32, bfloat16
    target_device_map: str = ""  # 'auto' spreads a target too large for one GPU over several; empty keeps it on one
    max_length: int = 2048  # tokens used of a conversation
    packing: bool = (
        False  # fill rows of max_length tokens with several conversations, which do not attend to each other
    )
    validation: float = 0.02  # share of conversations held out
    max_minutes: float = 0.0  # training time, by which the learning rate then decays too; 0 ends by steps instead
    cache_gb: float = -1.0  # memory for target features kept across epochs; -1 means 4 on a CPU and none on a GPU
    decode_prompts: int = 8  # held-out prompts that the decoder continues during training; 0 for none
    decode_steps: int = 0  # steps between measurements; 0 means with every checkpoint
    decode_tokens: int = 64  # per answer
    decode_tree: str = "chain:4"  # see `drafttrain eval`
    resume: bool = True  # continue from the newest checkpoint in output_dir; false deletes them and starts over
    trust_remote_code: bool = False  # run code of the target's repository
    trainer: Options = field(default_factory=dict)  # the remaining keys, for TrainingArguments


def neighbours(key: str, known: list[str]) -> str:
    """The end of an error about an unknown key: the closest known ones, else all."""
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; known keys: {', '.join(sorted(known)[:40])}"


def parse_overrides(words: list[str]) -> Options:
    """['a.b=1', 'c=x'] -> {'a': {'b': 1}, 'c': 'x'}; values are YAML.

    Raises:
        UserError: a word without '='.
    """
    result: Options = {}
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


def _scalar(value: object) -> object:
    """Text that is a number as that number: YAML 1.1 reads 3e-3 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def load_config(path: str, overrides: list[str], trainer_keys: list[str]) -> TrainConfig:
    """Reads a YAML recipe, whose keys are ours or among trainer_keys (TrainingArguments), and applies the overrides.

    Raises:
        UserError: missing file, broken YAML, an unknown key (with close matches), a wrong type, a missing required key.
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
        merges = isinstance(value, dict) and value and isinstance(raw.get(key), dict)  # an empty {} replaces
        raw[key] = {**raw[key], **value} if merges else value
    defaults = vars(TrainConfig())
    own = [f.name for f in fields(TrainConfig) if f.name != "trainer"]
    values: Options = {"trainer": {}}
    for key, value in raw.items():
        if key in own:
            values[key] = _typed(key, _scalar(value), type(defaults[key]))
        elif key in trainer_keys:
            values["trainer"][key] = _scalar(value)
        else:
            raise UserError(f"unknown config key {key!r} in {path}{neighbours(key, [*own, *trainer_keys])}")
    for key in ("target", "data", "output_dir"):
        if not values.get(key):
            raise UserError(f"config key {key!r} is missing in {path}; set it there or on the command line: {key}=...")
    return TrainConfig(**values)


def _typed(key: str, value: object, wanted: type) -> object:
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, wanted) or (wanted is not bool and isinstance(value, bool)):
        raise UserError(f"{key}={value!r} must be of type {wanted.__name__}, not {type(value).__name__}")
    return value
