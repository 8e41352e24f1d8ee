"""Entry of `accelerate launch drafttrain/train.py CONFIG [key=value ...]` and of `drafttrain train`.

setup -> prepare -> fit -> finish       reads top to bottom; the step itself is training/step.py
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__" and __package__ in (None, ""):
    # Launched as a script, Python puts this folder first on the path; our modules must be found by their full names only.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of

import torch
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, TrainingArguments, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from drafttrain.batch import Batch
from drafttrain.config import TrainConfig, load_config
from drafttrain.data.loader import (
    collate,
    count_tokens,
    is_text,
    keep_frequent,
    load_text,
    pack_rows,
    training_rows,
)
from drafttrain.data.store import FeatureStore, load_records, read_meta, stored_features
from drafttrain.drafters.base import NEW
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import decoding_file, kind_class
from drafttrain.environment import __version__
from drafttrain.errors import UserError
from drafttrain.evaluation.held_out import acceptance, first_prompts
from drafttrain.files import Json, write_json
from drafttrain.losses import parse_loss
from drafttrain.target import Target
from drafttrain.training.callbacks import DecodeHeldOut, ProgressLines, SaveOnTerm, TimeBudget, gather_drafter
from drafttrain.training.feature_sources import BatchSource, NoTarget, TargetSource
from drafttrain.training.on_policy import OnPolicy, OnPolicyOptions
from drafttrain.training.trainer import DrafterTrainer, explained, find_checkpoint, newest_checkpoint

HELP = """Train a drafter from a YAML recipe.

  accelerate launch drafttrain/train.py configs/smollm2-135m/eagle3.yaml data=runs/data max_steps=500
  drafttrain train configs/smollm2-135m/eagle3.yaml drafter.ttt_steps=3     (one process, same result)

