"""Entry of `accelerate launch drafttrain/train.py CONFIG [key=value ...]`, and of `drafttrain train`: reads top to bottom."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__" and __package__ in (None, ""):
    # Launched as a script, Python puts this folder first on the path; our modules must be found by their full names only.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import dataclasses
import json
import os
import time
from typing import Any

from drafttrain.errors import UserError

HELP = """Train a drafter from a YAML recipe.

  accelerate launch drafttrain/train.py configs/smollm2-135m/eagle3.yaml data=runs/data max_steps=500
  drafttrain train configs/smollm2-135m/eagle3.yaml drafter.ttt_steps=3     (one process, the same thing)

Keys are those of TrainConfig (kind, target, data, output_dir, init, drafter.*, loss, dtype, target_device_map, max_length,
packing, on_policy, validation, max_minutes, cache_gb, decode_prompts, decode_steps, decode_tokens, decode_tree, resume)
and every field of transformers TrainingArguments. A run that was interrupted goes on from its newest checkpoint when started
again; a finished one is left alone. SIGTERM saves a checkpoint first and exits with status 143."""

# What a shell reports for a process that SIGTERM ended.
TERMINATED = 143


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML recipe, see configs/")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="replace a value of the recipe; a.b=c reaches inside"
    )


def setup(config_path: str, overrides: list[str]) -> tuple[Any, Any]:
    """Reads the recipe; returns (TrainConfig, TrainingArguments)."""
    from transformers import TrainingArguments

    from drafttrain.config import load_config

    config = load_config(config_path, overrides, [f.name for f in dataclasses.fields(TrainingArguments)])
    options: dict[str, Any] = {
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
    if "wandb" in str(options["report_to"]):
        os.environ.setdefault("WANDB_PROJECT", "drafttrain")
    if config.max_minutes > 0:
        # TimeBudget ends the run; the number of epochs only has to be out of its way.
        options["num_train_epochs"] = 10_000
    if isinstance(options["report_to"], str):
        options["report_to"] = [options["report_to"]]
    try:
        return config, TrainingArguments(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"config={config_path!r}: {' '.join(str(error).split())}") from error


# A continued drafter whose vocabulary covers less of the new data gets a note.
MIN_COVERAGE = 0.95


def build_drafter(config: Any, target: Any, records: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the drafter to train, bound to the target and on its device, and the report on its vocabulary."""
    from drafttrain.data.vocab import count_tokens, keep_frequent
    from drafttrain.drafters.base import NEW
    from drafttrain.drafters.registry import kind_class

    kind = kind_class(config.kind)
    if config.packing and kind.trainable and not kind.takes_packed_rows:
        raise UserError(f"packing=true, but kind={config.kind!r} does not train on packed rows; set packing=false")
    counts = count_tokens(records, target.vocab_size)
    _, report = keep_frequent(counts, 0)
    keep = lambda size: keep_frequent(counts, size, target.eos_ids)[0]  # noqa: E731
    drafter: Any = kind.begin(target, config.init, config.drafter, config.loss, keep)
    drafter.bind(target)
    if config.packing:
        drafter.check_packing()
    covered = float(counts[drafter.kept_ids.to(counts.device)].sum() / counts.sum().clamp(min=1))
    report.update(size=len(drafter.kept_ids), coverage=round(covered, 6))
    if config.init not in NEW and covered < MIN_COVERAGE:
        print(
            f"note: the vocabulary of init={config.init!r} covers {100 * covered:.1f} % of this data's response tokens, and "
            "other tokens are never drafted; init=target chooses a new vocabulary from this data",
            flush=True,
        )
    return drafter.to(target.device), report


def check_pretraining(config: Any) -> None:
    """Raises UserError where the target's distributions are needed but not asked for, or the other way round."""
    from drafttrain.data.plain_text import is_text
    from drafttrain.drafters.registry import kind_class

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


# Enough for a well-determined regression over a few thousand inputs, and for shares; more changes little.
START_TOKENS = 60_000


def first_batches(rows: Any, device: Any) -> tuple[list[Any], int]:
    """The first rows, about START_TOKENS of them, as batches; and how many tokens that is."""
    from drafttrain.data.loader import collate, to_batch

    batches, tokens = [], 0
    for begin in range(0, len(rows), 8):
        part = [rows[i] for i in range(begin, min(begin + 8, len(rows)))]
        batches.append(to_batch(collate(part)).to(device))
        tokens += sum(row["length"] for row in part)
        if tokens >= START_TOKENS:
            break
    return batches, tokens


