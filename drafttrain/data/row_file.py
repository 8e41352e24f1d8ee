"""A JSON-lines file as a sequence of rows. Memory holds their offsets only: 16 bytes per row."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar, overload

from drafttrain.errors import UserError
from drafttrain.files import Json, parse_line

Row = TypeVar("Row")
_TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".xlsx")  # by the ends of files' names


def line_starts(path: Path) -> Iterator[tuple[int, int]]:
    """(line number, offset) of every line that is not blank, as `read_jsonl` counts them.

    Raises UserError: no such file.
    """
    try:
        with path.open("rb") as file:
            start = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, start
                start += len(line)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a JSONL file") from error


def check_row_file(path: Path, key: str, fix: str) -> None:
    """Refuses a table, or one JSON array, before its lines are read as rows.

    Args:
        key: the setting that names the file. fix: what the user can do.

    Raises UserError.
    """
    kind = ""
    if path.suffix.lower() in _TABLES:
        kind = f"a {path.suffix.lower()} table"
    elif path.suffix != ".jsonl" and path.is_file():
        with path.open("rb") as file:
            if file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                kind = "a JSON array"
    if kind:
        raise UserError(
            f"{key}={str(path)!r} is {kind}, and rows are read from JSON lines, one object per line; {fix}"
        )


class RowFile(Sequence[Row], Generic[Row]):
    """Rows of a file, each read and parsed when it is asked for.

    Args:
        read: makes a row of a JSON object and its place, `FILE line 7`.
        places: (line number, offset) of the rows; see `line_starts`.

    Raises:
        UserError: on access, a line that is not a JSON object, or what `read` raises.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Json, str], Row],
        places: Iterable[tuple[int, int]],
    ):
        self.path = path
        self.read = read
        # Two 8-byte integers per row.
        self._numbers = array("q")
        self._starts = array("q")
        for number, start in places:
            self._numbers.append(number)
            self._starts.append(start)
        self._file = path.open("rb")

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = self._numbers[index]
        self._file.seek(self._starts[index])
        row = parse_line(self._file.readline(), self.path, number)
        return self.read(row, f"{self.path} line {number}")

    def chosen(self, indices: Iterable[int]) -> RowFile[Row]:
        """The rows of these indices."""
        places = ((self._numbers[i], self._starts[i]) for i in indices)
        return RowFile(self.path, self.read, places)

    def shuffled(self, seed: int) -> Iterator[Row]:
        """All rows in an order that depends on their number and the seed only."""
        order = array("l", range(len(self)))  # a list would take five times the memory
        random.Random(seed).shuffle(order)
        return (self[index] for index in order)
