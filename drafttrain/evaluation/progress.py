"""Progress with rate and time left: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class Meter:
    """Counts steps of one stage; use as a context manager.

    Args:
        title: what is going on.
        total: steps in all; `done` of them were finished before (they count in no rate).
    """

    def __init__(self, title: str, total: int, done: int = 0):
        self.title, self.total, self.done, self.before = title, total, done, done
        self.console = Console(stderr=True)
        self.started = self.printed = time.monotonic()
        self.bar: Progress | None = None
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=self.console)
            self.task = self.bar.add_task(title, total=total, completed=done, note="")

    def __enter__(self) -> Meter:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif kind is None:
            self._line("")

    def advance(self, note: str = "") -> None:
        """One step done; `note` is shown behind the counts."""
        self.done += 1
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, note=note)
        elif time.monotonic() - self.printed >= _SECONDS_BETWEEN_LINES:
            self._line(note)

    def _line(self, note: str) -> None:
        self.printed = time.monotonic()
        rate = (self.done - self.before) / max(self.printed - self.started, 1e-9)
        left = f", {(self.total - self.done) / rate:.0f} s left" if rate and self.done < self.total else ""
        print(f"{self.title}: {self.done}/{self.total} ({rate:.2f}/s{left}) {note}".rstrip(), flush=True)
