"""A recipe's values that need drafters or transformers to be checked, before a model loads; and
TrainingArguments from them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import torch
from transformers import TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations
from transformers.training_args import trainer_log_levels

from drafttrain.config import TrainConfig, TrainerKeys
from drafttrain.data.store import Share, stored_features
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.trainable import DecoderDrafter, TrainableDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import kind_class
from drafttrain.errors import UserError, shown, text_of
from drafttrain.extras import require
from drafttrain.files import Json, read_json
from drafttrain.losses import parse_loss
from drafttrain.ops.packing import cpu_has_bfloat16
from drafttrain.sequence_parallel import SequenceGroup
from drafttrain.target import Target
from drafttrain.target.devices import has_bfloat16, usual_device
from drafttrain.training import muon
from drafttrain.training.on_policy import OnPolicyOptions
from drafttrain.values import check, kinds_of

KEYS = [one.name for one in fields(TrainingArguments)]
_DEFAULTS = {one.name: one.default for one in fields(TrainingArguments)}

# Keys that the loop, accelerate, the optimizers and the reporters read. All others are transformers'
# Trainer's alone, and an accepted key without effect would be worse than an error.
# fmt: off
READ = {
    "output_dir", "seed", "data_seed", "full_determinism", "use_cpu", "report_to", "run_name",
    "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "log_level",
    "log_level_replica", "log_on_each_node",
    # rows
    "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "train_sampling_strategy", "accelerator_config", "dataloader_drop_last",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
    "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
    # the optimizer
    "optim", "optim_args", "optim_target_modules", "learning_rate", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "max_grad_norm",
    # precision, memory and processes
    "bf16", "fp16", "tf32", "activation_checkpointing", "activation_checkpointing_kwargs",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_empty_cache_steps",
    "deepspeed", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
    "ddp_static_graph", "ddp_backend", "ddp_timeout", "parallelism_config",
    # logs, measurements and checkpoints
    "logging_strategy", "logging_steps", "logging_first_step",
    "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "per_device_eval_batch_size",
    "save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node",
    "hub_token",
}
# fmt: on
INSTEAD = {
    "auto_find_batch_size": "an error names the batch size to set where memory is short",
    "disable_tqdm": "drafttrain prints a line per log",
    "enable_jit_checkpoint": "SIGTERM saves a checkpoint without it",
    "fsdp": "set deepspeed to a file such as configs/deepspeed/zero3.json",
    "greater_is_better": "the checkpoint that decodes held-out prompts best is kept",
    "length_column_name": "rows are sorted by their tokens",
    "logging_nan_inf_filter": "a loss that is not finite ends the run",
    "load_best_model_at_end": "the checkpoint that decodes held-out prompts best is taken without it",
    "metric_for_best_model": "the checkpoint that decodes held-out prompts best is kept",
    "push_to_hub": "publish the trained drafter with drafttrain push",
    "resume_from_checkpoint": "the newest checkpoint in output_dir is taken; resume=false takes none",
}
_WORKERS = (  # keys of the processes that load rows
    "dataloader_persistent_workers",
    "dataloader_multiprocessing_context",
    "dataloader_prefetch_factor",
)
ANYWAY = {"disable_tqdm": True, "remove_unused_columns": False}  # as training does without them
# Values of keys that are read, but which only that Trainer carries out.
REFUSED = {
    "lr_scheduler_type": ("reduce_lr_on_plateau", "greedy"),
    "save_strategy": ("best",),
    "train_sampling_strategy": ("batch_rebalance",),
}
_LAYERWISE = ("layerwise", "lomo")  # in names of optimizers that step inside backward


def check_recipe(config: TrainConfig) -> None:
    """Raises UserError for a kind, loss, tree or option that does not exist, or is out of range."""
    if config.loss != "next_token":
        parse_loss(config.loss)
    TreeSpec.parse(config.decode_tree)
    OnPolicyOptions.parse(config.on_policy)
    kind = kind_class(config.kind)
    if issubclass(kind, TrainableDrafter):
        kind.check_options(config.drafter)
        if config.packing and not kind.takes_packed_rows:
            raise UserError(
                f"packing=true, but kind={config.kind!r} does not train on packed rows; set packing=false"
            )
    if config.feature_rates and not kind.reads_features:
        raise UserError(
            f"feature_rates=true, but kind={config.kind!r} has no weight for them; set it to false"
        )


def stored_layers(config: TrainConfig, target: Target) -> Json:
    """`feature_layers` of a new drafter whose recipe names none: those that the data set stores, if
    it stores any.
    """
    kind = kind_class(config.kind)
    reads = issubclass(kind, TrainableDrafter) and "feature_layers" in kinds_of(kind.config_class)
    if not reads or config.init not in ("target", "random") or config.loss == "next_token":
        return {}
    root = Path(config.data).expanduser()
    if "feature_layers" in config.drafter or not (root / "meta.json").exists():
        return {}
    held = stored_features(root)
    if not held or not held["layers"]:
        return {}
    if tuple(held["layers"]) != target.default_feature_layers:
        print(
            f"feature layers {', '.join(map(str, held['layers']))}, which the data stores",
            flush=True,
        )
    return {"feature_layers": held["layers"]}


def training_arguments(config: TrainConfig) -> TrainingArguments:
    """The recipe's TrainingArguments, on top of our defaults. Raises UserError for values that it
    refuses.
    """
    types = get_type_hints(TrainingArguments)
    for name in sorted(config.trainer.keys() - TrainerKeys.__dataclass_fields__.keys()):
        config.trainer[name] = check(name, config.trainer[name], types[name], words=True)
        _refuse_trainers_own(name, config.trainer[name])
    if token := config.trainer.pop("hub_token", None):
        # Where the Hub's client finds it; recipes are recorded, and so are arguments.
        os.environ["HF_TOKEN"] = str(token)

    options: Json = {
        **vars(TrainerKeys()),
        "save_strategy": "steps",
        "report_to": "none",
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "train_sampling_strategy": "group_by_length",
        "dataloader_pin_memory": False,
        "use_cpu": os.environ.get("DS_ACCELERATOR") == "cpu",
    }
    options |= config.trainer
    Share.of_process()  # checks the variables of a launcher
    _check_choices(options)
    options["output_dir"] = config.output_dir
    cpu_launch = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if not options["use_cpu"] and not cpu_launch:
        # Raises where a driver is too old: transformers would train on the CPU.
        options["use_cpu"] = usual_device() == "cpu"
        checkpoints = not options["use_cpu"] and wants_checkpointing(config)
        options.setdefault("bf16", wants_bfloat16(options))
        options.setdefault("gradient_checkpointing", checkpoints)
    options["report_to"] = _reporters(options["report_to"], config)
    _check_launch(config, options)
    if config.max_minutes > 0:
        options["num_train_epochs"] = 10_000  # TimeBudget ends the run, so epochs must not
        _check_intervals(options)
    orthogonal = options.get("optim") == muon.NAME
    if orthogonal:  # transformers does not know it
        _check_muon(config, options)
        del options["optim"]
    with one_line("TrainingArguments"):
        args = TrainingArguments(**options)
    if orthogonal:
        args.optim = muon.NAME
    _check_pairs(config, args)
    if args.n_gpu > 1:
        if not config.target_device_map:
            note = "note: {0} GPUs are visible and one is used; all: accelerate launch --num_processes {0} drafttrain/train.py"
            print(
                f"{note.format(args.n_gpu)} RECIPE, or configs/accelerate/gpu-8.yaml",
                file=sys.stderr,
                flush=True,
            )
        # Beyond one, batches would be as many times larger.
        args._n_gpu = 1
    return args


@contextlib.contextmanager
def one_line(keys: str) -> Iterator[None]:
    """Turns errors of libraries about values of these keys into a UserError."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers, accelerate and DeepSpeed each raise their own
        raise UserError(f"{keys}: {text_of(error)[:400]}; change that key of the recipe") from error