Keys are those of TrainConfig (kind, target, data, output_dir, init, drafter.*, loss, dtype, target_device_map, max_length,
packing, on_policy, validation, max_minutes, cache_gb, decode_prompts, decode_steps, decode_tokens, decode_tree, resume)
and every field of transformers TrainingArguments. Start an interrupted run again to continue it from its newest checkpoint;
a finished run is left unchanged. SIGTERM saves a checkpoint first and exits with status 143."""

TERMINATED = 143  # what a shell reports for a process that SIGTERM ended
MIN_COVERAGE = 0.95  # a continued drafter whose vocabulary covers less of the new data gets a note
START_TOKENS = 60_000  # enough for a regression over a few thousand inputs and for accuracies; more changes little


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML recipe, see configs/")
    replaces = "replace a value of the recipe; a.b=c sets b in a"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=replaces)


# -- setup: the recipe ------------------------------------------------------------------------------------------------


def setup(config_path: str, overrides: list[str]) -> tuple[TrainConfig, TrainingArguments]:
    """Reads the recipe."""
    config = load_config(config_path, overrides, [f.name for f in fields_of(TrainingArguments)])
    options: Json = {
        "logging_steps": 10,
        "save_strategy": "steps",
        "save_steps": 200,
        "save_total_limit": 2,
        "report_to": "none",
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "train_sampling_strategy": "group_by_length",
        "max_grad_norm": 0.5,
        "adam_beta2": 0.95,
        "dataloader_pin_memory": False,
        "use_cpu": os.environ.get("DS_ACCELERATOR") == "cpu",
        **config.trainer,
        "output_dir": config.output_dir,
    }
    if isinstance(options["report_to"], str):
        options["report_to"] = [options["report_to"]]
    if "wandb" in options["report_to"]:
        os.environ.setdefault("WANDB_PROJECT", "drafttrain")
    if config.max_minutes > 0:
        options["num_train_epochs"] = 10_000  # TimeBudget ends the run, so epochs must not
    try:
        return config, TrainingArguments(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"config={config_path!r}: {' '.join(str(error).split())}") from error


def check_pretraining(config: TrainConfig) -> None:
    """Raises UserError for data or options that contradict the loss: next_token reads text, every other loss reads the target."""
    if config.loss == "next_token":
        if not kind_class(config.kind).pretrains:
            raise UserError(
                f"loss='next_token' pretrains language models; kind={config.kind!r} needs another loss (kl)"
            )
        if config.on_policy:
            raise UserError("on_policy is scored by the target, but loss='next_token' does not run it; choose loss=kl")
    elif is_text(config.data):
        raise UserError(
            f"data={config.data!r} is raw text, which only loss=next_token learns from; for loss={config.loss} make a "
            "data set of the target's answers: drafttrain generate"
        )


# -- prepare: target, data, drafter -----------------------------------------------------------------------------------


@dataclass
class Prepared:
    """What a run trains, on what."""

    target: Target
    drafter: TrainableDrafter
    train_rows: Dataset  # rows {tokens, spans, length, index}; packed if the recipe says so
    held_out: Dataset | None  # never packed
    source: BatchSource  # gives batches their target features and distributions
    on_policy: OnPolicy | None  # mixes in the drafter's responses
    checkpoint: str | None  # to resume from
    facts: Json  # what training.json records about the drafter


def prepare(config: TrainConfig, args: TrainingArguments) -> Prepared:
    """Loads target and data, builds the drafter, and finds the checkpoint to resume from."""
    if config.loss != "next_token":
        parse_loss(config.loss)  # reports a mistake before a model loads
    check_pretraining(config)
    set_seed(args.seed)
    target, records = load_target_and_records(config, args)
    train_rows, held_out = training_rows(records, config.max_length, config.validation, args.seed)
    drafter, vocab = build_drafter(config, target, records)
    parameters = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    if args.process_index == 0:
        print(
            f"{len(train_rows)} conversations to train on, {len(held_out or ())} held out; drafter {parameters / 1e6:.1f}M "
            f"parameters; vocabulary {vocab['size']} of {vocab['vocab_size']} tokens covers {100 * vocab['coverage']:.2f} % of "
            "response tokens",
            flush=True,
        )
    source = build_source(config, target, drafter, records)
    on_policy = None
    if config.on_policy:
        options = OnPolicyOptions.parse(config.on_policy)
        on_policy = OnPolicy(options, drafter, train_rows, target, config.max_length, args, config.packing)
    if config.packing:
        train_rows = pack_rows(train_rows, config.max_length, args.seed)
    checkpoint = find_checkpoint(args, config.resume)
    if config.init == "target" and checkpoint is None and source.has_states:
        begin_from_least_squares(drafter, train_rows, source)
    facts = {"parameters": parameters, "vocabulary": vocab, "data_set": data_facts(config.data)}
    return Prepared(target, drafter, train_rows, held_out, source, on_policy, checkpoint, facts)


def data_facts(data: str) -> Json:
    """Counts and sampling of a data set, for a model card that is written where the data is not; empty for a text."""
    return {} if is_text(data) else {key: read_meta(data).get(key) or {} for key in ("counts", "sampling")}


def load_target_and_records(config: TrainConfig, args: TrainingArguments) -> tuple[Target, Dataset]:
    """The frozen target, and the conversations or texts to train on."""
    # ZeRO-3 would shard every model loaded from now on; it is to shard the drafter only.
    unset_hf_deepspeed_config()
    records = None if is_text(config.data) else load_records(config.data)
    target = Target.load(
        config.target, config.dtype, str(args.device), config.trust_remote_code, config.target_device_map
    )
    target.check_head()
    if records is None:
        return target, load_text(config.data, target, config.max_length)
    check_data(read_meta(config.data), stored_features(Path(config.data).expanduser()), target, config.data)
    if config.loss == "next_token":
        records = records.map(lambda row: {"spans": [[0, len(row["tokens"])]]})
    return target, records


def check_data(meta: Json, features: Json | None, target: Target, data: str) -> None:
    """Raises UserError if the data was written by a target with other token ids or states."""
    recorded, actual = meta.get("target") or {}, target.identity()
    if recorded.get("tokenizer") not in (None, actual["tokenizer"]):
        raise UserError(
            f"data={data!r} was tokenized for target {recorded.get('name')!r} (tokenizer {recorded['tokenizer']}), not for "
            f"{actual['name']!r} (tokenizer {actual['tokenizer']}); generate data with this target"
        )
    stored = (features or {}).get("target") or recorded
    for key in ("hidden_size", "num_layers"):
        if features and stored.get(key, actual[key]) != actual[key]:
            raise UserError(
                f"data={data!r} holds features of a target with {key}={stored[key]}, {actual['name']!r} has {actual[key]}; "
                "store this target's: drafttrain features --overwrite"
            )


def build_drafter(config: TrainConfig, target: Target, records: Dataset) -> tuple[TrainableDrafter, Json]:
    """Returns the drafter to train, bound to the target and on its device, and the report on its vocabulary."""
    kind = kind_class(config.kind)
    if config.packing and kind.trainable and not kind.takes_packed_rows:
        raise UserError(f"packing=true, but kind={config.kind!r} does not train on packed rows; set packing=false")
    counts = count_tokens(records, target.vocab_size)
    drafter = kind.begin(
        target, config.init, config.drafter, config.loss, lambda size: keep_frequent(counts, size, target.eos_ids)
    )
    assert isinstance(drafter, TrainableDrafter), "begin raises for kinds without weights"
    drafter.bind(target)
    if config.packing:
        drafter.check_packing()
    covered = float(counts[drafter.kept_ids.to(counts.device)].sum() / counts.sum().clamp(min=1))
    if config.init not in NEW and covered < MIN_COVERAGE:
        print(
            f"note: the vocabulary of init={config.init!r} covers {100 * covered:.1f} % of this data's response tokens, and "
            "other tokens are never drafted; init=target chooses a new vocabulary from this data",
            flush=True,
        )
    drafter.to(target.device)  # type: ignore[arg-type]
    sizes = {"size": len(drafter.kept_ids), "vocab_size": target.vocab_size}
    return drafter, {**sizes, "coverage": round(covered, 6), "seen": int((counts > 0).sum())}


def build_source(config: TrainConfig, target: Target, drafter: TrainableDrafter, records: Dataset) -> BatchSource:
    """The source of target features and distributions: memory, stored features, the target; none for next_token."""
    if config.loss == "next_token":
        return NoTarget()
    cache_gb = config.cache_gb if config.cache_gb >= 0 else (4.0 if target.device.type == "cpu" else 0.0)
    stored = FeatureStore.open(config.data, drafter.feature_layers)
    ids = list(records["id"]) if stored else None
    at = parse_loss(config.loss).temperatures
    return TargetSource(target, drafter.feature_layers, drafter.kept_ids, stored, ids, cache_gb * 1e9, at)


def first_batches(rows: Dataset, device: torch.device) -> tuple[list[Batch], int]:
    """The first rows, about START_TOKENS of them, as batches; and their number of tokens."""
    batches, tokens = list[Batch](), 0
    while tokens < START_TOKENS and 8 * len(batches) < len(rows):
        begin = 8 * len(batches)
        part = [rows[i] for i in range(begin, min(begin + 8, len(rows)))]
        batches.append(Batch.of(collate(part)).to(device))
        tokens += sum(row["length"] for row in part)
    return batches, tokens


def begin_from_least_squares(drafter: TrainableDrafter, rows: Dataset, source: BatchSource) -> None:
    """Solves the drafter's closed-form start on some of the data, before the first step; some kinds have none."""
    batches, tokens = first_batches(rows, drafter.device)
    share = drafter.solve_start(batches, source)  # type: ignore[arg-type]  # has_states: rows are TargetRows
    if share is not None:
        text = f"least-squares start on {tokens} tokens explains {100 * share:.0f} % of the target's last state"
        print(text, flush=True)


