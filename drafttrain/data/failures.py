"""Conversations that a server gave no answer to: why, how many, and the file that lists them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from drafttrain.credentials import redact
from drafttrain.errors import UserError
from drafttrain.files import append_row, read_jsonl, replacing


def one_line(text: str, most: int = 200) -> str:
    """A text from outside as part of a message: printable characters on one line."""
    line = ""
    for letter in " ".join(text.split())[:most]:
        if letter.isprintable():
            line += letter
        else:
            line += " "
    return line


class BadReply(Exception):
    """A reply that holds no answer. It costs one conversation, not the run.

    Attributes:
        reason: its kind, by which failures are counted, such as `HTTP 500` or `not JSON`.
        detail: one line about this reply.
        retry: whether another try in the same run may help; pause: seconds that the server asks to
            wait before.
    """

    def __init__(
        self,
        reason: str,
        detail: str = "",
        retry: bool = False,
        pause: float = 0.0,
    ):
        line = one_line(redact(detail))  # a server may repeat the key
        message = reason
        if line:
            message = f"{reason}: {line}"
        super().__init__(message)
        self.reason = reason
        self.detail = line
        self.retry = retry
        self.pause = pause


class Failures:
    """A process's failed conversations: counted by reason, and listed in DIR/failed-0003.jsonl.

    A line is {"id", "reason", "detail"}. The list keeps entries of earlier runs until their
    conversations are stored.
    """

    def __init__(self, directory: Path, rank: int):
        self.path = directory / f"failed-{rank:04d}.jsonl"
        self.counts: Counter[str] = Counter()
        self.last: BadReply | None = None

    def add(self, key: str, bad: BadReply) -> None:
        self.counts[bad.reason] += 1
        self.last = bad
        append_row(self.path, {"id": key, "reason": bad.reason, "detail": bad.detail})

    def settle(self, done: Collection[str]) -> None:
        """Drops what has been stored meanwhile from the lists of all processes."""
        # Another run, or process, may have answered what failed here.
        for path in self.path.parent.glob("failed-*.jsonl"):
            left = {}  # the last failure of each conversation
            try:
                for _, row in read_jsonl(path, growing=True):
                    key = str(row.get("id"))
                    if key not in done:
                        left[key] = row
            except UserError:
                if path.exists():
                    raise
            if not left:
                path.unlink(missing_ok=True)  # processes that end together all do this
            elif path == self.path:  # another process may be adding to its own
                with replacing(path) as part:
                    part.write_text("".join(json.dumps(row) + "\n" for row in left.values()))

    def __str__(self) -> str:
        """`HTTP 500 7, time-out 3`, most frequent first; '' without a failure."""
        return ", ".join(f"{reason} {count}" for reason, count in self.counts.most_common())