def _reporters(given: object, config: TrainConfig) -> list[str]:
    """Names of `report_to`. Raises UserError for one that is not installed, or does not exist."""
    names: list[str] = ["none"]
    if isinstance(given, list) and given:
        names = given
    elif isinstance(given, str) and given:
        names = [given]
    known = ("none", "all", *get_available_reporting_integrations())
    for name in names:
        if name == "wandb":
            require(name, "report_to='wandb'")
        if name not in known:
            raise UserError(
                f"report_to={name!r} is not one of {', '.join(known)}; install it, or choose one"
            )
    if "wandb" in names:
        os.environ.setdefault("WANDB_PROJECT", "drafttrain")
        os.environ.setdefault("WANDB_DIR", str(Path(config.output_dir).expanduser()))
    return names


def _check_choices(options: Json) -> None:
    """Raises UserError for values that only fail where they are used."""
    for name in ("log_level", "log_level_replica"):
        level = options.get(name, "passive")
        if level not in trainer_log_levels:
            raise UserError(
                f"{name}={shown(level)} is not one of {', '.join(trainer_log_levels)}; choose one"
            )
    for name in _WORKERS:
        value = options.get(name)
        if value and not options["dataloader_num_workers"]:
            raise UserError(
                f"{name}={shown(value)} is for processes that load rows; set dataloader_num_workers above 0, or leave the "
                "key out"
            )
    methods = multiprocessing.get_all_start_methods()
    context = options.get("dataloader_multiprocessing_context")
    if context and context not in methods:
        raise UserError(
            f"dataloader_multiprocessing_context={shown(context)} is not one of {', '.join(methods)}; choose one"
        )


