"""Raw text as training rows, for pretraining a draft model from scratch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset

from drafttrain.errors import UserError
from drafttrain.files import Json, read_jsonl
from drafttrain.target import Target

_SUFFIXES = (".txt", ".jsonl")


def is_text(data: str) -> bool:
    """Whether `data` names a text file instead of the folder of a data set."""
    return data.endswith(_SUFFIXES)


def _documents(path: Path) -> Iterator[str]:
    """A .txt file is one document; a .jsonl file one per line, under "text"."""
    if path.suffix == ".txt":
        yield path.read_text(encoding="utf-8")
        return
    wanted = 'write {"text": "..."} or delete the line'
    for number, row in read_jsonl(path, fix=wanted):
        if "text" not in row:
            raise UserError(f"{path} line {number}: no key 'text'; {wanted}")
        yield str(row["text"])


def load_text(data: str, target: Target, max_length: int) -> Dataset:
    """Reads documents, puts an end-of-sequence token after each, and cuts the sequence into rows of max_length tokens.

    Returns:
        Rows {id, tokens, spans}; the span covers the row.

    Raises:
        UserError: no such file, a line without text, or an empty file.
    """
    path = Path(data).expanduser()
    if not path.is_file():
        raise UserError(
            f"data={data!r}: no such text file; give a .txt, a .jsonl of {{'text': ...}}, or a data set folder"
        )

    def rows() -> Iterator[Json]:
        end = [target.tokenizer.eos_token_id] if target.tokenizer.eos_token_id is not None else []
        held: list[int] = []
        count = 0
        for document in _documents(path):
            held += target.tokenizer(document, add_special_tokens=False)["input_ids"] + end
            while len(held) >= max_length:
                yield {"id": f"text{count}", "tokens": held[:max_length], "spans": [[0, max_length]]}
                held, count = held[max_length:], count + 1
        if len(held) > len(end):
            yield {"id": f"text{count}", "tokens": held, "spans": [[0, len(held)]]}

    made = list(rows())
    if not made:
        raise UserError(f"data={data!r} holds no text")
    return Dataset.from_list(made)
