"""`drafttrain train`."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from drafttrain.command import (
    AnyNumber,
    Keys,
    Loaded,
    Model,
    Shown,
    Word,
    called_from_python,
    command,
    outcome_of,
)
from drafttrain.config import TrainConfig, TrainerKeys
from drafttrain.errors import UserError, shown
from drafttrain.values import AnyText, Place

if TYPE_CHECKING:
    from drafttrain.drafters.base import Drafter
    from drafttrain.files import Json
    from drafttrain.target import Target

    Recipe = str | Path | Mapping[str, object]
else:
    Recipe = Annotated[Place | Path, Loaded(), Word()]


@dataclass(frozen=True)
class TrainResult:
    """A finished training run.

    Attributes:
        output_dir: the drafter's folder. steps, seconds: of the whole run.
        accepted_length: decoded on held-out prompts, at the best checkpoint; None if nothing was
            decoded.
        metrics: held-out figures by name. record: the content of training.json; empty in all
            processes of a launch but the first.
    """

    output_dir: Path
    steps: int
    seconds: float
    accepted_length: float | None
    metrics: dict[str, float] = field(repr=False)
    record: Json = field(repr=False)

    def load_drafter(self, target: Target) -> Drafter:
        """The trained drafter, ready to decode with its target."""
        from drafttrain.drafters.base import Drafter
        from drafttrain.drafters.registry import prepare

        return prepare(Drafter.from_pretrained(self.output_dir), target)


@command
def train(
    recipe: Recipe | None = None,
    *overrides: Annotated[AnyText, AnyNumber()],
    target: Model | None = None,
    data: Place | Path | None = None,
    output_dir: Place | Path | None = None,
    kind: str | None = None,
    init: Place | Path | None = None,
    drafter: Mapping[str, object] | None = None,
    loss: str | None = None,
    dtype: str | None = None,
    max_length: int | None = None,
    max_minutes: float | None = None,
    max_steps: int | None = None,
    num_train_epochs: float | None = None,
    learning_rate: float | None = None,
    per_device_train_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    seed: int | None = None,
    resume: bool | None = None,
    progress: Shown = False,
    **others: Annotated[object, Keys(TrainConfig, TrainerKeys)],
) -> TrainResult:
    """Train a drafter from a YAML recipe.

    ```
    accelerate launch drafttrain/train.py configs/smollm2-135m/eagle3.yaml data=runs/data max_steps=500
    drafttrain train configs/smollm2-135m/eagle3.yaml drafter.ttt_steps=3     # one process, same result
    accelerate launch -m drafttrain.train llama-3.1-8b/eagle3 data=runs/data
    ```

    Start an interrupted run again to continue it from its newest checkpoint; a finished run is left
    unchanged. Ctrl-C and SIGTERM save a checkpoint after the running step and exit with status 130
    and 143; a second Ctrl-C ends at once. `max_steps=4` may also be written `--max_steps 4` or
    `--max-steps=4`. Every other field of transformers TrainingArguments that training reads is a
    key too.

    Args:
        recipe: a YAML file, or the name of a recipe that comes with drafttrain (drafttrain recipes
            lists them); from Python also its content as a mapping
        overrides: key=value, which replace values of the recipe; a.b=c sets b in a
        target: short name, folder or Hub id; a loaded one stands for its name, because training
            loads a target of its own, with or without layers
        data: folder written by `drafttrain generate`
        output_dir: folder for the drafter, its checkpoints and training.json
        kind: kind of drafter
        init: `target`, `random`, `native`, or a drafter to continue
        drafter: options of the kind
        loss: what is learned, such as kl
        dtype: dtype of the frozen target
        max_length: tokens used of a conversation
        max_minutes: training time
        max_steps: optimizer steps
        num_train_epochs: passes over the data
        learning_rate: highest learning rate
        per_device_train_batch_size: rows per device and micro-batch
        gradient_accumulation_steps: micro-batches per optimizer step
        seed: seed of weights, order and noise
        resume: continue from the newest checkpoint
        progress: print what the command prints; the logger `drafttrain` gets it otherwise
        others: every other key of a recipe, by its name

    Raises:
        UserError: as the command. KeyboardInterrupt: Ctrl-C or SIGTERM, after a checkpoint; the
            same call continues from it.
    """
    given = dict(locals())
    for name in ("recipe", "overrides", "progress", "others"):
        del given[name]
    keys = {**given, **others}
    if target is not None:
        keys["target"] = _name_of(target)
    words = [*overrides]
    for name, value in keys.items():
        if value is not None:
            words.append(f"{name}={_as_json(name, value)}")
    args = Namespace(recipe=recipe, overrides=words, progress=progress)
    try:
        found = outcome_of("train", args)
    except SystemExit as ended:  # by a signal: the checkpoint is saved
        if not called_from_python():
            raise
        raise KeyboardInterrupt(
            "training stopped; the same call continues from its newest checkpoint"
        ) from ended
    record = {"config": {"output_dir": ""}, "steps": 0, "seconds": 0.0, **found["result"]}
    best = record.get("best") or {}
    return TrainResult(
        output_dir=Path(record["config"]["output_dir"]).expanduser(),
        steps=record["steps"],
        seconds=record["seconds"],
        accepted_length=best.get("accepted_length"),
        metrics=dict(record.get("held_out") or {}),
        record={**found["result"]},
    )


def _name_of(target: Model) -> str:
    """The name under which training loads a target. Raises UserError: it has no files."""
    from transformers import PreTrainedModel

    from drafttrain.target import Target

    name = ""
    if isinstance(target, str | Path):
        name = str(target)
    elif isinstance(target, Target):
        name = target.path or ""
    elif isinstance(target, PreTrainedModel):
        name = target.name_or_path or ""
    if not name:
        raise UserError(
            f"target={shown(target)} has no files for training to load; save it, and name the folder"
        )
    return name


def _as_json(name: str, value: object) -> str:
    try:
        return json.dumps(str(value) if isinstance(value, Path) else value)
    except (TypeError, ValueError) as error:
        rule = "is not a valid recipe value; give text, numbers, lists or mappings"
        raise UserError(f"{name}={shown(value)} {rule}") from error
