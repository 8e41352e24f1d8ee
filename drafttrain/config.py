"""A training run's configuration: a YAML file, dotted overrides, and errors that suggest the key
that was meant.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from drafttrain.errors import UserError, did_you_mean, shown
from drafttrain.files import read_text
from drafttrain.plain_yaml import MOST_LEVELS, read_yaml
from drafttrain.recipes import plan_of, recipe_path
from drafttrain.values import (
    Amount,
    AnyText,
    Count,
    DeviceMap,
    Dtype,
    Fraction,
    Name,
    Seed,
    Size,
    check_fields,
    key,
)

Options = dict[str, Any]  # keys of a recipe
Validation = Annotated[float, Field(ge=0, le=0.9)]
CacheSize = Annotated[float, Field(ge=-1, le=1e6)]
Gigabytes = Annotated[float, Field(ge=0, le=1e6)]
Urls = Annotated[
    AnyText | tuple[AnyText, ...], Field(description="an address or a list of addresses")
]
Epochs = Annotated[float, Field(ge=1e-6, le=1e6)]
Interval = Annotated[float, Field(ge=1e-6, le=1e9)]
LearningRate = Annotated[float, Field(ge=0, le=100)]
CPU_CACHE_GB = 4.0  # of a target's features, where a recipe leaves cache_gb out


@dataclass
class TrainConfig:
    """The recipe's keys of ours. All other keys of a recipe are fields of transformers
    TrainingArguments.

    Raises:
        UserError: a value of another type, or out of range.
    """

    kind: Name = key("eagle3", "drafter kind, a folder of drafttrain/drafters")
    target: Name = key("", "short name, folder or Hub id")
    data: Name = key("", "folder written by `drafttrain generate`; a text file for loss=next_token")
    output_dir: Name = key("", "receives the drafter, its checkpoints and training.json")
    init: Name = key(
        "target",
        "`target` copies the target's weights, `random` does not, `native` takes the drafter that the target's checkpoint "
        "holds; any other value names a drafter to continue",
    )
    drafter: Options = key(
        {}, "options of the kind: draft_vocab_size, ttt_steps, feature_layers, ..."
    )
    loss: AnyText = key(
        "kl", "kl, js:0.5, lk_lambda, 0.9*kl+0.1*ce, ...; next_token pretrains a draft model"
    )
    loss_on: Literal["all", "answer"] = key(
        "all", "tokens of the responses that are learned; answer leaves out the reasoning"
    )
    feature_rates: bool = key(
        False,
        "the weight that reads the target's states learns at rates divided by their sizes; for kinds that fuse "
        "them by one weight",
    )
    on_policy: Options = key(
        {}, "the drafter writes a share of the responses: share, refresh_steps, ..."
    )
    dtype: Dtype = key("auto", "dtype of the frozen target")
    target_device_map: DeviceMap = key(
        "", "auto spreads a target too large for one GPU over several"
    )
    target_url: Urls = key(
        "",
        "servers that `drafttrain serve-target` started, one or a list: states stream from them during training",
    )
    states_dir: Name = key(
        "", "the servers' folder of states as this machine sees it; empty for the same path"
    )
    prefetch_gb: Gigabytes = key(
        1.0, "per process, for states that are read or asked for ahead of their steps"
    )
    max_length: Count = key(2048, "tokens used of a conversation")
    packing: bool = key(
        False,
        "fill rows of max_length tokens with conversations, which do not attend to each other",
    )
    sequence_parallel: Count = key(
        1,
        "processes that share each row, for rows too long for one; needs DeepSpeed and divides the processes",
    )
    validation: Validation = key(0.02, "share of conversations held out")
    max_minutes: Amount = key(
        0.0,
        "training time, by which the learning rate then decays too; max_steps may end it earlier; 0 ends by steps alone",
    )
    cache_gb: CacheSize = key(
        -1.0,
        f"memory for target features kept across epochs; -1 means {CPU_CACHE_GB:g} on a CPU and 0 on a GPU",
    )
    decode_prompts: Size = key(
        8, "held-out prompts that the decoder continues during training; 0 for none"
    )
    decode_steps: Size = key(0, "steps between measurements; 0 measures with every checkpoint")
    decode_tokens: Count = key(64, "tokens per answer of these prompts")
    decode_tree: AnyText = key("chain:4", "tree of these answers, as in `drafttrain eval`")
    resume: bool = key(
        True,
        "continue from the newest checkpoint in output_dir; false deletes them and starts over",
    )
    trust_remote_code: bool = key(False, "run code of the target's repository")
    trainer: Options = field(default_factory=dict)  # the remaining keys, for TrainingArguments

    def __post_init__(self) -> None:
        check_fields(self, words=True)

    def cache_size(self, gpu: bool) -> float:
        """GB of `cache_gb`, or what is usual; parts of rows are not kept."""
        if self.cache_gb >= 0:
            return self.cache_gb
        if gpu or self.sequence_parallel > 1:
            return 0.0
        return CPU_CACHE_GB


@dataclass
class TrainerKeys:
    """Keys of transformers TrainingArguments with a range or a default of ours; all others keep
    their type and default.
    """

    learning_rate: LearningRate = key(5e-5, "highest learning rate")
    max_steps: Literal[-1] | Count = key(-1, "optimizer steps; -1 trains num_train_epochs")
    num_train_epochs: Epochs = key(3.0, "passes over the data")
    per_device_train_batch_size: Count = key(8, "rows per device and micro-batch")
    per_device_eval_batch_size: Count = key(8, "rows per device in evaluations")
    gradient_accumulation_steps: Count = key(1, "micro-batches per optimizer step")
    warmup_steps: Amount = key(
        0.0, "steps until the highest learning rate; below 1 a share of all steps"
    )
    weight_decay: Fraction = key(0.0, "AdamW's weight decay")
    adam_beta1: Fraction = key(0.9, "AdamW's first beta")
    adam_beta2: Fraction = key(0.95, "AdamW's second beta")
    adam_epsilon: Fraction = key(1e-8, "AdamW's epsilon")
    max_grad_norm: Amount = key(0.5, "longer gradients are clipped; 0 clips none")
    logging_steps: Interval = key(10, "optimizer steps between logs; below 1 a share of all steps")
    save_steps: Interval = key(
        200, "optimizer steps between checkpoints; below 1 a share of all steps"
    )
    save_total_limit: Count | None = key(2, "checkpoints to keep; null keeps all")
    dataloader_num_workers: Size = key(0, "processes that load rows")
    ddp_timeout: Count = key(1800, "seconds that a collective operation may take")
    seed: Seed = key(42, "seed of weights, order and noise")
    data_seed: Seed | None = key(None, "seed of the order; null takes seed")

    def __post_init__(self) -> None:
        check_fields(self, words=True)


def neighbours(key: str, known: list[str]) -> str:
    """The end of an error about an unknown key: the closest known ones, else all."""
    close = did_you_mean(key, known)
    if close:
        return f"; {close}"
    return f"; known keys: {', '.join(sorted(known)[:40])}"


def parse_overrides(words: list[str]) -> Options:
    """['a.b=1', 'c=x'] -> {'a': {'b': 1}, 'c': 'x'}; values are YAML.

    Raises:
        UserError: a word without '=', an empty or too long key, a group that another word sets to a
            value, broken YAML.
    """
    result: Options = {}
    for word in words:
        name, equals, text = word.partition("=")
        parts = name.lstrip("-").split(".")
        if not equals or not all(parts) or len(parts) > MOST_LEVELS:
            raise UserError(
                f"override {shown(word)} is not of the form key=value (for example max_steps=100)"
            )
        content: object = ""
        if text:
            content = read_yaml(text, f"override {shown(word)}")
        for part in reversed(parts):
            content = {part: content}
        assert isinstance(content, dict)
        _merge(result, content, "")
    return result


def _merge(into: Options, more: Options, place: str) -> None:
    """Sets the entries of `more`, group by group; an empty {} replaces a group.

    Raises:
        UserError: a key of a group, where `into` has a value instead of the group.
    """
    for name, value in more.items():
        before = into.get(name)
        if not isinstance(value, dict) or not value or before in (None, ""):
            into[name] = value
        elif isinstance(before, dict):
            _merge(before, value, f"{place}{name}.")
        else:
            raise UserError(
                f"{place}{name}.{next(iter(value))} is set, but {place}{name}={shown(before)} is not a group; drop one"
            )


def load_config(
    recipe: str | Mapping[str, object],
    overrides: list[str],
    trainer_keys: list[str],
) -> TrainConfig:
    """Reads a recipe and applies the overrides.

    Args:
        recipe: a YAML file, the name of a recipe that comes with drafttrain, or a recipe's content.
        trainer_keys: fields of TrainingArguments, which are keys beside ours.

    Raises:
        UserError: missing file, broken YAML, an unknown key (with close matches), a wrong value, a
            missing required key.
    """
    if isinstance(recipe, str):
        path = recipe
        text = read_text(recipe_path(path, "config"), "config", "give a YAML recipe")
        raw: Options = read_yaml(text, f"config={path!r}") or {}
    else:
        path = "the recipe"
        raw = copy.deepcopy({**recipe})
    if not isinstance(raw, dict):
        raise UserError(f"config={path!r} must hold key: value lines, not {type(raw).__name__}")
    _merge(raw, parse_overrides(overrides), "")
    plan_of(raw, path)  # checked; it describes the recipe, and a run does not depend on it
    raw.pop("plan", None)

    # Keys of ours; the others are the trainer's.
    own = [one.name for one in fields(TrainConfig) if one.name != "trainer"]
    ours: Options = {}
    trainer: Options = {}
    for name, value in raw.items():
        if name in own:
            ours[name] = value
        elif name in trainer_keys:
            trainer[name] = value
        else:
            close = neighbours(name, [*own, "plan", *trainer_keys])
            raise UserError(f"unknown config key {shown(name)} in {path}{close}")
    config = TrainConfig(**ours)

    # Of the trainer's, those with a range of ours.
    ranged = {name: trainer[name] for name in trainer if name in TrainerKeys.__dataclass_fields__}
    checked = vars(TrainerKeys(**ranged))
    for name in ranged:
        trainer[name] = checked[name]
    config.trainer = trainer

    for name in ("target", "data", "output_dir"):
        if not getattr(config, name):
            raise UserError(
                f"config key {name!r} is missing in {path}; set it there or on the command line: {name}=..."
            )
    return config
