"""Packing: every conversation once, rows never too long, the same rows for the same seed."""

from __future__ import annotations

import torch
from datasets import Dataset

from drafttrain.batch import Batch
from drafttrain.data.loader import collate, pack_rows, training_rows


def rows(count=40, max_length=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    records = []
    for i in range(count):
        length = int(torch.randint(4, 60, (1,), generator=generator))
        records.append({"id": f"r{i}", "tokens": [i] * length, "spans": [[0, 2], [3, length]]})
    return training_rows(Dataset.from_list(records), max_length, 0.0, 0)[0]


def test_every_conversation_comes_once_and_rows_are_full():
    single = rows()
    packed = pack_rows(single, 50, seed=3)
    assert sorted(index for row in packed for index in row["index"]) == sorted(single["index"])
    assert all(len(row["tokens"]) == row["length"] == sum(row["documents"]) <= 50 for row in packed)
    assert len(packed) <= 1.25 * sum(single["length"]) / 50
    by_index = {row["index"]: row for row in single}
    for row in packed:
        start = 0
        spans = []
        for index, length in zip(row["index"], row["documents"], strict=True):
            assert row["tokens"][start : start + length] == by_index[index]["tokens"]
            spans += [[a + start, b + start] for a, b in by_index[index]["spans"]]
            start += length
        assert row["spans"] == spans


def test_rows_follow_from_the_seed():
    single = rows()
    first, again, other = (pack_rows(single, 50, seed)["index"] for seed in (3, 3, 4))
    assert list(first) == list(again) != list(other)


def test_packed_batches_have_the_anchors_of_single_ones():
    single = rows(8)
    packed = pack_rows(single, 50, seed=0)
    plain = collate(list(single))
    dense = collate(list(packed))
    assert (plain["shift_labels"] == 0).sum() == (dense["shift_labels"] == 0).sum()
    batch = Batch.of(dense)
    unpacked = Batch.of(plain)
    assert len(batch.index) == 8 and batch.documents is not None and unpacked.documents is None
    where, place = batch.anchors()
    tokens = batch.input_ids.flatten()
    assert torch.equal(
        tokens[where], tokens[where + 1]
    )  # a conversation repeats its number, so no anchor is a last token
    assert len(where) == int(batch.lengths.sum() - 8) == len(unpacked.anchors()[0])
    starts = batch.conversations()[:, 1] + batch.conversations()[:, 0] * batch.input_ids.shape[1]
    assert torch.equal(where[place == 0], starts)
    part = batch.first_rows(1)
    assert (
        len(part.index)
        == int((batch.conversations()[:, 0] == 0).sum())
        == len(part.conversations())
    )
