"""Entry of `accelerate launch drafttrain/train.py CONFIG [key=value ...]` and of `drafttrain
train`.

setup -> prepare -> learn -> finish       reads top to bottom; the loop itself is training/loop.py
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":  # before torch loads, which takes seconds in which a signal may arrive
    if __package__ in (None, ""):
        # Launched as a script, Python puts this folder first on the path; our modules must be found
        # by their full names only.
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.argv.insert(1, "train")
    sys.exit(importlib.import_module("drafttrain.cli").main())

import argparse
import contextlib
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainingArguments, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from drafttrain.batch import Batch
from drafttrain.config import TrainConfig, load_config
from drafttrain.credentials import redact
from drafttrain.data.loader import (
    collate,
    count_tokens,
    is_text,
    keep_frequent,
    load_text,
    pack_rows,
    training_rows,
    without_reasoning,
)
from drafttrain.data.row_images import RowImages, has_images, readable_rows, sendable_rows
from drafttrain.data.store import FeatureStore, Share, load_records, read_meta, stored_features
from drafttrain.drafters.base import NEW
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import decoding_file, kind_class
from drafttrain.environment import __version__, device_name, peak_memory
from drafttrain.errors import UserError, shown
from drafttrain.evaluation.held_out import acceptance, first_prompts, replayed
from drafttrain.evaluation.metrics import read_training
from drafttrain.files import Json, write_json
from drafttrain.folders import PARTIAL, OutputFolder, check_folder
from drafttrain.losses import parse_loss
from drafttrain.outcome import conclude, next_command
from drafttrain.progress import counted
from drafttrain.states.origins import Origin, Stored
from drafttrain.states.served import Served
from drafttrain.states.source import BatchSource, NoTarget, TargetSource
from drafttrain.target import Target, TargetShell, load_shell
from drafttrain.target.shared_rows import check_shared
from drafttrain.training import arguments
from drafttrain.training.checkpoint import (
    damage,
    find_checkpoint,
    load_state,
    newest_checkpoint,
)
from drafttrain.training.explained import explained
from drafttrain.training.first_batches import first_batches
from drafttrain.training.held_out_decoding import DecodeHeldOut, gather_drafter
from drafttrain.training.limits import SaveOnTerm, TimeBudget
from drafttrain.training.loop import evaluate, fit
from drafttrain.training.on_policy import OnPolicy, OnPolicyOptions
from drafttrain.training.run import Run, Training

# Keys of a recipe that change neither weights nor figures of a finished run.
WITHOUT_EFFECT = {
    "output_dir",
    "resume",
    "states_dir",
    "target_url",
    "prefetch_gb",
    "cache_gb",
    "trust_remote_code",
    "gradient_checkpointing",
    "report_to",
    "run_name",
    "project",
    "logging_steps",
    "save_total_limit",
}
MIN_COVERAGE = 0.95  # a continued drafter whose vocabulary covers less of the new data gets a note


# -- setup: the recipe -----------------------------------------------------------------------------


def setup(config_path: str, overrides: list[str]) -> tuple[TrainConfig, TrainingArguments]:
    """Reads the recipe and checks every value that needs neither target nor data."""
    config = load_config(config_path, overrides, arguments.KEYS)
    arguments.check_recipe(config)
    return config, arguments.training_arguments(config)


def check_pretraining(config: TrainConfig) -> None:
    """Raises UserError for data or options that contradict the loss: next_token reads text, every
    other loss reads the target.
    """
    if config.loss_on != "all" and (is_text(config.data) or config.loss == "next_token"):
        raise UserError(
            f"loss_on={config.loss_on!r} needs data of drafttrain generate and another loss than next_token"
        )
    if config.loss == "next_token":
        if not kind_class(config.kind).pretrains:
            raise UserError(
                f"loss='next_token' pretrains language models; kind={config.kind!r} needs another loss"
            )
        if config.on_policy:
            raise UserError(
                "on_policy is scored by the target, but loss='next_token' does not run it; choose loss=kl"
            )
        if config.target_url:
            raise UserError(
                "target_url gives states, which loss='next_token' does not read; leave it out"
            )
    elif is_text(config.data):
        raise UserError(
            f"data={config.data!r} is raw text, which only loss=next_token learns from; for loss={config.loss} make a "
            "data set of the target's answers: drafttrain generate"
        )
    if config.target_url and config.on_policy:
        raise UserError(
            "on_policy runs the target, but with target_url its layers are not here; drop one"
        )


# -- prepare: target, data, drafter ----------------------------------------------------------------


def prepare(config: TrainConfig, args: TrainingArguments, output: OutputFolder | None) -> Run:
    """Loads target and data, builds the drafter, and finds the checkpoint to resume from."""
    check_pretraining(config)
    sequence = arguments.sequence_group(config, args)
    _say(
        args,
        f"training on {device_name(args.device)} ({args.device}) in {arguments.precision(args)}",
    )
    target, records = load_target_and_records(config, args)
    set_seed(args.seed)  # behind the target: some models draw random numbers while they load
    train_rows, held_out = training_rows(records, config.max_length, config.validation, args.seed)
    drafter, vocab = build_drafter(config, target, records)
    if config.loss == "next_token":
        stored = None
    else:
        stored = FeatureStore.open(config.data, drafter.feature_layers)
    # What the target was left out for turns out to be missing, now that the drafter names its
    # layers.
    if isinstance(target, TargetShell) and stored is None and not config.target_url:
        wanted = ",".join(map(str, drafter.feature_layers))
        reason = (
            f"the stored states lack some of the layers {wanted} (drafttrain features --data {config.data} --layers "
            f"{wanted} --overwrite stores them, and steps without the target are faster)"
        )
        target = load_target(config, args, reason)
        drafter.bind(target)
    elif isinstance(target, TargetShell):
        given = "every conversation has stored states"
        if config.target_url:
            given = "its states stream from target_url"
        _say(args, f"target {config.target!r} without its layers: {given}")
    parameters = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    _say(
        args,
        f"{counted(len(train_rows), 'conversations')} to train on, {len(held_out or ())} held out; drafter "
        f"{parameters / 1e6:.1f}M parameters; vocabulary {vocab['size']} of {vocab['vocab_size']} tokens covers "
        f"{100 * vocab['coverage']:.2f} % of response tokens",
    )
    images = None
    if config.target_url or not isinstance(target, TargetShell):
        images = RowImages.of(records, config.data, target)
    if images is not None:
        images.check()
    source = build_source(config, target, drafter, records, stored, images)
    on_policy = None
    if config.on_policy:
        options = OnPolicyOptions.parse(config.on_policy)
        on_policy = OnPolicy(
            options,
            drafter,
            train_rows,
            target,
            config.max_length,
            args,
            config.packing,
        )
    # After the on-policy part, which needs the conversations one by one.
    if config.packing:
        train_rows = pack_rows(train_rows, config.max_length, args.seed)
    checkpoint = find_checkpoint(args, config.resume, output)
    # A checkpoint has trained weights already; without states there is nothing to solve for.
    if config.init == "target" and checkpoint is None and source.has_states:
        begin_from_least_squares(
            drafter,
            train_rows,
            source,
            args.per_device_train_batch_size * config.max_length,
        )
    facts = {"parameters": parameters, "vocabulary": vocab, "data_set": data_facts(config.data)}
    return Run(
        target=target,
        drafter=drafter,
        train_rows=train_rows,
        held_out=held_out,
        source=source,
        images=images,
        on_policy=on_policy,
        checkpoint=checkpoint,
        sequence=sequence,
        facts=facts,
        output=output,
    )


def _say(args: TrainingArguments, text: str) -> None:
    """Prints a line, in the first process."""
    if args.process_index == 0:
        print(text, flush=True)


def data_facts(data: str) -> Json:
    """Counts and sampling of a data set, for a model card that is written where the data is not;
    empty for a text.
    """
    if is_text(data):
        return {}
    return {
        key: read_meta(data).get(key) or {}
        for key in ("counts", "sampling", "chat_template_kwargs")
    }


def load_target_and_records(config: TrainConfig, args: TrainingArguments) -> tuple[Target, Dataset]:
    """The frozen target, and the conversations or texts to train on."""
    # ZeRO-3 would shard every model loaded from now on; it is to shard the drafter only.
    unset_hf_deepspeed_config()
    if is_text(config.data):
        records = None
    else:
        records = load_records(config.data, images=True)
        check_images(config, records)
    if records is not None and config.loss_on == "answer":
        records = without_reasoning(records, config.data)
    target = load_target(config, args, layers_needed(config, records))
    if records is None:
        return target, load_text(config.data, target, config.max_length)
    features = stored_features(Path(config.data).expanduser())
    check_data(read_meta(config.data), features, target, config.data)
    if features and not config.target_url and features["target"]["name"] != target.name:
        _say(
            args,
            f"note: the data's states are those of target {features['target']['name']!r}; if {target.name!r} has other "
            "weights, store its own: drafttrain features --overwrite",
        )
    if config.target_url or not isinstance(target, TargetShell):  # stored states need no reading
        records = readable_rows(records, target)
    if config.target_url:
        records = sendable_rows(records, target, config.max_length)
    # Pretraining learns from every token, not from responses alone.
    if config.loss == "next_token":
        records = records.map(lambda row: {"spans": [[0, len(row["tokens"])]]})
    return target, records


def check_images(config: TrainConfig, records: Dataset) -> None:
    """Raises UserError for keys that do not take the data's images."""
    if not has_images(records):
        return
    keys = {
        "loss": config.loss == "next_token",
        "on_policy": config.on_policy,
    }
    for key, taken in keys.items():
        if taken:
            raise UserError(
                f"{key}={shown(getattr(config, key))} reads text only, but data={config.data!r} has rows with images; "
                "leave it out, or give data of text"
            )


