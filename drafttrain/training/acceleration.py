"""What a recipe's TrainingArguments ask of accelerate: processes, precision and DeepSpeed, with the
optimizer and the schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from accelerate import Accelerator, DataLoaderConfiguration, DistributedType
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

# accelerate.utils has these only where DeepSpeed is installed, an extra of drafttrain.
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations.deepspeed import propagate_args_to_deepspeed
from transformers.trainer_optimizer import is_optimizer_factory
from transformers.trainer_pt_utils import get_parameter_names

from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.training import muon
from drafttrain.training.arguments import one_line
from drafttrain.training.column_rates import set_column_rates
from drafttrain.training.limits import TimeBudget

# Names of weights that weight decay leaves alone, as transformers has them.
_UNDECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


class OneProcess:
    """What a loop calls of an `Accelerator`, for a process that nothing has launched."""

    num_processes = 1
    distributed_type = DistributedType.NO
    sync_gradients = True

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)


def accelerator_of(args: TrainingArguments, drafter: TrainableDrafter) -> Accelerator:
    """The accelerator that a recipe asks for. Its own accumulation is off, since the loop counts
    micro-batches itself.
    """
    options = args.accelerator_config.to_dict()  # type: ignore[union-attr]
    accumulation = options.pop("gradient_accumulation_kwargs") or {}
    # What is left is of the loaders.
    data = DataLoaderConfiguration(**options, data_seed=args.data_seed)
    with one_line("accelerator_config, bf16, fp16, ddp_*"):
        plugin = GradientAccumulationPlugin(num_steps=1, **accumulation)
        accelerator = Accelerator(
            mixed_precision=args.mixed_precision,
            deepspeed_plugin=args.deepspeed_plugin,
            dataloader_config=data,
            gradient_accumulation_plugin=plugin,
            kwargs_handlers=[_ddp_options(args, drafter)],
        )
    # accelerate launch has read DeepSpeed's file; a recipe's own file has its values already.
    if is_deepspeed(accelerator) and not args.deepspeed:
        propagate_args_to_deepspeed(accelerator, args)
    return accelerator


def is_deepspeed(accelerator: Accelerator | OneProcess) -> bool:
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def _ddp_options(
    args: TrainingArguments, drafter: TrainableDrafter
) -> DistributedDataParallelKwargs:
    # Activations that backward computes again do not go with a search for unused parameters.
    unused = not (drafter.is_activation_checkpointing or args.activation_checkpointing)
    options: Json = {"find_unused_parameters": unused}
    for name in ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph"):
        value = vars(args)[f"ddp_{name}"]
        if value is not None:
            options[name] = value
    return DistributedDataParallelKwargs(**options)


def enable_checkpointing(drafter: TrainableDrafter, args: TrainingArguments) -> None:
    """Lets backward compute activations again, if the recipe says so."""
    if not args.activation_checkpointing:
        return
    options: Json = {}
    if args.activation_checkpointing_kwargs:
        options.update(args.activation_checkpointing_kwargs)  # type: ignore[arg-type]
    every = options.pop("every_n_layers", 1)
    offload = options.pop("offload", False)
    with one_line("activation_checkpointing_kwargs"):
        drafter.activation_checkpointing_enable(
            activation_checkpointing_kwargs=options or None,
            every_n_layers=every,
            offload=offload,
        )


def optimizer_of(
    drafter: TrainableDrafter,
    args: TrainingArguments,
    column_rates: Tensor | None,
) -> Optimizer:
    """The recipe's optimizer over the drafter's trained weights.

    column_rates: [f*h], with which the weight that reads the target's states learns at rates of its
    own by column.
    """
    decayed = set(get_parameter_names(drafter, [nn.LayerNorm], _UNDECAYED))
    with_decay = []
    without = []
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad and name in decayed:
            with_decay.append(parameter)
        elif parameter.requires_grad:
            without.append(parameter)
    groups: list[Json] = [
        {"params": with_decay, "weight_decay": args.weight_decay},
        {"params": without, "weight_decay": 0.0},
    ]
    if args.optim == muon.NAME:
        matrices = muon.matrices_of(drafter)
        stepped = [parameter for parameter in with_decay if parameter in matrices]
        groups[0]["params"] = [parameter for parameter in with_decay if parameter not in matrices]
        return muon.MuonAndAdamW([{"params": stepped}], groups, args)
    with one_line("optim, optim_args, optim_target_modules"):
        make, options = Trainer.get_optimizer_cls_and_kwargs(args, drafter)
        if is_optimizer_factory(make):
            optimizer = make()(drafter, **options)
        else:
            groups = options.pop("params", groups)  # low-rank optimizers bring groups of their own
            optimizer = make(groups, **options)
    if "bitsandbytes" in str(make) and options.get("optim_bits") == 8:
        _embeddings_in_float32(drafter)
    if column_rates is not None:
        weight = drafter.get_parameter(drafter.reads_features)
        set_column_rates(optimizer, weight, column_rates)
    return optimizer


def _embeddings_in_float32(drafter: TrainableDrafter) -> None:
    """Keeps 32-bit optimizer states of embeddings, as bitsandbytes advises."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in drafter.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def schedule_of(
    optimizer: Optimizer,
    args: TrainingArguments,
    steps: int,
    budget: TimeBudget | None,
) -> LRScheduler:
    """Learning rates by step: the recipe's schedule; under a time budget they follow the time."""
    warmup = args.warmup_steps
    if budget is not None:

        def rate(step: int) -> float:
            warm = (step + 1) / max(warmup, 1.0)
            if 0 < warmup < 1:  # a share of the run, which the time ends or the steps
                warm = max(budget.done, (step + 1) / steps) / warmup
            return min(1.0, warm) * budget.factor()

        return LambdaLR(optimizer, rate)
    with one_line("lr_scheduler_type, lr_scheduler_kwargs"):
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,  # type: ignore[arg-type]
        )


