"""Which rows a step reads: the order of an epoch, the micro-batches of this process, and their
announcement ahead of their steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator, skip_first_batches
from datasets import Dataset
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from drafttrain.data.loader import collate
from drafttrain.errors import UserError
from drafttrain.files import value_of
from drafttrain.sequence_parallel import SequenceGroup, SharedBatches
from drafttrain.states.ahead import MOST_STEPS, Inputs, ahead
from drafttrain.states.source import BatchSource


@dataclass(eq=False)
class ByLength(Sampler[int]):
    """Shuffles rows such that those of one optimizer step have similar lengths.

    The order depends neither on other random draws nor on how a step's rows are divided into
    devices and accumulation steps. So a resumed run sees the rows of an uninterrupted one, and a
    run on N devices those of a run on one device.

    Args:
        lengths: tokens of each row.
        rows: of an optimizer step: batch size x accumulation steps x processes. An epoch consists
            of full steps; it leaves out different rows each time.
        seed: of the order. epoch: returns the epoch's number; called when an epoch begins.
    """

    lengths: Sequence[int]
    rows: int
    seed: int
    epoch: Callable[[], int]
    # Steps that are sorted together: more mean less padding and less shuffling.
    _SORTED = 50

    def __len__(self) -> int:
        count = len(self.lengths)
        if count < self.rows:
            return count
        return count - count % self.rows

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch())
        order = torch.randperm(len(self.lengths), generator=generator)[: len(self)].tolist()
        # Blocks of some steps are sorted together; at least four an epoch, so that it stays
        # shuffled.
        together = self.rows * max(1, min(self._SORTED, len(self) // (4 * self.rows)))
        steps: list[list[int]] = []
        for begin in range(0, len(order), together):
            block = sorted(order[begin : begin + together], key=lambda i: -self.lengths[i])
            for at in range(0, len(block), self.rows):
                steps.append(block[at : at + self.rows])

        # The longest step comes first, so that a lack of memory shows at once.
        longest = max(range(len(steps)), key=lambda at: self.lengths[steps[at][0]])
        places = torch.randperm(len(steps), generator=generator).tolist()
        places.remove(longest)
        for at in [longest, *places]:
            yield from steps[at]


def _seed(args: TrainingArguments) -> int:
    """The seed of the rows' order."""
    seed: int = value_of(vars(args), "data_seed", args.seed)
    return seed


def _loader(
    rows: Dataset,
    order: Iterable[int],
    batch_size: int,
    args: TrainingArguments,
    accelerator: Accelerator,
    generator: torch.Generator | None = None,
) -> DataLoader:
    """Collated batches of this process, on its device.

    generator: the loader draws a number from it when an epoch begins; by default from torch's own.
    """
    loader = DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=batch_size,
        sampler=order,
        collate_fn=collate,
        drop_last=args.dataloader_drop_last,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        in_order=args.dataloader_in_order,
        generator=generator,
    )
    return accelerator.prepare(loader)