def load_target(config: TrainConfig, args: TrainingArguments, reason: str) -> Target:
    """The target without its layers, or with them for a reason, which is printed."""
    where = str(args.device)
    if config.target_url and reason:
        raise UserError(
            f"target_url gives states, not layers, but {reason}; set init=random or the path of a drafter"
        )
    if reason:
        _say(args, f"loading target {config.target!r} because {reason}")
        return Target.load(
            config.target,
            config.dtype,
            where,
            config.trust_remote_code,
            config.target_device_map,
        )
    return load_shell(
        config.target,
        config.dtype,
        where,
        config.trust_remote_code,
        weights=True,
    )


def layers_needed(config: TrainConfig, records: Dataset | None) -> str:
    """Why a run needs the target's layers; '' if all that it reads of them is stored, or streams
    from servers.
    """
    # With init=target the kind may still copy layers.
    if config.target_url and config.init != "target":
        return ""
    if config.loss == "next_token" or kind_class(config.kind).loads_language_models:
        return f"kind={config.kind} with loss={config.loss} may copy its layers"
    if config.on_policy:
        return "on_policy runs it"
    if config.target_url:
        return ""
    no_states = "the data has no stored states (drafttrain features stores them)"
    if records is None:  # a text
        return no_states
    folder = Path(config.data).expanduser()
    held = stored_features(folder)
    if held is None or not held["layers"]:
        return no_states
    if 0 < held.get("max_length", 0) < config.max_length:
        return f"states are stored up to {held['max_length']} tokens and max_length={config.max_length}"
    store = FeatureStore(folder)
    lacking = sum(key not in store for key in records["id"])
    if lacking:
        return f"{lacking} of {len(records)} conversations have no stored states"
    return ""