def begin_from_least_squares(drafter: Any, rows: Any, source: Any) -> None:
    """Solves the drafter's closed-form start on some of the data, before the first step; some kinds have none."""
    batches, tokens = first_batches(rows, drafter.device)
    explained = drafter.solve_start(batches, source)
    if explained is not None:
        share = f"{100 * explained:.0f} % of the target's last state"
        print(f"least-squares start on {tokens} tokens explains {share}", flush=True)


def choose_tree(trainer: Any, held_out: Any) -> None:
    """Writes the tree that the drafter suggests from held-out data to decoding.json; `drafttrain tune` finds better ones."""
    from drafttrain.drafters.registry import decoding_file
    from drafttrain.files import write_json
    from drafttrain.training.callbacks import whole

    model, first = trainer.accelerator.unwrap_model(trainer.model), trainer.is_world_process_zero()
    drafter = whole(model, trainer.target, first)
    if first:
        tree = drafter.eval().suggest_tree(first_batches(held_out, drafter.device)[0], trainer.source)
        if tree is not None:
            write_json(decoding_file(trainer.args.output_dir), {"tree": tree})
            print(f"default tree, by held-out accuracy: {tree}", flush=True)


def check_data(meta: dict[str, Any], features: dict[str, Any] | None, target: Any, where: str) -> None:
    """Raises UserError if the data was written by a target whose token ids or states mean something else."""
    recorded, actual = meta.get("target") or {}, target.identity()
    if recorded.get("tokenizer") not in (None, actual["tokenizer"]):
        raise UserError(
            f"data={where!r} was tokenized for target {recorded.get('name')!r} (tokenizer {recorded['tokenizer']}), not for "
            f"{actual['name']!r} (tokenizer {actual['tokenizer']}); generate data with this target"
        )
    for key, mine in actual.items():
        theirs = ((features or {}).get("target") or recorded).get(key, mine)
        if features and key in ("hidden_size", "num_layers") and theirs != mine:
            raise UserError(
                f"data={where!r} holds features of a target with {key}={theirs}, {actual['name']!r} has {mine}; store this "
                "target's: drafttrain features --overwrite"
            )


def watch_acceptance(config: Any, trainer: Any, held_out: Any) -> None:
    """Lets the trainer run the real decoder on held-out prompts."""
    from drafttrain.drafters.common.tree_spec import TreeSpec
    from drafttrain.evaluation.held_out import acceptance, first_prompts
    from drafttrain.training.callbacks import DecodeHeldOut

    target, spec = trainer.target, TreeSpec.parse(config.decode_tree)
    prompts = first_prompts(held_out, config.decode_prompts, target.max_positions)
    if prompts:

        def decode(drafter: Any) -> dict[str, float]:
            return acceptance(target, drafter, prompts, spec, config.decode_tokens)

        trainer.add_callback(DecodeHeldOut(trainer, config.decode_steps, decode))