def _check_intervals(options: Json) -> None:
    """Raises UserError for shares of all steps, whose number a time budget leaves open."""
    for name in ("logging_steps", "save_steps", "eval_steps"):
        given = options.get(name)
        if given and given < 1 and options["max_steps"] < 1:
            raise UserError(
                f"{name}={given} is a share of all steps, whose number max_minutes leaves open; give a number of steps"
            )


def _check_launch(config: TrainConfig, options: Json) -> None:
    """Raises UserError for a launcher's or a recipe's DeepSpeed or FSDP that does not work here."""
    settings = options.get("deepspeed")
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise UserError(
            "ACCELERATE_USE_FSDP=true: drafters train under DDP or DeepSpeed; launch with configs/accelerate/gpu-8.yaml, or with "
            "--use_deepspeed --deepspeed_config_file configs/deepspeed/zero3.json"
        )
    if settings:
        require("deepspeed", f"deepspeed={shown(settings)}")
    if "optimizer" in _deepspeed_settings(options) and config.feature_rates:
        raise UserError(
            "feature_rates=true: the optimizer of DeepSpeed's file has one rate for all of a weight; leave it out of the file, "
            "so that optim of the recipe counts"
        )


def _check_muon(config: TrainConfig, options: Json) -> None:
    """Raises UserError for what does not go with optim=muon."""
    if _deepspeed_settings(options):
        raise UserError(muon.NOT_CUT)
    for key in ("optim_args", "optim_target_modules"):
        if options.get(key):
            raise UserError(
                f"{key}={shown(options[key])}: optim='muon' has no such options; leave it out"
            )
    if config.feature_rates:
        raise UserError(
            "feature_rates=true: Muon makes the steps of all columns alike by itself; set it to false"
        )


def _deepspeed_settings(options: Json) -> Json:
    """DeepSpeed's settings, from the recipe or its launcher's file; empty without DeepSpeed."""
    given = options.get("deepspeed")
    if not given:
        given = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if isinstance(given, dict):
        return given
    if not given:
        return {}
    fix = "give a DeepSpeed file such as configs/deepspeed/zero2.json"
    return read_json(Path(str(given)), "deepspeed", fix)


def _refuse_trainers_own(name: str, value: object) -> None:
    """Raises UserError for a key, or a value of one, that only transformers' Trainer reads."""
    rule = "only transformers' Trainer reads it, which drafttrain does not run"
    if name not in READ and value not in (_DEFAULTS[name], ANYWAY.get(name)):
        instead = INSTEAD.get(name, "")
        if instead:
            instead = f": {instead}"
        raise UserError(f"{name}={shown(value)}: {rule}; leave the key out{instead}")
    refused = value in REFUSED.get(name, ())
    if name == "optim":
        refused = any(part in str(value) for part in _LAYERWISE)
    if refused:
        raise UserError(f"{name}={shown(value)}: {rule}; choose another value")


