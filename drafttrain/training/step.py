"""One training step, from collated tokens to the loss and its metrics.

    tokens [b, s]  ->  target: features [b, s, f*h] and distributions p of the rows that losses read     states/source.py
                   ->  drafter: states [t, h] of every depth, from features and tokens                   forward of the kind
                   ->  loss: divergence of p and q = softmax(head state), summed over depths             losses/divergence.py
                   ->  metrics: sums per depth, divided by the anchors when they are logged              `take_metrics`

The loss is a sum over anchors divided by the anchors of the whole optimizer step (all ranks, all
accumulation steps), so neither padding nor the number of devices changes the gradient.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from transformers import Trainer

from drafttrain.batch import Batch, StepOutput
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.errors import UserError
from drafttrain.sequence_parallel import SequenceGroup
from drafttrain.states.source import BatchSource
from drafttrain.target import Target

# Acceptance is measured on every so many training steps: it changes slowly, and with small drafters
# costs more than a step.
MEASURE_EVERY = 10
_IGNORED = -100  # of `shift_labels`, where no anchor is


def count_anchors(inputs: dict[str, Tensor]) -> Tensor:
    """Depth-0 anchors of a collated batch, a scalar on its device."""
    return (inputs["shift_labels"] != _IGNORED).sum()


class StepTrainer(Trainer):
    """A transformers Trainer whose loss is a drafter's divergence from the frozen target.

    Args:
        target: frozen, outside the wrapped model. source: gives each batch its target features and
            distributions.
        sequence: the processes that share the rows of this one's batches; None: its batches are its
            own.
        args, rest: as for transformers.Trainer.
    """

    def __init__(
        self,
        *args,
        target: Target,
        source: BatchSource,
        sequence: SequenceGroup | None = None,
        **rest,
    ):
        super().__init__(*args, **rest)
        self.target = target
        self.source = source
        self.sequence = sequence
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.sums: dict[str, dict[str, Tensor]] = {
            "train": {},
            "eval": {},
        }  # metric sums since they were last taken
        # since the last log
        self.clock = time.perf_counter()
        self.anchors = 0

    @property
    def drafter(self) -> TrainableDrafter:
        """The trained model without the wrapper of DDP or DeepSpeed."""
        return self.accelerator.unwrap_model(self.model)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, StepOutput]:
        """The loss of one micro-batch, its gradient attached.

        Args:
            inputs: a collated batch. num_items_in_batch: anchors of the whole optimizer step; None
                in evaluation.
        """
        batch = Batch.of(inputs)  # input_ids [b, s], response_mask [b, s]
        read = batch.input_ids
        if (
            self.sequence is not None
        ):  # this process computes a part of it, and embeds what that part reads
            batch = self.sequence.share(batch, self.drafter.sequence_reach)
            read = read.flatten()[batch.part.seen][None]
        features, rows, row_of = self.source(
            batch
        )  # [b, s, f*h]; r target distributions; row of each position [b, s]
        embeds = self.target.embed(read)  # [b, s, h]
        anchors = int(count_anchors(inputs))
        count = anchors if num_items_in_batch is None else num_items_in_batch
        if model.training and int(count) == 0:
            raise UserError(
                f"step {self.state.global_step}: the loss mask of all rows is empty (no two response tokens in a row); give "
                "data whose conversations have responses, or raise max_length"
            )
        total = torch.as_tensor(count, device=batch.input_ids.device).clamp(min=1)
        measure = not model.training or self.state.global_step % MEASURE_EVERY == 0
        if measure and rows is not None:  # None where the drafter reads none, in pretraining
            rows.prepare()
        given = StepInputs(batch, embeds, features, rows, row_of, total, measure)  # type: ignore[arg-type]
        step: StepOutput = model(inputs=given)
        loss = (
            step.loss
        )  # scalar: sum over depths and anchors of weight * D(p, q), divided by count
        self.check_finite("loss", loss.detach())
        self.anchors += anchors if model.training else 0
        sums = self.sums["train" if model.training else "eval"]
        for name, value in step.metrics.items():  # [depths] sums over this batch's anchors
            if name in sums:
                sums[name] = sums[name] + value.detach()
            else:
                sums[name] = value.detach()
        if model.training and num_items_in_batch is not None:
            loss = (
                loss * self.accelerator.num_processes
            )  # gradients are averaged over ranks, the count is global
        elif self.sequence is not None:
            loss = (
                loss * self.sequence.size
            )  # evaluation averages over ranks, each of which has a part of the sum
        if return_outputs:
            return (loss, step)
        return loss

    def check_finite(self, name: str, value: Tensor | float) -> None:
        """Raises UserError for a value that is inf or nan."""
        if not torch.isfinite(torch.as_tensor(value)):
            raise UserError(
                f"{name}={float(value)} at step {self.state.global_step}: not finite; lower learning_rate "
                f"({self.args.learning_rate}) or max_grad_norm ({self.args.max_grad_norm}), then run again to continue from "
                "the last checkpoint"
            )

    def take_metrics(self, phase: str) -> dict[str, float]:
        """Per-depth means since the last call, over all ranks.

        agree@k: share of anchors where the drafter's likeliest token is the target's (greedy
        acceptance at depth k, given that the path so far is the target's); alpha@k: mean sum_v
        min(p, q); accepted_length: tokens per target pass of a greedy chain of all depths, if
        depths agreed independently. A kind whose decoded depths all equal its trained one sets
        `chain_depth`, the length of that chain.
        """
        if not self.sums[phase]:
            return {}
        summed = {
            name: self.accelerator.reduce(value) for name, value in sorted(self.sums[phase].items())
        }
        self.sums[phase] = {}
        count = summed["count"].clamp(min=1)
        means = {
            name: (value / count).tolist() for name, value in summed.items() if name != "count"
        }
        metrics = {
            f"{name}@{k + 1}": round(x, 4) for name, row in means.items() for k, x in enumerate(row)
        }
        agree = means["agree"]
        agree += agree[-1:] * (self.drafter.chain_depth - len(agree))
        chain = 1.0
        expected = 1.0
        for share in agree:
            chain *= share
            expected += chain
        return {**metrics, "accepted_length": round(expected, 4)}
