"""The batches that a closed-form start and the choice of a tree read."""

from __future__ import annotations

import torch
from datasets import Dataset

from drafttrain.batch import Batch
from drafttrain.data.loader import collate
from drafttrain.states.source import BatchSource

# enough for a regression over a few thousand inputs and for accuracies; more changes little
_START_TOKENS = 60_000
# of a batch of them, where training batches are smaller: its figures are means over its tokens
_LEAST_TOKENS = 4096


def first_batches(
    rows: Dataset,
    device: torch.device,
    source: BatchSource,
    most: int,
) -> tuple[list[Batch], int]:
    """The first rows, about _START_TOKENS tokens, as batches whose states `source` reads ahead; and
    their number of tokens.

    A batch has at most as many tokens as one of training, `most`: a drafter that trains in a GPU's
    memory starts in it.
    """
    batches = list[Batch]()
    tokens = 0
    begin = 0
    most = max(most, _LEAST_TOKENS)
    while tokens < _START_TOKENS and begin < len(rows):
        part = [rows[i] for i in range(begin, min(begin + 8, len(rows)))]
        while len(part) > 1 and len(part) * max(row["length"] for row in part) > most:
            part.pop()
        begin += len(part)
        inputs = collate(part)
        source.expect(inputs)
        batches.append(Batch.of(inputs).to(device))
        tokens += sum(row["length"] for row in part)
    return batches, tokens