class TrainingOrder:
    """The micro-batches of this process, step by step and epoch after epoch.

    Args:
        rows: {tokens, spans, length, index}.
        sequence: the processes that share the rows of this one's batches.

    Attributes:
        epoch: the one whose micro-batches are read. batches: micro-batches of an epoch.
        steps_per_epoch: its optimizer steps; the last one may have fewer micro-batches.

    Raises:
        UserError: an epoch has no batch.
    """

    def __init__(
        self,
        rows: Dataset,
        args: TrainingArguments,
        accelerator: Accelerator,
        sequence: SequenceGroup | None,
    ):
        self.rows = rows
        self.args = args
        self.epoch = 0
        self.accumulated = args.gradient_accumulation_steps
        self.loader = _loader(
            rows,
            self._sampler(sequence),
            args.train_batch_size,
            args,
            accelerator,
            # An epoch may be read ahead of its first step, which must not move torch's numbers.
            torch.Generator(),
        )
        self.batches = len(self.loader)
        if not self.batches:
            raise UserError(
                f"dataloader_drop_last=true: {len(rows)} rows are fewer than a batch of all processes; leave it out"
            )
        self.steps_per_epoch = math.ceil(self.batches / self.accumulated)

    def _sampler(self, sequence: SequenceGroup | None) -> Sampler[int]:
        args = self.args
        if args.train_sampling_strategy == "sequential":
            return SequentialSampler(self.rows)  # type: ignore[arg-type]
        if args.train_sampling_strategy == "random":
            return RandomSampler(self.rows)  # type: ignore[arg-type]
        groups = args.world_size
        if sequence is not None:
            groups = args.world_size // sequence.size
        order = ByLength(
            lengths=list(self.rows["length"]),
            rows=args.train_batch_size * self.accumulated * groups,
            seed=_seed(args),
            epoch=lambda: self.epoch,
        )
        if sequence is None:
            return order
        return SharedBatches(order, args.train_batch_size, args.world_size, sequence.size)

    def total_steps(self) -> int:
        """Optimizer steps of the run, by max_steps or num_train_epochs."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        return math.ceil(self.args.num_train_epochs * self.steps_per_epoch)

    def epochs(self, step: int) -> float:
        """Epochs that are done after so many steps."""
        # The last step of an epoch may have fewer micro-batches than the others.
        epoch = (step - 1) // self.steps_per_epoch
        done = (step - epoch * self.steps_per_epoch) * self.accumulated
        return epoch + min(done, self.batches) / self.batches

    def steps(self, first: int, last: int) -> Iterator[list[Inputs]]:
        """The micro-batches of each step from `first` up to `last`, exclusive."""
        for step in range(first, last):
            at = step % self.steps_per_epoch
            if step == first or at == 0:
                self.epoch = step // self.steps_per_epoch
                self.loader.set_epoch(self.epoch)  # type: ignore[attr-defined]
                loader = self.loader
                if at:
                    loader = skip_first_batches(loader, at * self.accumulated)
                batches = iter(loader)
            left = self.batches - at * self.accumulated
            yield list(itertools.islice(batches, min(self.accumulated, left)))


def announced_steps(
    steps: Iterator[list[Inputs]],
    source: BatchSource,
    accumulated: int,
) -> Iterator[list[Inputs]]:
    """Steps in order, their micro-batches announced to a source ahead of their turn."""
    reading = source.ahead
    if reading is None:
        return steps

    def expect(step: list[Inputs]) -> None:
        for inputs in step:
            source.expect(inputs)

    most = max(1, MOST_STEPS // accumulated)
    return ahead(steps, expect, lambda: reading.room, hold=most)


def held_out_loader(
    rows: Dataset,
    args: TrainingArguments,
    accelerator: Accelerator,
    sequence: SequenceGroup | None,
) -> DataLoader:
    """Batches of held-out rows, in the same order in each measurement."""
    one_by_one = SequentialSampler(rows)  # type: ignore[arg-type]
    order: Iterable[int] = one_by_one
    if sequence is not None:
        order = SharedBatches(one_by_one, args.eval_batch_size, args.world_size, sequence.size)
    elif args.train_sampling_strategy == "group_by_length":
        grouped = LengthGroupedSampler(
            args.eval_batch_size,
            lengths=list(rows["length"]),
            generator=torch.Generator().manual_seed(_seed(args)),
        )
        order = list(grouped)  # it would draw anew each time it is iterated
    return _loader(rows, order, args.eval_batch_size, args, accelerator)


def announced_batches(loader: DataLoader, source: BatchSource) -> Iterator[Inputs]:
    """A loader's batches, each announced to a source ahead of its turn."""
    reading = source.ahead
    if reading is None:
        yield from loader
        return

    def collated() -> Iterator[Inputs]:
        # The order is the same each time it is iterated. The loader itself does not run
        # ahead, because it tells accelerate which rows of its last batch are repeated.
        for numbers in loader.batch_sampler:  # type: ignore[union-attr]
            yield collate([loader.dataset[number] for number in numbers])

    coming = ahead(collated(), source.expect, lambda: reading.room)
    for inputs in loader:
        next(coming, None)
        yield inputs
