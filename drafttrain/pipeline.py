"""Training from Python: `train` runs what the command runs, and returns a typed result.

Nothing is printed unless `progress=True`: what the command would print goes to the logger
`drafttrain`, level INFO.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.registry import prepare
from drafttrain.errors import UserError, shown
from drafttrain.files import Json
from drafttrain.outcome import concluded
from drafttrain.target import Target

Model = str | Path | PreTrainedModel | Target
Name = str | Path | None
# What a function of this module takes besides its command's flags.
OWN = {"progress", "others"}


@dataclass(frozen=True)
class TrainResult:
    """A finished training run.

    Attributes:
        output_dir: the drafter's folder. steps, seconds: of the whole run.
        accepted_length: decoded on held-out prompts, at the best checkpoint; None if nothing was
            decoded.
        metrics: held-out figures by name. record: the content of training.json.
    """

    output_dir: Path
    steps: int
    seconds: float
    accepted_length: float | None
    metrics: dict[str, float] = field(repr=False)
    record: Json = field(repr=False)

    def load_drafter(self, target: Target) -> Drafter:
        """The trained drafter, ready to decode with its target."""
        return prepare(Drafter.from_pretrained(self.output_dir), target)


def train(
    recipe: str | Path | Mapping[str, object], *, target: Model | None = None, data: Name = None, output_dir: Name = None,
    kind: str | None = None, init: Name = None, drafter: Mapping[str, object] | None = None, loss: str | None = None,
    dtype: str | None = None, max_length: int | None = None, max_minutes: float | None = None, max_steps: int | None = None,
    num_train_epochs: float | None = None, learning_rate: float | None = None, per_device_train_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None, seed: int | None = None, resume: bool | None = None,
    progress: bool = False, **others: object,
) -> TrainResult:  # fmt: skip
    """`drafttrain train` in this process: trains a drafter, or continues an interrupted run.

    Args:
        recipe: a YAML file, the name of one that comes with drafttrain, or its content as a
            mapping.
        The other arguments replace its keys; None leaves them.
        target: a name; a Target stands for its name, because training loads a target of its own,
            with or without layers.
        others: every other key of a recipe, and field of transformers' TrainingArguments.

    Raises:
        UserError: as the command. KeyboardInterrupt: Ctrl-C or SIGTERM, after a checkpoint; the
            same call continues from it.
    """
    overrides = {
        name: value
        for name, value in {**locals(), **others}.items()
        if name not in (*OWN, "recipe")
    }
    if target is not None and not isinstance(target, str | Path):
        if isinstance(target, Target):
            overrides["target"] = target.path
        else:
            overrides["target"] = target.name_or_path
        if not overrides["target"]:
            raise UserError(
                f"target={shown(target)} has no files for training to load; save it, and name the folder"
            )
    words = [
        f"{name}={_as_json(name, value)}" for name, value in overrides.items() if value is not None
    ]
    # An empty mapping is a recipe too.
    content = {"resume": True, **recipe} if isinstance(recipe, Mapping) else str(recipe)
    args = argparse.Namespace(recipe=None, config=content, overrides=words)
    module = importlib.import_module("drafttrain.train")
    try:
        found = concluded(lambda: module.run(args), progress)
    except SystemExit as ended:  # by a signal: the checkpoint is saved
        raise KeyboardInterrupt(
            "training stopped; the same call continues from its newest checkpoint"
        ) from ended
    record = {**found["result"]}
    best = record.get("best") or {}
    metrics = record.get("held_out") or {}
    place = Path(record["config"]["output_dir"]).expanduser()
    length = best.get("accepted_length")
    return TrainResult(place, record["steps"], record["seconds"], length, dict(metrics), record)


def _as_json(name: str, value: object) -> str:
    try:
        return json.dumps(str(value) if isinstance(value, Path) else value)
    except (TypeError, ValueError) as error:
        rule = "is not a valid recipe value; give text, numbers, lists or mappings"
        raise UserError(f"{name}={shown(value)} {rule}") from error
