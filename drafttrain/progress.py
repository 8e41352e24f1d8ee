"""One progress display: a bar with rate and time left on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_EVERY = 15.0  # seconds between plain lines


class Progress:
    """Counts towards a total; a context manager.

    Args:
        label: what goes on.
        total: the goal; None if it is not known.
        unit: what is counted, plural.
    """

    def __init__(self, label: str, total: int | None, unit: str):
        self.label, self.total, self.unit = label, total, unit
        self.done = self.earlier = 0
        self.note = ""
        self.began = self.printed = time.monotonic()
        self.bar: Bar | None = None
        if sys.stderr.isatty():
            from rich.console import Console

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]} {task.fields[note]}"),
            )
            self.bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self.task = self.bar.add_task(label, total=total, rate="", note="")

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.done > self.earlier:
            self._print()

    def start_at(self, done: int) -> None:
        """Begins with what an earlier run has done, which does not count for the rate."""
        self.done = self.earlier = done
        self._show()

    def advance(self, count: int = 1, note: str = "") -> None:
        """`count` more are done; `note` is shown behind the counts."""
        self.done += count
        self.note = note
        self._show()

    @property
    def rate(self) -> float:
        """Units per second in this run."""
        return (self.done - self.earlier) / max(time.monotonic() - self.began, 1e-9)

    def _show(self) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, rate=f"{self.rate:.3g} {self.unit}/s", note=self.note)
        elif time.monotonic() - self.printed >= _EVERY:
            self._print()

    def _print(self) -> None:
        self.printed = time.monotonic()
        line = f"{self.label}: {self.done}" + (f" of {self.total}" if self.total else "") + f" {self.unit}"
        line += f", {self.rate:.3g}/s"
        if self.total and self.rate > 0:
            minutes, seconds = divmod(round(max(self.total - self.done, 0) / self.rate), 60)
            line += f", {minutes}:{seconds:02d} left"
        print(f"{line}, {self.note}" if self.note else line, file=sys.stderr, flush=True)