def prepare(config: Any, args: Any) -> tuple[Any, Any]:
    """The frozen target, and the records to learn from."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from drafttrain.data.plain_text import is_text, load_text
    from drafttrain.data.store import load_records, read_meta, stored_features
    from drafttrain.target import Target

    # ZeRO-3 would scatter whatever is loaded from now on; it gets the drafter only, and that later.
    unset_hf_deepspeed_config()
    text = is_text(config.data)
    records = None if text else load_records(config.data)
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


def build_source(config: Any, target: Any, drafter: Any, records: Any) -> tuple[Any, bool]:
    """Where a batch's target features and distributions come from, and whether it knows the target's states."""
    from drafttrain.data.store import FeatureStore
    from drafttrain.losses import parse_loss
    from drafttrain.training.feature_sources import NoTarget, TargetSource

    if config.loss == "next_token":
        return NoTarget(), False
    cache_gb = config.cache_gb if config.cache_gb >= 0 else (4.0 if target.device.type == "cpu" else 0.0)
    stored = FeatureStore.open(config.data, drafter.feature_layers)
    source = TargetSource(
        target,
        drafter.feature_layers,
        drafter.kept_ids,
        stored,
        list(records["id"]) if stored else None,
        cache_gb * 1e9,
        parse_loss(config.loss).temperatures,
    )
    return source, stored is None or not stored.top_k


def fit(config: Any, args: Any) -> dict[str, Any]:
    """Trains and saves; returns what training.json holds."""
    from transformers import PrinterCallback, ProgressCallback, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    from drafttrain.data.loader import collate, pack_rows, training_rows
    from drafttrain.losses import parse_loss
    from drafttrain.training.callbacks import Progress, SaveOnTerm, TimeBudget
    from drafttrain.training.on_policy import OnPolicy
    from drafttrain.training.trainer import DrafterTrainer, forget_checkpoints, forget_drafter

    if config.loss != "next_token":
        parse_loss(config.loss)  # a mistake here should not wait for a model to load
    check_pretraining(config)
    set_seed(args.seed)
    target, records = prepare(config, args)
    train_rows, held_out = training_rows(records, config.max_length, config.validation, args.seed)
    drafter, vocab = build_drafter(config, target, records)
    parameters = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    if args.process_index == 0:
        print(
            f"{len(train_rows)} conversations to train on, {len(held_out) if held_out else 0} held out; drafter "
            f"{parameters / 1e6:.1f}M parameters; vocabulary {vocab['size']} of {vocab['vocab_size']} tokens covers "
            f"{100 * vocab['coverage']:.2f} % of response tokens",
            flush=True,
        )
    source, states = build_source(config, target, drafter, records)
    on_policy = OnPolicy.of(config.on_policy, drafter, train_rows, target, config.max_length, args, config.packing)
    if config.packing:
        train_rows = pack_rows(train_rows, config.max_length, args.seed)
    if not config.resume:
        forget_checkpoints(args)
    checkpoint = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    if checkpoint is None:
        forget_drafter(args)
    if config.init == "target" and checkpoint is None and states:
        begin_from_least_squares(drafter, train_rows, source)
    budget = [TimeBudget.after(config.max_minutes, checkpoint)] if config.max_minutes > 0 else []
    trainer = DrafterTrainer(
        model=drafter,
        args=args,
        train_dataset=train_rows,
        eval_dataset=held_out,
        data_collator=collate,
        target=target,
        source=source,
        on_policy=on_policy,
        callbacks=[Progress(), *budget],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if held_out is not None and config.decode_prompts > 0:
        watch_acceptance(config, trainer, held_out)
    trainer.add_callback(term := SaveOnTerm())
    if checkpoint and args.process_index == 0:
        print(f"going on from {checkpoint}", flush=True)
    start = time.perf_counter()
    with term:
        trainer.train(resume_from_checkpoint=checkpoint)
        if term.received:
            if args.process_index == 0:
                where = get_last_checkpoint(args.output_dir)
                print(f"SIGTERM: saved {where}; the same command goes on from there", file=sys.stderr, flush=True)
            sys.exit(TERMINATED)
        seconds = time.perf_counter() - start
        trainer.take_best()
        metrics = trainer.evaluate() if held_out is not None else {}
        trainer.save_model()
        if held_out is not None:
            choose_tree(trainer, held_out)
    used = on_policy.used if on_policy else 0
    return summarise(config, trainer, seconds, metrics, {"parameters": parameters, "vocabulary": vocab}, used)


def summarise(
    config: Any, trainer: Any, seconds: float, metrics: dict[str, Any], drafter: dict[str, Any], on_policy_rows: int
) -> dict[str, Any]:
    """Writes training.json and returns what it holds."""
    from drafttrain.environment import __version__
    from drafttrain.files import write_json

    state, args = trainer.state, trainer.args
    losses = [entry["train_loss"] for entry in state.log_history if "train_loss" in entry]
    summary = {
        "drafttrain": __version__,
        "config": dataclasses.asdict(config),
        "steps": state.global_step,
        "best": {"step": state.best_global_step, "accepted_length": state.best_metric},
        "seconds": round(seconds, 1),
        "train_loss": losses[-1] if losses else None,
        "held_out": metrics,
        **drafter,
        "target_features": trainer.source.hits,
        "on_policy_rows": on_policy_rows,
        "engine": type(trainer.model_wrapped).__name__,
        "device": str(args.device),
        "processes": args.world_size,
    }
    if args.process_index == 0:
        write_json(Path(args.output_dir) / "training.json", summary)
    return summary


def run(args: argparse.Namespace) -> int:
    from drafttrain.training.failures import explained

    config, training_args = setup(args.config, args.overrides)
    done = Path(config.output_dir) / "training.json"
    if (
        config.resume
        and done.is_file()
        and json.loads(done.read_text())["config"] == json.loads(json.dumps(dataclasses.asdict(config)))
    ):
        print(f"{config.output_dir} is already trained with this configuration (resume=false trains it again)")
        return 0
    with explained(training_args):
        summary = fit(config, training_args)
    if training_args.process_index == 0:
        held, best = summary["held_out"], summary["best"]
        decoded = f"{best['accepted_length']:.2f} decoded at step {best['step']}, " if best["step"] else ""
        print(
            f"trained {summary['steps']} steps in {summary['seconds']:.0f} s on {summary['engine']}; held out: accepted length "
            f"{decoded}{held.get('eval_accepted_length', float('nan')):.2f} teacher-forced\ndrafter: {config.output_dir}"
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
