"""Conversations as a memory-mapped table: the schema of a line, and the Arrow file of all lines.

The file holds checked rows only, appears complete or not at all, and is built again if it is
damaged or a part has changed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import pyarrow as pa
from datasets import Dataset, Features, Value
from datasets import Sequence as ListOf
from filelock import FileLock
from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from drafttrain.errors import UserError
from drafttrain.files import cache_folder, parse_line, read_jsonl, replacing, writing

LINE_FIX = "delete that line to redo its conversation"
_LAYOUT = 4  # of the Arrow file; part of its name
_BATCH_ROWS = 1000
_COLUMNS = Features(
    {
        "id": Value("string"),
        "tokens": ListOf(Value("int32")),
        "spans": ListOf(ListOf(Value("int32"))),
        "finish": ListOf(Value("string")),
        "source": Value("string"),
        "reasoning": ListOf(Value("int32")),
        "part": Value("int32"),
        "images": ListOf(Value("string")),
    }
)
_COUNTS = (
    "conversations",
    "rows",
    "responses",
    "response_tokens",
    "reasoning_tokens",
    "truncated",
    "images",
)
Count = Annotated[int, Field(ge=0, lt=2**31)]


class CountedLine(TypedDict):
    """What is counted of a line."""

    id: Annotated[str, Field(min_length=1)]
    spans: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    finish: list[str]
    reasoning: NotRequired[list[Count]]
    part: NotRequired[Count]
    images: NotRequired[list[str]]


class StoredLine(CountedLine):
    """A line of a data set's parts; `data/store.py` describes it."""

    tokens: Annotated[list[Count], Field(min_length=1)]
    source: str


class StoredIds:
    """Which conversations a data set holds.

    Each update continues where the last one ended. Tokens are not checked; `cached_records` does
    that.

    Attributes:
        ids: of all lines so far.
    """

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._ends: dict[Path, tuple[int, int]] = {}  # part -> (lines, bytes) that have been read

    @property
    def counts(self) -> dict[str, int]:
        """Number of conversations, rows, responses, response_tokens, reasoning_tokens, truncated
        responses and images of prompts; without reasoning_tokens and images of 0, and rows where each
        conversation is one.
        """
        counts = dict(self._counts)
        if counts["rows"] == counts["conversations"]:
            del counts["rows"]
        for name in ("reasoning_tokens", "images"):
            if not counts[name]:
                del counts[name]
        return counts

    def update(self, parts: Sequence[Path]) -> None:
        """Reads the new complete lines of the parts. Raises UserError: a damaged line."""
        for part in parts:
            # Parts only grow, so lines that have been read are not read again.
            number, end = self._ends.get(part, (0, 0))
            with part.open("rb") as file:
                file.seek(end)
                for line in file:
                    if not line.endswith(b"\n"):  # its writer has not finished
                        break
                    number += 1
                    end += len(line)
                    if line.strip():
                        self._add(line, part, number)
            self._ends[part] = (number, end)

    def _add(self, line: bytes, part: Path, number: int) -> None:
        found = parse_line(line, part, number, LINE_FIX, CountedLine)
        if found["id"] in self.ids:  # several processes may answer the same prompt
            return
        self.ids.add(found["id"])
        if "part" not in found:
            self._counts["conversations"] += 1
        self._counts["rows"] += 1
        self._counts["reasoning_tokens"] += sum(found.get("reasoning", ()))
        self._counts["images"] += len(found.get("images", ()))
        self._counts["responses"] += len(found["spans"])
        for start, stop in found["spans"]:
            self._counts["response_tokens"] += stop - start
        self._counts["truncated"] += found["finish"].count("length")


def _broken_rule(line: StoredLine, vocab_size: int) -> str:
    """The rule that a line breaks beyond its schema; '' for a sound one."""
    tokens = line["tokens"]
    spans = line["spans"]
    end = 0
    for start, stop in spans:
        if not end <= start <= stop <= len(tokens):
            return f"spans={spans}: spans must be ascending ranges within the {len(tokens)} tokens"
        end = stop
    if len(line["finish"]) != len(spans):
        return (
            f"finish={line['finish']}: there must be one entry for each of the {len(spans)} spans"
        )
    if "reasoning" in line:
        reasoning = line["reasoning"]
        rule = f"reasoning={reasoning}: there must be one count for each span, at most its length"
        if len(reasoning) != len(spans):
            return rule
        for count, (start, stop) in zip(reasoning, spans, strict=True):
            if count > stop - start:
                return rule
    if max(tokens) >= vocab_size:
        return f"tokens: {max(tokens)} is outside the target's vocabulary of {vocab_size}"
    return ""


def _rows(parts: Sequence[Path], vocab_size: int) -> Iterator[StoredLine]:
    """Checked rows, each id once: several processes may have answered the same prompt."""
    seen = set()
    for part in parts:
        lines = read_jsonl(part, growing=True, fix=LINE_FIX, schema=StoredLine)
        for number, line in lines:
            rule = _broken_rule(line, vocab_size)
            if rule:
                raise UserError(f"{part} line {number}: {rule}; {LINE_FIX}")
            if line["id"] not in seen:  # several processes may answer the same prompt
                seen.add(line["id"])
                yield line


def cached_records(root: Path, parts: Sequence[Path], vocab_size: int) -> Dataset:
    """The conversations of the parts.

    Raises UserError: a damaged line, or no place for the Arrow file.

    The file lies in root/arrow with what datasets derives from it; if nothing can be written there,
    in drafttrain's cache.
    """
    # The file name tells when a part has changed.
    stamps = [(part.name, part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    folder = _writable_folder(root)
    path = folder / f"records-{_short_hash(json.dumps([_LAYOUT, vocab_size, stamps]))}.arrow"
    with writing(path), FileLock(folder / ".lock"):
        # A damaged file, also one that datasets derived from it, is built again.
        for file in folder.glob("*.arrow"):
            if not _is_sound(file):
                file.unlink()
        if not path.exists():
            _write(path, _rows(parts, vocab_size))
    return Dataset.from_file(str(path))


def _writable_folder(root: Path) -> Path:
    """root/arrow, or a folder of drafttrain's cache if the data set is read-only."""
    beside = root / "arrow"
    cached = cache_folder() / "arrow" / _short_hash(str(root.resolve()))
    for place in (beside, cached):
        try:
            place.mkdir(parents=True, exist_ok=True)
            # Permissions do not tell whether a file can be written; writing one does.
            with tempfile.TemporaryFile(dir=place):
                return place
        except OSError:
            continue
    raise UserError(
        f"data={str(root)!r}: neither {beside} nor {cached} can be written; set DRAFTTRAIN_CACHE"
    )


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_sound(path: Path) -> bool:
    """Whether an Arrow file is complete and its offsets are in order.

    Damaged offsets would crash the reader of a row.
    """
    try:
        with pa.memory_map(str(path)) as source:
            pa.ipc.open_stream(source).read_all().validate(full=True)
    except (pa.ArrowException, OSError):
        return False
    return True


def _write(path: Path, rows: Iterator[StoredLine]) -> None:
    """Writes the Arrow file, complete or not at all.

    `Dataset.from_generator` does so too, at an eighth of the speed, and wraps a damaged line's
    error.
    """
    schema = _COLUMNS.arrow_schema
    with (
        replacing(path) as file,
        pa.OSFile(str(file), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as stream,
    ):
        while True:
            batch = list(itertools.islice(rows, _BATCH_ROWS))
            if not batch:
                return
            stream.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