def check_data(meta: Json, features: Json | None, target: Target, data: str) -> None:
    """Raises UserError if the data was written by a target with other token ids or states."""
    recorded = meta["target"]
    actual = target.identity()
    if recorded["tokenizer"] != actual["tokenizer"]:
        raise UserError(
            f"data={data!r} was tokenized for target {recorded['name']!r} (tokenizer {recorded['tokenizer']}), not for "
            f"{actual['name']!r} (tokenizer {actual['tokenizer']}); generate data with this target"
        )
    if features is None:
        return
    stored = features["target"]
    for key in ("hidden_size", "num_layers"):
        if stored[key] != actual[key]:
            raise UserError(
                f"data={data!r} holds features of a target with {key}={stored[key]}, {actual['name']!r} has {actual[key]}; "
                "store this target's: drafttrain features --overwrite"
            )


def build_drafter(
    config: TrainConfig,
    target: Target,
    records: Dataset,
) -> tuple[TrainableDrafter, Json]:
    """Returns the drafter to train, bound to the target and on its device, and the report on its
    vocabulary.
    """
    kind = kind_class(config.kind)
    counts = count_tokens(records, target.vocab_size)
    options = {**arguments.stored_layers(config, target), **config.drafter}
    drafter = kind.begin(
        target,
        config.init,
        options,
        config.loss,
        lambda size: keep_frequent(counts, size, target.eos_ids),
    )
    assert isinstance(drafter, TrainableDrafter), "begin raises for kinds without weights"
    drafter.bind(target)
    if config.packing:
        drafter.check_packing()
    # The share of response tokens, by occurrence, that the drafter's vocabulary has.
    covered = float(counts[drafter.kept_ids.to(counts.device)].sum() / counts.sum().clamp(min=1))
    if config.init not in NEW and covered < MIN_COVERAGE and drafter.vocabulary is not None:
        other = "drafter.vocabulary_match=text drafts them"
        fix = "init=target chooses a new vocabulary from this data"
        if drafter.fit():
            fix = other
        print(
            f"note: the vocabulary of init={config.init!r} covers {100 * covered:.1f} % of this data's response tokens, and "
            f"other tokens are never drafted; {fix}",
            flush=True,
        )
    drafter.to(target.device)  # type: ignore[arg-type]
    sizes = {"size": len(drafter.kept_ids), "vocab_size": target.vocab_size}
    return drafter, {**sizes, "coverage": round(covered, 6), "seen": int((counts > 0).sum())}


