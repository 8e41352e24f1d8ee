"""The training loop.

    order    the micro-batches of each step, their states announced ahead    order.py, states/ahead.py
    step     target -> drafter -> loss -> backward                           `take_steps`, step.py
    update   clip, optimizer, schedule                                       `take_steps`, `fit`
    report   logs, held-out loss, decoding of held-out prompts               logs.py, held_out_decoding.py
    save     a checkpoint                                                    checkpoint.py

`take_steps` is what `train`, `adapt` and the tiny drafters share; `fit` is the run of `train`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import DefaultFlowCallback, TrainerControl

from drafttrain.files import Json
from drafttrain.states.ahead import Inputs
from drafttrain.training.acceleration import OneProcess, is_deepspeed
from drafttrain.training.limits import SaveOnTerm
from drafttrain.training.order import announced_batches, announced_steps, held_out_loader
from drafttrain.training.run import Training

B = TypeVar("B")  # a micro-batch


@dataclass
class Learner(Generic[B]):
    """A model that learns, and how.

    Attributes:
        loss: micro-batch -> its share of the step's loss.
        max_norm: longer gradients are clipped.
        check: raises for a norm that is not finite, before the weights change; None: any norm.
        syncs_each: exchange gradients after each micro-batch, which takes less memory.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[B], Tensor]
    max_norm: float = math.inf
    check: Callable[[Tensor], None] | None = None
    accelerator: Accelerator | OneProcess = field(default_factory=OneProcess)
    syncs_each: bool = False


@dataclass
class Taken:
    """An optimizer step that was taken.

    losses: of its micro-batches. norm: of the gradient before clipping. seconds: in micro-batches.
    """

    losses: list[Tensor]
    norm: Tensor
    seconds: float


def take_steps(learner: Learner[B], steps: Iterable[Sequence[B]]) -> Iterator[Taken]:
    """Takes an optimizer step for each list of micro-batches."""
    accelerator = learner.accelerator
    engine = is_deepspeed(accelerator)
    unscaled: Json = {}
    if engine:
        unscaled["scale_wrt_gas"] = False  # losses are divided by the step's anchors already
    for batches in steps:
        began = time.perf_counter()
        learner.model.train()
        losses = []
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            # DeepSpeed clips and steps inside the backward of the last micro-batch.
            accelerator.sync_gradients = last
            context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if not (last or engine or learner.syncs_each):
                context = accelerator.no_sync(learner.model)
            with context:
                loss = learner.loss(batch)
                accelerator.backward(loss, **unscaled)
            losses.append(loss.detach())
        seconds = time.perf_counter() - began

        norm = accelerator.clip_grad_norm_(learner.model.parameters(), learner.max_norm)
        if learner.check is not None:
            learner.check(norm)
        learner.optimizer.step()
        learner.model.zero_grad()
        yield Taken(losses, norm, seconds)


