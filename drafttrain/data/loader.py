"""From stored conversations to training batches."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from drafttrain.batch import Batch
from drafttrain.errors import UserError


def training_rows(records: Dataset, max_length: int, validation: float, seed: int) -> tuple[Dataset, Dataset | None]:
    """Cuts conversations to max_length tokens, drops those without two response tokens left, and splits some off.

    Args:
        records: rows with `tokens` and `spans` (response ranges, end exclusive).
        validation: share of rows held out, 0 for none; at least one row if not zero.

    Returns:
        (train, held out or None), rows {tokens, spans, length, index}; index is unique over both.

    Raises:
        UserError: nothing is left to train on.
    """

    def cut(row: dict[str, Any], index: int) -> dict[str, Any]:
        # Nothing can stand before token 0, so a response that begins there has one anchor less.
        spans = [[a, min(b, max_length)] for a, b in row["spans"] if min(b, max_length) - max(a, 1) >= 2]
        tokens = row["tokens"][:max_length]
        return {"tokens": tokens, "spans": spans, "length": len(tokens), "index": index}

    drop = [name for name in records.column_names if name not in ("tokens", "spans")]
    rows = records.map(cut, with_indices=True, remove_columns=drop, desc="cutting to max_length")
    rows = rows.filter(lambda spans: len(spans) > 0, input_columns="spans", desc="dropping empty masks")
    if len(rows) == 0:
        raise UserError(
            f"no row of the data has two response tokens within max_length={max_length}; "
            "the loss mask would be empty: generate data, or raise max_length"
        )
    if validation <= 0 or len(rows) < 2:
        return rows, None
    held_out = min(max(1, round(len(rows) * validation)), len(rows) - 1)
    split = rows.train_test_split(test_size=held_out, seed=seed)
    return split["train"], split["test"]


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Right-pads rows.

    Returns:
        input_ids [b, s], lengths [b], response_mask [b, s], index [b]; and shift_labels [b, s], which hold 0 at every depth-0
        anchor and -100 elsewhere: the loop counts them to know the anchors of a whole optimizer step.
    """
    b, s = len(rows), max(row["length"] for row in rows)
    input_ids = torch.zeros(b, s, dtype=torch.long)
    response_mask = torch.zeros(b, s, dtype=torch.bool)
    for i, row in enumerate(rows):
        input_ids[i, : row["length"]] = torch.as_tensor(row["tokens"])
        for start, end in row["spans"]:
            response_mask[i, start:end] = True
    labels = torch.full((b, s), -100)
    labels[:, :-2][response_mask[:, 1:-1] & response_mask[:, 2:]] = 0
    return {
        "input_ids": input_ids,
        "lengths": torch.tensor([row["length"] for row in rows]),
        "response_mask": response_mask,
        "index": torch.tensor([row["index"] for row in rows]),
        "shift_labels": labels,
    }


def to_batch(inputs: dict[str, Tensor]) -> Batch:
    return Batch(inputs["input_ids"], inputs["lengths"], inputs["response_mask"], inputs["index"])