def build_source(
    config: TrainConfig,
    target: Target,
    drafter: TrainableDrafter,
    records: Dataset,
    stored: FeatureStore | None,
    images: RowImages | None,
) -> BatchSource:
    """The source of target features and distributions; that of next_token reads no target.

    Args:
        stored: states of the rows. images: those that the target reads.

    Raises UserError: processes share rows that the target cannot read in parts.
    """
    if config.loss == "next_token":
        return NoTarget()
    origin: Origin | None = None
    if config.target_url:
        origin = proven_servers(config, target, drafter, stored is not None)
        origin.images = images
    elif stored is not None:
        origin = Stored(stored, list(records["id"]))
    elif config.sequence_parallel > 1:
        check_shared(target)
        if images is not None:
            raise UserError(
                f"sequence_parallel={config.sequence_parallel} runs the target on parts of rows, but data={config.data!r} "
                "has rows with images; store their states: drafttrain features"
            )
    source = TargetSource(
        target,
        drafter.feature_layers,
        drafter.kept_ids,
        origin,
        limit_bytes=config.cache_size(target.device.type != "cpu") * 1e9,
        temperatures=parse_loss(config.loss).temperatures,
        prefetch_bytes=config.prefetch_gb * 1e9,
    )
    source.online.images = images
    return source


def proven_servers(
    config: TrainConfig,
    target: Target,
    drafter: TrainableDrafter,
    stored: bool,
) -> Served:
    """The servers of `target_url`, each proven to serve this target. Raises UserError: one is not,
    or does not answer.
    """
    if isinstance(config.target_url, str):
        urls = [config.target_url]
    else:
        urls = list(config.target_url)
    # Rounded as stored states are: a streamed run equals one on stored states.
    servers = Served(
        urls,
        target,
        drafter.feature_layers,
        config.states_dir,
        dtype=torch.bfloat16,
    )
    servers.prove()
    if Share.of_process().rank == 0:
        print(redact("\n".join(servers.proofs)), flush=True)
        if stored:
            print(
                "note: the data's stored states are not read; leave target_url out to read them",
                flush=True,
            )
    return servers