class WrappedDrafter(NamedTuple):
    """The drafter as the processes train it, with its optimizer and schedule."""

    drafter: TrainableDrafter
    model: Any  # the drafter, perhaps wrapped by DDP or DeepSpeed
    optimizer: Optimizer
    schedule: LRScheduler


def prepared(
    accelerator: Accelerator,
    drafter: TrainableDrafter,
    args: TrainingArguments,
    steps: int,
    budget: TimeBudget | None,
    column_rates: Tensor | None,
) -> WrappedDrafter:
    """Wraps the drafter as the processes train it, and makes its optimizer and schedule."""
    if not is_deepspeed(accelerator):
        optimizer = optimizer_of(drafter, args, column_rates)
        model, optimizer = accelerator.prepare(drafter, optimizer)
        # Not prepared: accelerate would step it once per process.
        made = schedule_of(optimizer, args, steps, budget)
        return WrappedDrafter(drafter, model, optimizer, made)

    from deepspeed.utils import logger

    logger.setLevel(args.get_process_log_level())
    settings = accelerator.state.deepspeed_plugin.hf_ds_config
    settings.trainer_config_finalize(args, drafter, steps)
    gathers = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    if settings.is_zero3() and not settings.is_true(gathers):
        raise UserError(
            f"deepspeed: {gathers} must be true, because the drafter is saved from gathered weights; set it in DeepSpeed's file"
        )
    dummy = "optimizer" in settings.config
    if dummy:
        trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        optimizer = DummyOptim(params=trained)
    else:
        optimizer = optimizer_of(drafter, args, column_rates)
        settings.config["zero_allow_untested_optimizer"] = True

    schedule: Any = None
    if "scheduler" in settings.config:
        schedule = DummyScheduler(optimizer)
    elif dummy:
        # DeepSpeed makes the optimizer, and calls this with it.
        schedule = DummyScheduler(
            optimizer,
            lr_scheduler_callable=lambda made: schedule_of(made, args, steps, budget),
        )
    if schedule is not None:
        return WrappedDrafter(drafter, *accelerator.prepare(drafter, optimizer, schedule))
    model, optimizer = accelerator.prepare(drafter, optimizer)
    return WrappedDrafter(drafter, model, optimizer, schedule_of(optimizer, args, steps, budget))
