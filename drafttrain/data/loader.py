"""Training rows of conversations and raw text, the vocabulary of responses, and batches.

A row is {tokens, spans, length, index}; a packed row has a list of indices and `documents`, the
length of each conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import torch
from datasets import Dataset
from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.files import Json, read_jsonl, read_text
from drafttrain.target import Target

Row = TypeVar("Row")
_OPEN_ROWS = 64  # number of open bins: more pack tighter but search slower


def cut_row(
    tokens: list[int],
    spans: list[list[int]],
    index: int,
    max_length: int,
) -> Json:
    """The training row of a conversation's first tokens; without spans of less than two tokens."""
    kept = []
    for start, end in spans:
        end = min(end, max_length)
        # No token precedes token 0, so a response that begins there has one anchor less.
        if end - max(start, 1) >= 2:
            kept.append([start, end])
    tokens = tokens[:max_length]
    return {"tokens": tokens, "spans": kept, "length": len(tokens), "index": index}


def training_rows(
    records: Dataset,
    max_length: int,
    validation: float,
    seed: int,
) -> tuple[Dataset, Dataset | None]:
    """Cuts conversations to max_length tokens, and splits some off.

    Drops those without two response tokens left.

    Args:
        records: rows with `tokens` and `spans` (response ranges, end exclusive).
        validation: share of rows held out, 0 for none; at least one row if not zero.

    Returns:
        (train, held out or None), rows {tokens, spans, length, index}; index is unique over both.

    Raises:
        UserError: nothing is left to train on.
    """

    def cut(row: Json, index: int) -> Json:
        return cut_row(row["tokens"], row["spans"], index, max_length)

    drop = [name for name in records.column_names if name not in ("tokens", "spans")]
    rows = records.map(
        cut,
        with_indices=True,
        remove_columns=drop,
        desc="cutting to max_length",
    )
    rows = rows.filter(
        lambda spans: len(spans) > 0,
        input_columns="spans",
        desc="dropping empty masks",
    )
    if len(rows) == 0:
        raise UserError(
            f"no row of the data has two response tokens within max_length={max_length}; "
            "the loss mask would be empty: generate data, or raise max_length"
        )
    if validation <= 0 or len(rows) < 2:
        return rows, None
    # At least one row on each side.
    held_out = min(max(1, round(len(rows) * validation)), len(rows) - 1)
    split = rows.train_test_split(test_size=held_out, seed=seed)
    return split["train"], split["test"]


def without_reasoning(records: Dataset, data: str) -> Dataset:
    """The rows with spans that leave out the reasoning.

    Raises UserError: rows that do not say which tokens are reasoning.
    """
    unknown = sum(row is None for row in records["reasoning"])
    if unknown:
        raise UserError(
            f"loss_on='answer', but {unknown} of {len(records)} rows of data={data!r} do not say which tokens are reasoning "
            "(written by an earlier release, or the chat template keeps it as content); generate them again, or set loss_on=all"
        )

    def shortened(row: Json) -> Json:
        spans = []
        for count, (start, end) in zip(row["reasoning"], row["spans"], strict=True):
            spans.append([start + count, end])
        return {"spans": spans}

    return records.map(shortened, desc="leaving out reasoning")


# -- raw text, for pretraining a draft model from scratch ------------------------------------------


def is_text(data: str) -> bool:
    """Whether `data` names a text file instead of the folder of a data set."""
    return data.endswith((".txt", ".jsonl"))


def _documents(path: Path) -> Iterator[str]:
    """A .txt file is one document; a .jsonl file one per line, under "text"."""
    if path.suffix == ".txt":
        yield read_text(
            path,
            "data",
            "give a .txt, a .jsonl of {'text': ...}, or a data set folder",
        )
        return
    wanted = 'write {"text": "..."} or delete the line'
    for number, row in read_jsonl(path, fix=wanted):
        if not isinstance(row.get("text"), str):
            raise UserError(f"{path} line {number}: no text under the key 'text'; {wanted}")
        yield row["text"]


def load_text(data: str, target: Target, max_length: int) -> Dataset:
    """Reads documents as rows of max_length tokens.

    An end-of-sequence token follows each document; the sequence is then cut.

    Returns:
        Rows {id, tokens, spans}; the span covers the row.

    Raises:
        UserError: no such file, a line without text, or an empty file.
    """
    path = Path(data).expanduser()
    tokenizer = target.tokenizer
    if not path.is_file():
        raise UserError(
            f"data={data!r}: no such text file; give .txt, .jsonl of {{'text': ...}}, or a data set"
        )

    def rows() -> Iterator[list[int]]:
        end = []  # of a document
        if tokenizer.eos_token_id is not None:
            end = [tokenizer.eos_token_id]
        # Documents follow each other without regard to rows.
        held: list[int] = []
        for document in _documents(path):
            held += tokenizer(document, add_special_tokens=False)["input_ids"] + end
            full = len(held) - len(held) % max_length
            for begin in range(0, full, max_length):
                yield held[begin : begin + max_length]
            held = held[full:]
        if len(held) > len(end):
            yield held

    made = []
    for i, row in enumerate(rows()):
        made.append({"id": f"text{i}", "tokens": row, "spans": [[0, len(row)]]})
    if not made:
        raise UserError(f"data={data!r} holds no text")
    return Dataset.from_list(made)


