"""The pipeline from Python: train, tune, evaluate, export and push run what the commands run, and
return typed results.

A function's keyword arguments are its command's flags with underscores; `tests/test_pipeline.py`
keeps the two in step. Nothing is printed unless `progress=True`: what the command would print goes
to the logger `drafttrain`, level INFO.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.registry import prepare
from drafttrain.errors import UserError, shown
from drafttrain.evaluation.results_schema import Results
from drafttrain.files import Json, check_json, scratch_folder
from drafttrain.flags import CommandParser
from drafttrain.outcome import Outcome, commanded, concluded
from drafttrain.target import Target
from drafttrain.values import refuse_options

Model = str | Path | PreTrainedModel | Target
Name = str | Path | None
Tokenizer = PreTrainedTokenizerBase | None
# What a function of this module takes besides its command's flags.
OWN = {"tokenizer", "progress", "others"}


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


@dataclass(frozen=True)
class TuneResult:
    """A tuned tree.

    Attributes:
        tree: the setting to keep, which is now the drafter's default unless dry_run. chain: the
            fastest chain of the trained drafter alone. predicted_speedup, measured_speedup: over
            plain decoding. interval: 95 %, of the measured one.
        record: everything that was measured and predicted, as in tune.json.
    """

    tree: str
    chain: str | None
    predicted_speedup: float
    measured_speedup: float
    interval: tuple[float, float] | None
    record: Json = field(repr=False)


@dataclass(frozen=True)
class ExportResult:
    """An exported drafter. files: what was written. serve: how to serve it, as text."""

    output: Path
    files: tuple[Path, ...]
    serve: str = field(repr=False)


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
    given = {"recipe": None, "config": content, "overrides": words}
    try:
        found = _run("train", "train", given, progress)
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


def tune(
    target: Model, drafter: str | Path, output: Name = None, *, tokenizer: Tokenizer = None, calibrate: Name = None,
    prompts: int | None = None, max_new_tokens: int | None = None, repeats: int | None = None, temperature: float | None = None,
    top_p: float | None = None, top_k: int | None = None, chat_template_kwargs: Json | None = None, dry_run: bool = False,
    dtype: str | None = None, device: str | None = None, trust_remote_code: bool = False, progress: bool = False,
    **others: Never,
) -> TuneResult:  # fmt: skip
    """`drafttrain tune`: the fastest tree on this machine, which becomes the drafter's default
    unless dry_run.

    Args:
        target: a name, a loaded model with `tokenizer`, or a Target. drafter: a name. output: also
            write tune.json there.
        The others are the command's flags; None takes its default.
    """
    record = _run("tune", "tuning.tune", locals(), progress)["result"]
    chain = record["chain"]
    span = (record.get("intervals") or {}).get("measured_speedup")
    speedups = (
        record["predicted_speedup"],
        record["measured_speedup"],
        (span[0], span[1]) if span else None,
    )
    return TuneResult(record["tree"], chain and chain["tree"], *speedups, {**record})


def evaluate(
    target: Model, drafter: Name, output: Name = None, *, tokenizer: Tokenizer = None, suite: Name = None,
    limit: int | None = None, tree: str | None = None, calibrate: Name = None, baselines: str | Sequence[str] | None = None,
    assistant: Name = None, max_new_tokens: int | None = None, batch_size: int | None = None, temperature: float | None = None,
    top_p: float | None = None, top_k: int | None = None, min_p: float | None = None, repetition_penalty: float | None = None,
    seed: int | None = None, chat_template_kwargs: Json | None = None, dtype: str | None = None, device: str | None = None,
    trust_remote_code: bool = False, progress: bool = False, **others: Never,
) -> Results:  # fmt: skip
    """`drafttrain eval`: measures a drafter against plain decoding.

    Args:
        target: a name, a loaded model with `tokenizer`, or a Target. drafter: a name; None measures
            plain decoding.
        output: also write the results there; an interrupted run continues from it.
        The others are the command's flags; None takes its default.

    Returns:
        The content of results.json: overall figures, figures by category, and a record for each
            prompt.

    Raises:
        UserError: an unknown option, a value out of range, or anything that cannot be loaded.
    """
    given = {**locals(), "drafter": drafter or "none"}
    results = _run("evaluate", "tuning.eval_command", given, progress)["result"]
    check_json(results, "evaluate", "measure again", Results)
    return results  # type: ignore[return-value]  # checked


def export(
    drafter: str | Path, format: str, output: str | Path, *, engine_version: str | None = None, dtype: str | None = None,
    target: Name = None, target_gguf: str | None = None, speculative_tokens: int | None = None, schedule: Name = None,
    progress: bool = False, **others: Never,
) -> ExportResult:  # fmt: skip
    """`drafttrain export`: writes a trained drafter in the form that an engine loads: vllm, sglang,
    transformers, gguf, ...

    The others are the command's flags; None takes its default.
    """
    found = _run("export", "export.export_drafter", locals(), progress)
    return ExportResult(
        Path(output).expanduser(),
        tuple(map(Path, found["wrote"])),
        found["result"]["serve"],
    )


def _as_json(name: str, value: object) -> str:
    try:
        return json.dumps(str(value) if isinstance(value, Path) else value)
    except (TypeError, ValueError) as error:
        rule = "is not a valid recipe value; give text, numbers, lists or mappings"
        raise UserError(f"{name}={shown(value)} {rule}") from error


def _run(call: str, command: str, given: Mapping[str, Any], progress: bool) -> Outcome:
    """Runs a command's module with these arguments, and returns what it concluded.

    Args:
        call: the function's name, for errors. command: the module below drafttrain.
        given: the function's arguments; None for those that take the flag's default.
    """
    flags = {
        name: value
        for name, value in given.items()
        if name not in OWN and value is not None and value != ()
    }
    refuse_options(call, given.get("others", {}), given)
    target = flags.get("target")
    loaded = None
    if target is not None and not isinstance(target, str | Path):
        loaded = Target.from_pretrained(target, tokenizer=given.get("tokenizer"))
        if loaded.tokenizer is None:
            raise UserError(
                f"{call} renders prompts, but model {loaded.name!r} has no tokenizer; pass tokenizer="
            )
        for name in ("dtype", "device", "trust_remote_code"):
            if flags.get(name):
                raise UserError(
                    f"{call}: {name}={flags[name]!r} is for a name, but this target is loaded; drop it"
                )
        flags["target"] = loaded.name
    elif given.get("tokenizer") is not None:
        raise UserError(
            f"{call}: tokenizer= goes with a loaded model; target={target!r} is a name, which has its own"
        )
    if isinstance(flags.get("drafter"), Drafter):
        raise UserError(
            f"{call}: drafter= must be a name or folder; save this one: drafter.save_pretrained(FOLDER)"
        )
    module = importlib.import_module(f"drafttrain.{command}")
    if command == "train":
        return concluded(lambda: module.run(argparse.Namespace(**given)), progress)
    parser = CommandParser(prog=f"drafttrain.{call}", add_help=False, allow_abbrev=False)
    importlib.import_module(f"drafttrain.{command}_flags").add_arguments(parser)
    with scratch_folder() as scratch:
        line = ["eval" if call == "evaluate" else call, *_words(flags, parser)]
        if call in ("tune", "evaluate"):  # whose command writes next to the drafter
            flags.setdefault("output", scratch / "result.json")
        try:
            args = parser.parse_args(_words(flags, parser))
        except UserError as error:
            raise UserError(f"{call}: {error}") from error
        with commanded(line):
            found = concluded(
                lambda: module.run(args, loaded) if loaded else module.run(args), progress
            )
    return {
        **found,
        "result": json.loads(json.dumps(found["result"])),
    }  # as the files hold it: lists, no tuples


def _words(flags: Mapping[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    """The words of a command line with these flags."""
    words = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, list | tuple) and parser._option_string_actions[flag].nargs:
            words += [flag, *map(str, value)]
        elif isinstance(value, list | tuple):
            words.append(f"{flag}={','.join(map(str, value))}")
        elif isinstance(value, bool):
            words += [flag] * value
        else:
            words.append(f"{flag}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return words
