"""JSON-lines files: read with errors that name file and line, written atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, row) of every line that is not blank.

    Raises:
        UserError: no such file, not UTF-8, or a line that is no JSON object.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a JSONL file, one JSON object per line")
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise UserError(f"{path} line {number}: {type(row).__name__} instead of a JSON object per line")
                    yield number, row
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path} line {number}: not JSON ({error}); the file must hold one JSON object per line"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text ({error}); convert it first") from error


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes rows to a temporary file beside `path` and renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
