"""The order of the training rows, which depends on the seed and the epoch only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.data import Sampler


class ByLength(Sampler[int]):
    """Shuffles rows such that those of one optimizer step have similar lengths.

    The order depends neither on other random draws nor on how a step's rows are divided into devices and accumulation
    steps. So a resumed run sees the rows of an uninterrupted one, and a run on N devices those of a run on one device.

    Args:
        lengths: tokens of each row.
        rows: of an optimizer step: batch size x accumulation steps x processes. An epoch consists of full steps; it leaves
            out different rows each time.
        seed: of the order. epoch: returns the epoch's number; called when an epoch begins.
    """

    # Steps that are sorted together: more mean less padding and less shuffling.
    _SORTED = 50

    def __init__(self, lengths: Sequence[int], rows: int, seed: int, epoch: Callable[[], int]):
        self.lengths, self.rows, self.seed, self.epoch = lengths, rows, seed, epoch

    def __len__(self) -> int:
        count = len(self.lengths)
        return count if count < self.rows else count - count % self.rows

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch())
        order = torch.randperm(len(self.lengths), generator=generator)[: len(self)].tolist()
        together = self.rows * max(1, min(self._SORTED, len(self) // (4 * self.rows)))
        steps: list[list[int]] = []
        for begin in range(0, len(order), together):
            block = sorted(order[begin : begin + together], key=lambda i: -self.lengths[i])
            steps += [block[i : i + self.rows] for i in range(0, len(block), self.rows)]
        # The longest step comes first, so that a lack of memory shows at once.
        longest = max(range(len(steps)), key=lambda at: self.lengths[steps[at][0]])
        places = [at for at in torch.randperm(len(steps), generator=generator).tolist() if at != longest]
        return (row for at in [longest, *places] for row in steps[at])