def begin_from_least_squares(
    drafter: TrainableDrafter,
    rows: Dataset,
    source: BatchSource,
    most: int,
) -> None:
    """Solves the drafter's closed-form start on some of the data, before the first step; some kinds
    have none.
    """
    with source.measuring():
        batches, tokens = first_batches(rows, drafter.device, source, most)
        share = drafter.solve_start(batches, source)  # type: ignore[arg-type]  # has_states: rows are TargetRows
    if share is not None:
        text = f"least-squares start on {tokens} tokens explains {100 * share:.0f} % of the target's last state"
        print(text, flush=True)


# -- learn: the loop -------------------------------------------------------------------------------


def learn(config: TrainConfig, args: TrainingArguments, run: Run) -> tuple[Training, float]:
    """Trains from the checkpoint or from the start; returns what has trained and the seconds it
    took. SIGTERM and Ctrl-C exit here.
    """
    if config.max_minutes > 0:
        run.budget = TimeBudget.after(config.max_minutes, load_state(run.checkpoint))
    if config.feature_rates:
        run.column_rates = feature_rates(args, run)
    if run.held_out is not None and config.decode_prompts > 0:
        run.decoding = held_out_decoding(config, run, run.held_out)
    if run.checkpoint:
        _say(args, f"going on from {run.checkpoint}")
    start = time.perf_counter()
    with SaveOnTerm() as stop:
        training = Training(run, args)
        fit(training, stop)
        if stop.received:
            if args.process_index == 0:
                where = newest_checkpoint(args)
                name = signal.Signals(stop.received).name
                print(
                    f"{name}: saved {where}; the same command continues from there",
                    file=sys.stderr,
                    flush=True,
                )
            sys.exit(128 + stop.received)
    return training, time.perf_counter() - start


@torch.no_grad()
def feature_rates(args: TrainingArguments, run: Run) -> Tensor:
    """[f*h] learning rates of the columns of the weight that reads features: 1 / their RMS at the
    responses of the first rows, as many as a step has in all processes, so that their number does
    not matter.
    """
    size = args.per_device_train_batch_size
    count = size * args.gradient_accumulation_steps * args.world_size
    count = min(count, len(run.train_rows))
    squares: list[Tensor] = []  # [f*h] sums
    tokens = 0
    for begin in range(0, count, size):
        rows = [run.train_rows[i] for i in range(begin, min(begin + size, count))]
        batch = Batch.of(collate(rows)).to(run.drafter.device)
        with run.source.measuring():
            # `row_of` is -1 at tokens that are no anchors.
            features, _, row_of = run.source(batch)
        assert row_of is not None, "such kinds read the target"
        read = run.drafter.norm_features(features[row_of >= 0]).float()  # [r, f*h]
        squares.append(read.square().sum(0))
        tokens += len(read)
    mean = torch.stack(squares).sum(0) / tokens
    return 1 / mean.sqrt().clamp(min=1e-6)


def held_out_decoding(config: TrainConfig, run: Run, held_out: Dataset) -> DecodeHeldOut | None:
    """Decodes held-out prompts during training; None if there is no prompt among the rows."""
    target = run.target
    spec = TreeSpec.parse(config.decode_tree)
    run.drafter.uses_text = False  # held-out acceptance is that of the weights, on any device
    # Without the target's layers it cannot decode: stored states are replayed instead.
    if isinstance(target, TargetShell):

        def decode(drafter: TrainableDrafter) -> dict[str, float]:
            with run.source.measuring():
                return replayed(
                    drafter,
                    held_out,
                    run.source,  # type: ignore[arg-type]  # rows may be None in pretraining only
                    spec,
                    config.decode_prompts,
                    config.decode_tokens,
                )
    else:
        count = config.decode_prompts
        prompts = first_prompts(held_out, count, target.max_positions, run.images)
        if not prompts:
            return None

        def decode(drafter: TrainableDrafter) -> dict[str, float]:
            return acceptance(target, drafter, prompts, spec, config.decode_tokens)

    return DecodeHeldOut(run.drafter, target, config.decode_steps, decode)


