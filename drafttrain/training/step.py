"""One training step, from collated tokens to the loss and its metrics.

    tokens [b, s]  ->  target: features [b, s, f*h] and distributions p of the rows that losses read     states/source.py
                   ->  drafter: states [t, h] of every depth, from features and tokens                   forward of the kind
                   ->  loss: divergence of p and q = softmax(head state), summed over depths             losses/divergence.py
                   ->  metrics: sums per depth, divided by the anchors when they are logged              `take_metrics`

The loss is a sum over anchors divided by the anchors of the whole optimizer step (all ranks, all
accumulation steps), so neither padding nor the number of devices changes the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import TrainerState, TrainingArguments

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


def step_inputs(
    batch: Batch,
    target: Target,
    source: BatchSource,
    total: Tensor | float,
    measure: bool,
    read: Tensor | None = None,
) -> StepInputs:
    """What a drafter's forward reads of a batch.

    Args:
        total: anchors of the whole optimizer step. measure: also compute metrics.
        read: token ids to embed, if this process reads a part of the batch.
    """
    # features [b, s, f*h]; rows: r target distributions; row_of [b, s]: the row of each position
    features, rows, row_of = source(batch)
    if read is None:
        read = batch.input_ids
    embeds = target.embed(read)  # [b, s, h]
    if measure and rows is not None:  # None where the drafter reads none, in pretraining
        rows.prepare()
    return StepInputs(
        batch=batch,
        embeds=embeds,
        features=features,
        rows=rows,  # type: ignore[arg-type]
        row_of=row_of,  # type: ignore[arg-type]
        total=total,
        measure=measure,
    )


@dataclass
class TrainingStep:
    """The loss of a drafter on collated batches: its divergence from the frozen target.

    Attributes:
        drafter: what learns, without the wrapper of DDP or DeepSpeed.
        target: frozen. source: gives each batch its target features and distributions.
        args, state: of the run, for the step's number and for messages.
        accelerator: sums over processes.
        sequence: the processes that share the rows of this one's batches; None: its batches are its
            own.
        sums: metric sums by phase ("train", "eval") since they were last taken, each [depths].
        anchors: of this process since the last log.
        depths: that the drafter has, as far as a step has measured them.
    """

    drafter: TrainableDrafter
    target: Target
    source: BatchSource
    args: TrainingArguments
    state: TrainerState
    accelerator: Accelerator
    sequence: SequenceGroup | None = None
    sums: dict[str, dict[str, Tensor]] = field(default_factory=lambda: {"train": {}, "eval": {}})
    anchors: int = 0
    depths: int = 0

    @property
    def sharing(self) -> int:
        """Processes that read the same rows."""
        if self.sequence is None:
            return 1
        return self.sequence.size

    def count(self, batches: Sequence[dict[str, Tensor]]) -> Tensor:
        """Anchors of an optimizer step, over all ranks and accumulation steps.

        Raises UserError: there are none.
        """
        own = torch.stack([count_anchors(inputs) for inputs in batches]).sum()
        count = self.accelerator.gather(own.to(self.args.device)).sum() // self.sharing
        if int(count) == 0:
            raise UserError(
                f"step {self.state.global_step}: the loss mask of all rows is empty (no two response tokens in a row); give "
                "data whose conversations have responses, or raise max_length"
            )
        return count

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        count: Tensor | None = None,
        repeated: bool = False,
    ) -> Tensor:
        """The loss of one micro-batch, its gradient attached.

        Args:
            inputs: a collated batch on the model's device.
            count: anchors of the whole optimizer step; None in evaluation.
            repeated: other batches hold these rows too, so that metrics leave them out.
        """
        batch = Batch.of(inputs)  # input_ids [b, s], response_mask [b, s]
        read = batch.input_ids
        if self.sequence is not None:
            # This process computes a part of the batch, and embeds what that part reads.
            batch = self.sequence.share(batch, self.drafter.sequence_reach)
            read = read.flatten()[batch.part.seen][None]

        anchors = count_anchors(inputs)
        total = count
        if total is None:
            total = anchors.clamp(min=1)
        measure = not model.training or self.state.global_step % MEASURE_EVERY == 0
        given = step_inputs(batch, self.target, self.source, total, measure, read)
        step: StepOutput = model(inputs=given)
        # scalar: sum over depths and anchors of weight * D(p, q), divided by total
        loss = step.loss
        self.check_finite("loss", loss.detach())

        phase = "eval"
        if model.training:
            phase = "train"
            self.anchors += int(anchors)
        sums = self.sums[phase]
        for name, value in step.metrics.items():  # [depths] sums over this batch's anchors
            if repeated:
                value = torch.zeros_like(value)
            sums[name] = sums.get(name, 0) + value.detach()

        if model.training and count is not None:
            # Gradients are averaged over ranks, and the count is global.
            return loss * self.accelerator.num_processes
        if self.sequence is not None:
            # Evaluation averages over ranks, each of which has a part of the sum.
            return loss * self.sequence.size
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
        sums = self.sums[phase]
        if not sums:
            return {}
        self.sums[phase] = {}
        # Every rank reduces the same names in the same order.
        summed = {name: self.accelerator.reduce(sums[name]) for name in sorted(sums)}
        counted = summed.pop("count")  # [depths]
        count = counted.clamp(min=1)
        self.depths = len(count)
        metrics: dict[str, float] = {}
        for name, value in summed.items():
            for depth, mean in enumerate((value / count).tolist(), 1):
                if counted[depth - 1] > 0:  # depths that are not trained yet have no figure
                    metrics[f"{name}@{depth}"] = round(mean, 4)
        agree = (summed["agree"] / count).tolist()
        # Of no depth if there are more.
        agree += agree[-1:] * (self.drafter.chain_depth - len(agree))
        chain = 1.0
        expected = 1.0
        for share in agree:
            chain *= share
            expected += chain
        metrics["accepted_length"] = round(expected, 4)
        return metrics