def fit(training: Training, stop: SaveOnTerm) -> None:
    """Trains until the last step, the end of the time budget, or a signal."""
    args = training.args
    run = training.run
    state = training.state
    logs = training.logs
    flow = DefaultFlowCallback()  # says by the recipe's intervals what is due after a step

    anchors = torch.tensor(0)  # of the running step, over all processes
    max_norm = args.max_grad_norm if args.max_grad_norm > 0 else math.inf

    def coming() -> Iterator[list[Inputs]]:
        nonlocal anchors
        for batches in _steps(training):
            anchors = training.step.count(batches)
            yield batches

    def check(norm: Tensor) -> None:
        # Under a loss scale an infinite norm is usual: the step is skipped, and the scale falls.
        if args.mixed_precision != "fp16":
            training.step.check_finite("grad_norm", norm)

    learner: Learner[Inputs] = Learner(
        model=training.model,
        optimizer=training.optimizer,
        loss=lambda inputs: training.step.compute_loss(training.model, inputs, anchors),
        max_norm=max_norm,
        check=check,
        accelerator=training.accelerator,
        syncs_each=training.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False),
    )
    if run.budget is not None:
        run.budget.begin(args.max_steps)
    logs.begin()
    if args.eval_on_start:
        evaluate(training)

    for taken in take_steps(learner, coming()):
        rate = float(training.optimizer.param_groups[0]["lr"])  # of the step just taken
        if not training.accelerator.optimizer_step_was_skipped:
            training.schedule.step()
        state.global_step += 1
        state.epoch = training.order.epochs(state.global_step)

        control = TrainerControl()
        if run.budget is not None:  # first: it says anew which step is the last
            run.budget.spend(state, control, args.device)
        flow.on_step_end(args, state, control)
        logs.tell("on_step_end")
        logs.add(taken.losses, taken.seconds, rate)
        # The end of an epoch may be due for more, by the recipe's strategies.
        if control.should_training_stop or state.global_step % training.order.steps_per_epoch == 0:
            flow.on_epoch_end(args, state, control)
        if run.decoding is not None and run.decoding.due(state.global_step, control):
            run.decoding.measure(state, control, logs.write)
        if stop.anywhere(args.device):
            control.should_training_stop = True
            control.should_save = True

        if control.should_log:
            logs.write_step(taken.norm, rate)
        if control.should_evaluate:
            evaluate(training)
        if control.should_save:
            logs.add_tokens()
            training.checkpoints.save()
            logs.saved()
        if control.should_training_stop:
            break
    logs.end()
    training.checkpoints.rotate(ended=not stop.received)


def _steps(training: Training) -> Iterator[list[Inputs]]:
    """The micro-batches of each coming step, with what depends on the step's number set."""
    run = training.run
    state = training.state
    order = training.order
    if run.checkpoint is not None:
        training.checkpoints.restore_random_numbers(run.checkpoint)
    steps = order.steps(state.global_step, state.max_steps)
    for batches in announced_steps(steps, run.source, order.accumulated):
        if state.global_step % order.steps_per_epoch == 0:
            # The number that torch's DataLoader draws when an epoch begins: runs that began with
            # one continue with the same numbers.
            torch.empty((), dtype=torch.int64).random_()
        if run.on_policy is not None:
            run.on_policy.refresh(state.global_step)
            batches = run.on_policy.replace(batches, state.global_step, run.source)

        run.drafter.progress = state.global_step / max(state.max_steps, 1)
        if run.budget is not None:
            run.drafter.progress = run.budget.done
        every = training.args.torch_empty_cache_steps
        if every is not None and state.global_step % every == 0:
            clear_device_cache()
        training.optimizer.train()  # type: ignore[attr-defined]  # for optimizers without a schedule
        training.logs.count_tokens(batches)
        yield batches


@torch.no_grad()
def evaluate(training: Training) -> dict[str, float]:
    """The loss on held-out rows and acceptance by depth, over all processes; it is logged, too."""
    run = training.run
    args = training.args
    rows = run.held_out
    assert rows is not None
    start = time.time()
    run.drafter.eval()
    training.optimizer.eval()  # type: ignore[attr-defined]
    measured = torch.zeros(2, device=args.device)  # sum of losses by row; rows
    with run.source.measuring():
        loader = held_out_loader(rows, args, training.accelerator, run.sequence)
        size = loader.total_batch_size // args.world_size  # type: ignore[attr-defined]
        for number, inputs in enumerate(announced_batches(loader, run.source)):
            # Groups of processes take successive batches in turn. Rows that fill up the last batches
            # were measured in the first ones.
            turn = (number * args.world_size + args.process_index) // training.step.sharing
            new = min(max(len(rows) - turn * size, 0), size)
            if new < len(inputs["input_ids"]):
                inputs = {name: value[: max(new, 1)] for name, value in inputs.items()}
            loss = training.step.compute_loss(run.drafter, inputs, repeated=new == 0)
            measured[0] += loss * new
            measured[1] += new
    total, count = training.accelerator.reduce(measured).tolist()
    figures: dict[str, float] = {}
    if count:  # dataloader_drop_last may leave none
        figures["eval_loss"] = total / count
    for name, value in training.step.take_metrics("eval").items():
        figures[f"eval_{name}"] = value
    training.logs.write_held_out(figures, start, len(rows))
    return figures