# -- finish: the best weights, held-out figures, training.json -------------------------------------


def finish(config: TrainConfig, training: Training, seconds: float) -> Json:
    """Saves the best weights and training.json; returns what training.json holds."""
    run = training.run
    args = training.args
    state = training.state
    metrics: Json = {}
    with SaveOnTerm():  # a signal must not end the process while it saves
        training.checkpoints.take_best()
        if run.held_out is not None:
            metrics = evaluate(training)
        save_drafter(training)
        if run.held_out is not None:
            # As many tokens as a training step, which fit in memory.
            most = args.per_device_train_batch_size * config.max_length
            choose_tree(run, run.held_out, args, most)

    train_loss = None
    # The last entry that has one.
    for entry in state.log_history:
        train_loss = entry.get("train_loss", train_loss)
    replaced = 0
    if run.on_policy is not None:
        replaced = run.on_policy.used
    summary = {
        "drafttrain": __version__,
        "config": asdict(config),
        "steps": state.global_step,
        "best": {"step": state.best_global_step, "accepted_length": state.best_metric},
        "seconds": round(seconds, 1),
        "train_loss": train_loss,
        "held_out": metrics,
        **run.facts,
        "target_features": run.source.hits,
        "states_wait": training.logs.wait_share(),
        "memory_gb": round(peak_memory(args.device) / 1e9, 3),
        "on_policy_rows": replaced,
        "engine": type(training.model).__name__,
        "device": str(args.device),
        "precision": args.mixed_precision,
        "processes": args.world_size,
    }
    if args.process_index == 0:
        write_json(Path(str(args.output_dir)) / "training.json", summary)
    return summary


def save_drafter(training: Training) -> None:
    """Saves the drafter in place of an earlier one, of which nothing stays unless this run
    continues it.
    """
    keep: tuple[str, ...] = ("checkpoint-*",)
    if training.run.checkpoint:
        # A continued run keeps what was tuned for it.
        keep = ("checkpoint-*", "decoding.json", "adapter")
    output = training.run.output
    staged: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    # Only the first process has the folder; the others wait for it below.
    if output is not None:
        staged = output.staged(keep)
    wait = training.accelerator.wait_for_everyone
    with staged:
        wait()
        training.checkpoints.save_model(str(Path(str(training.args.output_dir)) / PARTIAL))
        wait()
    if output is not None:
        # The new drafter is complete, so what was set aside for it may go.
        output.forget()


def choose_tree(run: Run, held_out: Dataset, args: TrainingArguments, most: int) -> None:
    """Writes the tree that the drafter suggests from held-out data to decoding.json; `drafttrain
    tune` finds better ones.
    """
    first = args.process_index == 0
    # All processes take part in gathering a sharded drafter; only the first receives it.
    drafter = gather_drafter(run.drafter, run.target, first)
    if first and drafter is not None:
        with run.source.measuring():
            batches, _ = first_batches(held_out, drafter.device, run.source, most)
            tree = drafter.eval().suggest_tree(batches, run.source)
        if tree is not None:
            write_json(decoding_file(str(args.output_dir)), {"tree": tree})
            print(f"default tree, by held-out accuracy: {tree}", flush=True)


def changed_keys(trained: Json, wished: Json) -> list[str]:
    """What differs between the recipe of a finished run and the present one, as `key=value (was
    value)`. Keys that say only where things are, or how they are reported, do not count.
    """
    # A key that an earlier version did not have had no effect, as its default has none.
    before = {**asdict(TrainConfig()), **trained}
    before |= before["trainer"]
    wished = wished | wished["trainer"]
    changed = []
    for name in sorted({*wished, *before["trainer"]} - WITHOUT_EFFECT - {"trainer"}):
        was = before.get(name)
        now = wished.get(name)
        if was != now:
            changed.append(f"{name}={shown(now)} (was {shown(was)})")
    return changed