# -- the drafter's vocabulary ----------------------------------------------------------------------


def count_tokens(records: Iterable[Json], vocab_size: int) -> Tensor:
    """Occurrences [v] int64 of each id in the responses of records {tokens, spans}.

    Raises UserError: an id beyond v.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for record in records:
        tokens = torch.as_tensor(record["tokens"])
        for start, end in record["spans"]:
            # A larger id makes the result longer.
            found = torch.bincount(tokens[start:end], minlength=vocab_size)
            if len(found) > vocab_size:
                raise UserError(
                    f"data: token {len(found) - 1} is outside the target's vocabulary of {vocab_size}; use its own data"
                )
            counts += found
    return counts


def keep_frequent(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """The `size` most frequent ids [d] int64, in ascending order; all if size is 0 or at least v.

    Of equal counts the smaller id wins: tokenizers number their tokens from frequent to rare.

    Args:
        counts: [v] int64. always: ids kept regardless of their count (end of sequence).
    """
    if not 0 < size < len(counts):
        return torch.arange(len(counts))
    ranked = counts.clone()
    ranked[list(always)] = counts.max() + 1  # before all others
    kept = ranked.sort(descending=True, stable=True).indices[:size]
    return kept.sort().values


# -- packing and batches ---------------------------------------------------------------------------


def fill_rows(lengths: list[int], max_length: int, seed: int) -> list[list[int]]:
    """Assigns conversations to rows of at most max_length tokens, first fit.

    The order depends on the seed only.

    Returns the conversation numbers of each row. No length may exceed max_length.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    packed: list[list[int]] = []
    free: list[int] = []  # tokens by row
    first_open = 0
    for number in order:
        # First fit among the open rows.
        place = first_open
        while place < len(packed) and free[place] < lengths[number]:
            place += 1
        if place == len(packed):
            packed.append([])
            free.append(max_length)
            first_open = max(first_open, len(packed) - _OPEN_ROWS)  # the oldest row closes
        packed[place].append(number)
        free[place] -= lengths[number]
    return packed


def join_rows(members: list[Json]) -> Json:
    """One packed row from several rows; its index and documents hold the index and length of each."""
    result: Json = {"tokens": [], "spans": [], "index": [], "documents": []}
    for member in members:
        begin = len(result["tokens"])
        for start, end in member["spans"]:
            result["spans"].append([begin + start, begin + end])
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


def similar_rows(
    rows: Iterable[Row],
    most: int,
    length: Callable[[Row], int] = itemgetter("length"),  # type: ignore[assignment]  # of stored rows
) -> list[list[Row]]:
    """Rows of similar length together: at most `most` tokens with padding, or a single row."""
    made: list[list[Row]] = []
    for row in sorted(rows, key=length):
        # Padding to the longest row counts, which is the last in a sorted order.
        if not made or length(row) * (len(made[-1]) + 1) > most:
            made.append([])
        made[-1].append(row)
    return made


def collate(rows: list[Json]) -> dict[str, Tensor]:
    """Right-pads rows, packed or not.

    Returns:
        input_ids [b, s], lengths [b], response_mask [b, s], index [c], for packed rows documents
        [c, 3], all as in `Batch`;
        and shift_labels [b, s], 0 at every depth-0 anchor and -100 elsewhere, which the trainer
        counts per optimizer step.
    """
    b = len(rows)
    s = max(row["length"] for row in rows)
    input_ids = torch.zeros(b, s, dtype=torch.long)  # [b, s]
    response_mask = torch.zeros(b, s, dtype=torch.bool)
    documents: list[list[int]] = []
    index: list[int] = []
    for i, row in enumerate(rows):
        input_ids[i, : row["length"]] = torch.as_tensor(row["tokens"])
        for start, end in row["spans"]:
            response_mask[i, start:end] = True
        if "documents" not in row:
            index.append(row["index"])
            continue
        index += row["index"]
        start = 0
        for length in row["documents"]:
            documents.append([i, start, length])
            # No anchor precedes it: an earlier conversation's response has ended.
            response_mask[i, start] = False
            start += length

    # An anchor's next two tokens are a response's.
    labels = torch.full((b, s), -100)  # [b, s]
    learned = response_mask[:, 1:-1] & response_mask[:, 2:]  # [b, s - 2] bool
    labels[:, :-2][learned] = 0
    batch = {
        "input_ids": input_ids,
        "lengths": torch.tensor([row["length"] for row in rows]),
        "response_mask": response_mask,
        "index": torch.tensor(index),
        "shift_labels": labels,
    }
    if documents:
        batch["documents"] = torch.tensor(documents)
    return batch
