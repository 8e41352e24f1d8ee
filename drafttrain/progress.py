"""One progress display: a bar on a terminal or in a notebook, else a line every 15 seconds, with
rate and time left.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

_LINE_SECONDS = 15.0  # between plain lines
hushed: set[int] = set()  # threads whose text goes to the log, see outcome.py


def plain_console(**options: Any) -> Console:
    """A console that shows text as it is: names of users' categories and files may look like
    markup, [bold] or :smile:.
    """
    return Console(
        markup=False,
        emoji=False,
        highlight=False,
        **options,
    )


def counted(count: int, units: str) -> str:
    """`1 conversation`, `2 conversations`. units: plural, with an s."""
    return f"{count} {units if count != 1 else units.removesuffix('s')}"


class _NotebookBar:
    """A bar of tqdm.auto, which notebooks show as a widget; has the methods of rich's that
    `Progress` calls.
    """

    def __init__(self, label: str, total: int | None, unit: str):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without ipywidgets it is text, and a warning says so
            from tqdm.auto import tqdm
        self.bar = tqdm(
            total=total,
            desc=label,
            unit=f" {unit}",
        )

    def start(self) -> None:
        pass

    def stop(self) -> None:
        self.bar.close()

    def update(self, task: object, completed: int, note: str, **_: str) -> None:
        self.bar.set_postfix_str(note, refresh=False)
        self.bar.update(completed - self.bar.n)


class Progress:
    """Counts `unit`s (plural) of the work `label` towards a total, None if that is not known; a
    context manager.
    """

    def __init__(self, label: str, total: int | None, unit: str):
        self.label = label
        self.total = total
        self.unit = unit
        self.done = self.earlier = self.said = 0  # said: in the last plain line
        self.note = ""
        self.share = 0.0
        self.began = self.printed = time.monotonic()
        self.bar: Bar | _NotebookBar | None = None
        self.task: Any = None
        if "ipykernel" in sys.modules and threading.get_ident() not in hushed:
            self.bar = _NotebookBar(label, total, unit)
        elif sys.stderr.isatty():
            fields = TextColumn(
                "{task.fields[rate]} {task.fields[left]} {task.fields[note]}",
                markup=False,
            )
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                fields,
            )
            self.bar = Bar(*columns, console=plain_console(stderr=True))
            self.task = self.bar.add_task(
                label,
                total=total,
                rate="",
                left="",
                note="",
            )

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.done > self.earlier and self.done != self.said:
            self._print()

    def start_at(self, done: int) -> None:
        """Starts from the count of an earlier run, which the rate leaves out."""
        self.done = self.earlier = done
        self._show()

    def advance(self, count: int = 1, note: str = "", share: float = 0.0) -> None:
        """Counts `count` more. note: shown behind the counts. share: spent part, 0 to 1, of another
        budget (time, tokens).

        The time left is the least of both.
        """
        self.done += count
        self.note = note
        self.share = share
        self._show()

    @property
    def rate(self) -> float:
        """Units per second in this run."""
        return (self.done - self.earlier) / max(time.monotonic() - self.began, 1e-9)

    def _left(self) -> str:
        """`3:20 left`, by the count or the other budget, whichever ends first; '' while nothing is
        known.
        """
        estimates = []
        if self.total and self.rate > 0:
            estimates.append(max(self.total - self.done, 0) / self.rate)
        if self.share > 0:
            estimates.append((time.monotonic() - self.began) * max(1 / self.share - 1, 0))
        minutes, seconds = divmod(round(min(estimates, default=0)), 60)
        if estimates:
            return f"{minutes}:{seconds:02d} left"
        return ""

    def _show(self) -> None:
        if self.bar is not None:
            rate = f"{self.rate:.3g} {self.unit}/s"
            self.bar.update(
                self.task,
                completed=self.done,
                rate=rate,
                left=self._left(),
                note=self.note,
            )
        elif time.monotonic() - self.printed >= _LINE_SECONDS:
            self._print()

    def _print(self) -> None:
        self.printed = time.monotonic()
        self.said = self.done
        counts = (
            f"{self.label}: {self.done}"
            + (f" of {self.total}" if self.total else "")
            + f" {self.unit}"
        )
        parts = (counts, f"{self.rate:.3g}/s", self._left(), self.note)
        print(", ".join(part for part in parts if part), file=sys.stderr, flush=True)