def check_goes_on(config: TrainConfig, args: TrainingArguments, changed: list[str]) -> None:
    """Raises UserError if a finished run has no step left in which changed keys could take effect:
    its record would claim what its weights never saw.
    """
    checkpoint = newest_checkpoint(args)
    if checkpoint is None or damage(Path(checkpoint)):
        return  # begins at the first step, or at an earlier checkpoint, behind which there are steps
    state = load_state(checkpoint)
    if args.max_steps > 0:
        over = state.global_step >= args.max_steps
    else:
        over = config.max_minutes == 0 and args.num_train_epochs <= (state.epoch or 0)
    # A run of a fixed time may end by the clock before it ends by its steps.
    if config.max_minutes > 0:
        over = over or TimeBudget.after(config.max_minutes, state).done >= 1
    if over:
        raise UserError(
            f"output_dir={config.output_dir!r} is trained already, so {', '.join(changed)} cannot take effect; set "
            "resume=false to train it again, more max_steps, num_train_epochs or max_minutes to go on from its "
            "checkpoint, or another output_dir"
        )
    _say(args, f"goes on behind step {state.global_step} with {', '.join(changed)}")


def inputs_of_recipe(config: TrainConfig) -> list[tuple[str, str]]:
    """(key, value) of what a run reads."""
    return [(key, str(getattr(config, key))) for key in ("target", "data", "init")]


@contextlib.contextmanager
def claimed(config: TrainConfig, args: TrainingArguments) -> Iterator[OutputFolder | None]:
    """Locks output_dir for all processes of this run; gives it to the first one."""
    if args.process_index:
        yield None
        return
    with OutputFolder(config.output_dir, "train", inputs_of_recipe(config), "output_dir") as output:
        try:
            yield output
        except BaseException:
            # Without checkpoints of this run, what it was to replace comes back.
            if newest_checkpoint(args) is None:
                output.restore()
            raise


def run(args: argparse.Namespace) -> int:
    """The command: setup, prepare, learn, finish, and a line about the result."""
    if args.recipe is None:
        raise UserError(
            "config must be given: a YAML recipe, or --recipe NAME (drafttrain recipes lists them)"
        )
    config, training_args = setup(args.recipe, args.overrides)
    check_folder(config.output_dir, "train", inputs_of_recipe(config), "output_dir")
    # As training.json holds it: lists for tuples, and no credentials.
    as_saved = redact(json.loads(json.dumps(asdict(config))))
    folder = Path(str(training_args.output_dir))
    trained = read_training(folder).get("config")
    code = config.trust_remote_code
    then = next_command(
        "tune",
        target=config.target,
        drafter=config.output_dir,
        trust_remote_code=code,
    )
    if config.resume and trained:
        changed = changed_keys(trained, as_saved)
        if not changed:
            if training_args.process_index == 0:
                print(
                    f"{config.output_dir} is already trained with this configuration (resume=false trains it again)"
                )
                conclude(read_training(folder), then=then)
            return 0
        check_goes_on(config, training_args, changed)
    with explained(training_args), claimed(config, training_args) as output:
        prepared = prepare(config, training_args, output)
        with contextlib.closing(prepared.source):
            training, seconds = learn(config, training_args, prepared)
            summary = finish(config, training, seconds)
    if training_args.process_index == 0:
        held = summary["held_out"]
        best = summary["best"]
        lengths = []
        if best["step"]:
            lengths.append(f"{best['accepted_length']:.2f} decoded at step {best['step']}")
        if "eval_accepted_length" in held:
            lengths.append(f"{held['eval_accepted_length']:.2f} estimated")
        share = summary["states_wait"]
        quality = "nothing"
        if lengths:
            quality = f"accepted length {', '.join(lengths)}"
        waits = ""
        if share is not None:
            waits = f" (waiting for states took {100 * share:.1f} % of the steps' time)"
        trained_for = (
            f"trained {summary['steps']} steps in {summary['seconds']:.0f} s on {summary['engine']}"
        )
        print(f"{trained_for}{waits}; held out: {quality}")
        conclude(summary, [config.output_dir], then)
    return 0