# -- fit: the loop ----------------------------------------------------------------------------------------------------


def fit(config: TrainConfig, args: TrainingArguments, run: Prepared) -> tuple[DrafterTrainer, float]:
    """Trains from the checkpoint or from the start; returns the trainer and the seconds it took. SIGTERM exits here."""
    budget = [TimeBudget.after(config.max_minutes, run.checkpoint)] if config.max_minutes > 0 else []
    trainer = DrafterTrainer(
        model=run.drafter,
        args=args,
        train_dataset=run.train_rows,
        eval_dataset=run.held_out,
        data_collator=collate,
        target=run.target,
        source=run.source,
        on_policy=run.on_policy,
        callbacks=[ProgressLines(), *budget],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if run.held_out is not None and config.decode_prompts > 0:
        watch_acceptance(config, trainer, run.held_out)
    trainer.add_callback(term := SaveOnTerm())
    if run.checkpoint and args.process_index == 0:
        print(f"going on from {run.checkpoint}", flush=True)
    start = time.perf_counter()
    with term:
        trainer.train(resume_from_checkpoint=run.checkpoint)
        if term.received:
            if args.process_index == 0:
                where = newest_checkpoint(args)
                print(f"SIGTERM: saved {where}; the same command continues from there", file=sys.stderr, flush=True)
            sys.exit(TERMINATED)
    return trainer, time.perf_counter() - start


def watch_acceptance(config: TrainConfig, trainer: DrafterTrainer, held_out: Dataset) -> None:
    """Adds the callback that decodes held-out prompts during training."""
    target, spec = trainer.target, TreeSpec.parse(config.decode_tree)
    prompts = first_prompts(held_out, config.decode_prompts, target.max_positions)
    if prompts:

        def decode(drafter: TrainableDrafter) -> dict[str, float]:
            return acceptance(target, drafter, prompts, spec, config.decode_tokens)

        trainer.add_callback(DecodeHeldOut(trainer, config.decode_steps, decode))


# -- finish: the best weights, held-out figures, training.json --------------------------------------------------------


def finish(config: TrainConfig, run: Prepared, trainer: DrafterTrainer, seconds: float) -> Json:
    """Saves the best weights and training.json; returns what training.json holds."""
    with SaveOnTerm():  # a signal must not end the process while it saves
        trainer.take_best()
        metrics = trainer.evaluate() if run.held_out is not None else {}
        trainer.save_model()
        if run.held_out is not None:
            choose_tree(trainer, run.held_out)
    state, args = trainer.state, trainer.args
    losses = [entry["train_loss"] for entry in state.log_history if "train_loss" in entry]
    summary = {
        "drafttrain": __version__,
        "config": asdict(config),
        "steps": state.global_step,
        "best": {"step": state.best_global_step, "accepted_length": state.best_metric},
        "seconds": round(seconds, 1),
        "train_loss": losses[-1] if losses else None,
        "held_out": metrics,
        **run.facts,
        "target_features": run.source.hits,
        "on_policy_rows": run.on_policy.used if run.on_policy else 0,
        "engine": type(trainer.model_wrapped).__name__,
        "device": str(args.device),
        "processes": args.world_size,
    }
    if args.process_index == 0:
        write_json(Path(config.output_dir) / "training.json", summary)
    return summary


def choose_tree(trainer: DrafterTrainer, held_out: Dataset) -> None:
    """Writes the tree that the drafter suggests from held-out data to decoding.json; `drafttrain tune` finds better ones."""
    first = trainer.is_world_process_zero()
    drafter = gather_drafter(trainer.drafter, trainer.target, first)
    if first and drafter is not None:
        tree = drafter.eval().suggest_tree(first_batches(held_out, drafter.device)[0], trainer.source)
        if tree is not None:
            write_json(decoding_file(str(trainer.args.output_dir)), {"tree": tree})
            print(f"default tree, by held-out accuracy: {tree}", flush=True)


def run(args: argparse.Namespace) -> int:
    """The command: setup, prepare, fit, finish, and a line about the result."""
    config, training_args = setup(args.config, args.overrides)
    summary_file = Path(config.output_dir) / "training.json"
    as_saved = json.loads(json.dumps(asdict(config)))
    if config.resume and summary_file.is_file() and json.loads(summary_file.read_text())["config"] == as_saved:
        print(f"{config.output_dir} is already trained with this configuration (resume=false trains it again)")
        return 0
    with explained(training_args):
        prepared = prepare(config, training_args)
        trainer, seconds = fit(config, training_args, prepared)
        summary = finish(config, prepared, trainer, seconds)
    if training_args.process_index == 0:
        held, best = summary["held_out"], summary["best"]
        decoded = f"{best['accepted_length']:.2f} decoded at step {best['step']}, " if best["step"] else ""
        print(
            f"trained {summary['steps']} steps in {summary['seconds']:.0f} s on {summary['engine']}; held out: accepted length "
            f"{decoded}{held.get('eval_accepted_length', float('nan')):.2f} estimated\ndrafter: {config.output_dir}"
        )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
