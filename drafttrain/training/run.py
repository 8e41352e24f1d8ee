"""A run, and its parts ready for the loop: order, optimizer, logs and checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from datasets import Dataset
from torch import Tensor
from transformers import TrainingArguments, enable_full_determinism, set_seed
from transformers.utils import logging

from drafttrain.data.row_images import RowImages
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.folders import OutputFolder
from drafttrain.sequence_parallel import SequenceGroup
from drafttrain.states.source import BatchSource
from drafttrain.target import Target
from drafttrain.training.acceleration import (
    accelerator_of,
    enable_checkpointing,
    is_deepspeed,
    prepared,
)
from drafttrain.training.checkpoint import Checkpoints, load_state, load_weights
from drafttrain.training.held_out_decoding import DecodeHeldOut
from drafttrain.training.limits import TimeBudget
from drafttrain.training.logs import Logs
from drafttrain.training.on_policy import OnPolicy
from drafttrain.training.order import TrainingOrder
from drafttrain.training.step import TrainingStep


@dataclass
class Run:
    """What a run trains, on what.

    Attributes:
        train_rows: {tokens, spans, length, index}; packed if the recipe says so. held_out: never
            packed.
        source: gives batches their target features and distributions.
        images: of the rows, if some have images that the target reads.
        on_policy: mixes in the drafter's responses. checkpoint: to resume from.
        sequence: the processes that share this one's rows.
        column_rates: [f*h] learning rates of the weight that reads features, by column.
        budget: of time. decoding: of held-out prompts.
        facts: what training.json records about the drafter. output: the folder, in the first
            process.
    """

    target: Target
    drafter: TrainableDrafter
    train_rows: Dataset
    held_out: Dataset | None
    source: BatchSource
    images: RowImages | None = None
    on_policy: OnPolicy | None = None
    checkpoint: str | None = None
    sequence: SequenceGroup | None = None
    column_rates: Tensor | None = None
    budget: TimeBudget | None = None
    decoding: DecodeHeldOut | None = None
    facts: Json = field(default_factory=dict)
    output: OutputFolder | None = None


class Training:
    """A run that is ready to train, from its checkpoint or from the start.

    Attributes:
        state: steps, epochs, logs and the best checkpoint, as trainer_state.json holds them.
        model: the drafter as the processes train it: itself, or wrapped by DDP or DeepSpeed.

    Raises:
        UserError: held-out rows are needed, and there are none.
    """

    def __init__(self, run: Run, args: TrainingArguments):
        self.run = run
        self.args = args
        if run.held_out is None and (args.eval_strategy != "no" or args.eval_on_start):
            raise UserError(
                "eval_strategy: there are no held-out rows to measure; set validation above 0, or leave "
                "eval_strategy and eval_on_start out"
            )
        if args.full_determinism:
            enable_full_determinism(args.seed)
        else:
            set_seed(args.seed)
        logging.set_verbosity(args.get_process_log_level())
        self.accelerator = accelerator_of(args, run.drafter)
        self.order = TrainingOrder(
            rows=run.train_rows,
            args=args,
            accelerator=self.accelerator,
            sequence=run.sequence,
        )
        steps = self.order.total_steps()
        # One state for all parts: each reads the present step from it.
        self.state = load_state(run.checkpoint)
        self._begin_state(steps)

        # Under DeepSpeed weights are restored together with the optimizer.
        if run.checkpoint is not None and not is_deepspeed(self.accelerator):
            load_weights(run.drafter, run.checkpoint)
        run.drafter.config.use_cache = False  # config.json has always said so
        enable_checkpointing(run.drafter, args)
        # Counted here, because ZeRO-3 shards the weights in the next step.
        parameters = run.drafter.num_parameters(exclude_embeddings=True)
        trained = prepared(
            accelerator=self.accelerator,
            drafter=run.drafter,
            args=args,
            steps=steps,
            budget=run.budget,
            column_rates=run.column_rates,
        )
        self.model = trained.model
        self.optimizer = trained.optimizer
        self.schedule = trained.schedule

        self.step = TrainingStep(
            drafter=run.drafter,
            target=run.target,
            source=run.source,
            args=args,
            state=self.state,
            accelerator=self.accelerator,
            sequence=run.sequence,
        )
        self.logs = Logs(
            args, self.state, self.accelerator, self.step, parameters, budget=run.budget
        )
        self.checkpoints = Checkpoints(
            args=args,
            state=self.state,
            accelerator=self.accelerator,
            trained=trained,
            parts=[part for part in (run.budget, run.on_policy) if part is not None],
        )
        if run.checkpoint is not None:
            self.checkpoints.load(run.checkpoint)
            if run.on_policy is not None:
                run.on_policy.restore(self.state.stateful_callbacks)

    def _begin_state(self, steps: int) -> None:
        """Notes the recipe's steps and intervals, whatever a checkpoint was written with."""
        args = self.args
        state = self.state
        state.train_batch_size = args.train_batch_size
        state.compute_steps(args, steps)
        state.max_steps = steps
        state.num_train_epochs = math.ceil(args.num_train_epochs)
        if args.max_steps > 0:
            state.num_train_epochs = math.ceil(steps / self.order.steps_per_epoch)
        state.is_local_process_zero = args.local_process_index == 0
        state.is_world_process_zero = args.process_index == 0