def _check_pairs(config: TrainConfig, args: TrainingArguments) -> None:
    """Raises UserError: options that transformers passes on by name and that are no pairs, or that
    stop gradients.
    """
    names = (
        "gradient_checkpointing_kwargs",
        "activation_checkpointing_kwargs",
        "lr_scheduler_kwargs",
    )
    accumulation = args.accelerator_config.gradient_accumulation_kwargs or {}  # type: ignore[union-attr]
    for name in accumulation.keys() - {"sync_each_batch"}:
        raise UserError(
            f"accelerator_config.gradient_accumulation_kwargs.{name}={shown(accumulation[name])} has no effect; set "
            "gradient_accumulation_steps, and leave it out"
        )
    for name in names:
        given = getattr(args, name)  # transformers has read JSON text
        if name not in config.trainer or not given:
            continue
        if not isinstance(given, dict):
            raise UserError(f"{name}={shown(given)} must be key: value pairs, such as {{a: 1}}")
        if given.get("use_reentrant") and _has_layers(config):
            raise UserError(
                f"{name}.use_reentrant=true: kind={config.kind!r} reads keys of earlier depths, "
                "which then get no gradients; leave it out"
            )


def wants_bfloat16(options: Json) -> bool:
    """Whether training computes in bfloat16 though its recipe names no precision: on devices that
    multiply it natively.

    Weights, their gradients and the optimizer stay float32. A precision of accelerate's or
    DeepSpeed's configuration counts.
    """
    given = _deepspeed_settings(options)
    for key in ("bf16", "fp16"):
        if given.get(key, {}).get("enabled", "auto") != "auto":
            return False
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        return False
    if options.get("fp16"):
        return False
    if has_bfloat16():
        return True
    return not torch.cuda.is_available() and cpu_has_bfloat16()


def wants_checkpointing(config: TrainConfig) -> bool:
    """Whether backward on a GPU computes layers again though the recipe does not say: of heads
    whose target runs beside them.
    """
    data = Path(config.data).expanduser()
    if config.target_url or (data.is_dir() and stored_features(data)):
        return False  # the target does not run here
    return _has_layers(config)


def _has_layers(config: TrainConfig) -> bool:
    return issubclass(kind_class(config.kind), DecoderDrafter)


def precision(args: TrainingArguments) -> str:
    """What a training step computes in, for the log."""
    names = {"bf16": "bfloat16", "fp16": "float16"}
    if args.mixed_precision in names:
        return f"{names[args.mixed_precision]}, with weights and optimizer in float32"
    return "float32"


def sequence_group(config: TrainConfig, args: TrainingArguments) -> SequenceGroup | None:
    """The processes that share this one's rows; None if rows are not shared. Raises UserError for
    what does not go with it.
    """
    size = config.sequence_parallel
    world = args.world_size
    if (
        args.parallelism_config is not None
        or int(os.environ.get("PARALLELISM_CONFIG_SP_SIZE", 1)) > 1
    ):
        raise UserError(
            "parallelism_config cuts rows before the drafter sees them; set the recipe's sequence_parallel"
        )
    if size == 1:
        return None
    options = config.drafter
    reason = ""
    if kind_class(config.kind).sequence_reach is Drafter.sequence_reach:
        reason = f"kind={config.kind!r} has no attention, and its rows are not shared; set sequence_parallel=1"
    elif args.deepspeed_plugin is None:
        reason = (
            "rows are shared by DeepSpeed's exchange; start with accelerate launch --use_deepspeed "
            "--deepspeed_config_file configs/deepspeed/zero2.json"
        )
    elif world % size:
        reason = f"does not divide the {world} processes; start another number of processes"
    elif config.on_policy:
        reason = "on_policy answers are written by each process for itself; leave on_policy out"
    elif options.get("image_embeds"):
        reason = "drafter.image_embeds reads whole rows; leave image_embeds out"
    elif config.cache_gb > 0:
        reason = (
            f"cache_gb={config.cache_gb:g}: parts of rows are not kept; store features (drafttrain features), or leave cache_gb "
            "out"
        )
    elif args.train_sampling_strategy != "group_by_length":
        reason = (
            f"train_sampling_strategy={args.train_sampling_strategy!r}: shared rows are read in the order of group_by_length; "
            "leave the key out"
        )
    if reason:
        raise UserError(f"sequence_parallel={size}: {reason}")
    return SequenceGroup.join(size)
