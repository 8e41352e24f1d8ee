"""Stored conversations as training rows, packed rows and collated batches.

A row is {tokens, spans, length, index}; a packed row has a list of indices and `documents`, the length of each conversation.
"""

from __future__ import annotations

import torch
from datasets import Dataset
from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.files import Json


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

    def cut(row: Json, index: int) -> Json:
        # No token precedes token 0, so a response that begins there has one anchor less.
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


# Number of open bins: more pack tighter but search slower.
_OPEN_ROWS = 64


def fill_rows(lengths: list[int], max_length: int, seed: int) -> list[list[int]]:
    """Assigns conversations to rows of at most max_length tokens: first fit, in an order that the seed shuffles.

    The same lengths and seed give the same rows.

    Args:
        lengths: of the conversations, none above max_length.

    Returns:
        Conversation numbers by row.
    """
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    packed: list[list[int]] = []
    room: list[int] = []
    first_open = 0
    for number in order:
        fits = (i for i in range(first_open, len(packed)) if room[i] >= lengths[number])
        place = next(fits, None)
        if place is None:
            place = len(packed)
            packed.append([])
            room.append(max_length)
            first_open = max(first_open, len(packed) - _OPEN_ROWS)
        packed[place].append(number)
        room[place] -= lengths[number]
    return packed


def join_rows(members: list[Json]) -> Json:
    """One packed row from several rows; its index and documents hold the index and length of each."""
    result: Json = {"tokens": [], "spans": [], "index": [], "documents": []}
    for member in members:
        begin = len(result["tokens"])
        result["spans"] += [[begin + start, begin + end] for start, end in member["spans"]]
        result["tokens"] += member["tokens"]
        result["index"].append(member["index"])
        result["documents"].append(member["length"])
    return {**result, "length": len(result["tokens"])}


def pack_rows(rows: Dataset, max_length: int, seed: int) -> Dataset:
    """Packs rows into rows of at most max_length tokens."""

    def joined(row: Json) -> Json:
        return join_rows([rows[number] for number in row["members"]])

    members = Dataset.from_dict({"members": fill_rows(list(rows["length"]), max_length, seed)})
    return members.map(joined, remove_columns="members", desc="packing")


def collate(rows: list[Json]) -> dict[str, Tensor]:
    """Right-pads rows, packed or not.

    Returns:
        input_ids [b, s], lengths [b], response_mask [b, s], index [c], for packed rows documents [c, 3], all as in `Batch`;
        and shift_labels [b, s], 0 at every depth-0 anchor and -100 elsewhere, which the trainer counts per optimizer step.
    """
    b, s = len(rows), max(row["length"] for row in rows)
    input_ids = torch.zeros(b, s, dtype=torch.long)  # [b, s]
    response_mask = torch.zeros(b, s, dtype=torch.bool)
    for i, row in enumerate(rows):
        input_ids[i, : row["length"]] = torch.as_tensor(row["tokens"])
        for start, end in row["spans"]:
            response_mask[i, start:end] = True
    documents: list[list[int]] = []
    index: list[int] = []
    for i, row in enumerate(rows):
        index += row["index"] if "documents" in row else [row["index"]]
        start = 0
        for length in row.get("documents", ()):
            documents.append([i, start, length])
            response_mask[i, start] = (
                False  # no anchor precedes it, and the previous conversation's response ends before it
            )
            start += length
    labels = torch.full((b, s), -100)
    labels[:, :-2][response_mask[:, 1:-1] & response_mask[:, 2:]] = 0
    return {
        "input_ids": input_ids,
        "lengths": torch.tensor([row["length"] for row in rows]),
        "response_mask": response_mask,
        "index": torch.tensor(index),
        "shift_labels": labels,
        **({"documents": torch.tensor(documents)} if documents else {}),
    }
