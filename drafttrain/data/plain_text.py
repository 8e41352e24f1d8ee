"""Raw text as training rows, for pretraining a draft model from scratch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset

from drafttrain.errors import UserError
from drafttrain.target import Target

_SUFFIXES = (".txt", ".jsonl")


def is_text(data: str) -> bool:
    """True if `data` names a text file, not the folder of a data set."""
    return data.endswith(_SUFFIXES)


def _documents(path: Path) -> Iterator[str]:
    """A .txt file is one document; a .jsonl file one per line, under "text"."""
    if path.suffix == ".txt":
        yield path.read_text(encoding="utf-8")
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    yield str(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f'{path}:{number} is no {{"text": "..."}} ({error!r}); mend or delete that line'
                ) from error


def load_text(data: str, target: Target, max_length: int) -> Dataset:
    """Documents one after the other, an end-of-sequence token behind each, cut into rows of max_length tokens.

    Returns:
        Rows {id, tokens, spans}; all of a row is to be learned.

    Raises:
        UserError: no such file, a line that is not understood, or no text in it.
    """
    path = Path(data).expanduser()
    if not path.is_file():
        raise UserError(
            f"data={data!r}: no such text file; give a .txt, a .jsonl of {{'text': ...}}, or a data set folder"
        )

    def rows() -> Iterator[dict[str, Any]]:
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
