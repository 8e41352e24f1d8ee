"""`drafttrain adapt --watch`: what a server accepts of the drafts, swaps in it, and the way back.

sample     accepted length of the served version: the server's counters over some drafts, or the log's lines
swap       a better version goes into the server (`drafttrain swap`); a server that is away gets it when it is back
go back    the mean of the new version's samples lies below the interval of the old one's

OUTPUT/journal.jsonl   a line for every decision, with its figures, and what was served now and then;
                       `drafttrain report` makes a page of it
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import httpx

from drafttrain.errors import UserError
from drafttrain.evaluation.resampling import FEWEST, paired_ratio
from drafttrain.files import append_row, lock, writing
from drafttrain.reports.journal_page import read_journal
from drafttrain.serving.client import Samples, Server, passes, read_metrics, speculation
from drafttrain.serving.swap import HeadRefused, Swapper, head_below
from drafttrain.serving.swap_command import swapper_of

JOURNAL = "journal.jsonl"
_LOCK = ".drafttrain-watch"  # in the server's root: one watcher a server
_DRAFTS = 100  # of a sample of the server's counters
_TRIAL = 16  # samples of a new version before it may be dropped
_PROVEN = 64  # samples after which a new version stays; of the old one, those that are kept
_COUNTED = ("round", "swap", "rollback", "refused", "away")
_PAUSE = 300.0  # seconds between lines about a version that has proved itself


@dataclass
class Watched:
    """What the watcher keeps between its runs.

    Attributes:
        samples: accepted lengths of the version that serves, the newest last.
        previous: folder of the version before, while the present one may still be dropped; '' if
            none. usual: [mean, low, high] of its samples.
        swapped: whether the server ever got another head than it was started with.
        first: accepted length of the drafter that it began with, when the first version came.
    """

    samples: list[float] = field(default_factory=list)
    previous: str = ""
    usual: list[float] = field(default_factory=list)
    swapped: bool = False
    first: float = 0.0

    def begin(self, previous: Path) -> None:
        """A new version serves from now on; the previous one may come back, if its length is known."""
        self.previous = ""
        if len(self.samples) >= FEWEST:
            found = paired_ratio([self.samples], [[1.0] * len(self.samples)])
            self.usual = [round(part, 4) for part in found]
            self.previous = str(previous)
            self.first = self.first or self.usual[0]
        self.samples = []


class Watch:
    """Watches the version that serves.

    Args:
        server: address of a vLLM or SGLang server that swaps heads; '' for a server of one's own
            that follows OUTPUT/current. variable: environment variable of its API key.
        output: folder of the versions. watched: state, changed in place.

    Raises:
        UserError: no such server, its root is not on this machine, another watcher has it, or it
            has no page of metrics.
    """

    def __init__(self, server: str, variable: str, output: Path, watched: Watched):
        self.output = output
        self.watched = watched
        self.swapper: Swapper | None = None
        self._mark: Samples = {}  # the counters at the beginning of a sample
        # Samples since what serves was noted last, and the time of then.
        self._fresh = 0
        self._when = 0.0
        # The version that was sent last, and the head that served behind that.
        self._tried: tuple[Path, str] | None = None
        self._is_away = False
        self._lock: int | None = None
        if server:
            self.swapper = swapper_of(server, variable)
            self._metrics = Server(self.swapper.url, "")
            root = Path(self.swapper.ask()["root"])
            with writing(root, "the server's root"):
                self._lock = lock(root / _LOCK)
            if self._lock is None:
                raise UserError(
                    f"server={server!r}: another drafttrain adapt --watch swaps its heads; stop that "
                    "one first"
                )
            if not asyncio.run(self._page()):
                raise UserError(
                    f"server={server!r} has no page of metrics, so no version could be judged by what is "
                    "accepted there; start SGLang with --enable-metrics"
                )
        # Lines of the journal by kind, which a page of figures has from the beginning.
        self.events = Counter(dict.fromkeys(_COUNTED, 0))
        path = output / JOURNAL
        if path.exists():
            for row in read_journal(str(path)):
                self.events[row["event"]] += 1
        self.note("start")

    def close(self) -> None:
        self.note("stop")
        if self.swapper is not None:
            self.swapper.close()
        if self._lock is not None:
            os.close(self._lock)

    def note(self, event: str, **figures: object) -> None:
        """Appends a decision to the journal. Raises UserError: it cannot be written."""
        row = {"time": round(time.time(), 3), "event": event, **figures}
        append_row(self.output / JOURNAL, row)
        self.events[event] += 1

    def sample(self, version: str) -> None:
        """Reads the server's counters, takes a sample after every so many drafts, and notes now and
        then what the version that serves has.
        """
        if self.swapper:
            page = asyncio.run(self._page())
            drafts = passes(self._mark, page)
            # A server that was started again counts from 0.
            if not self._mark or drafts < 0:
                self._mark = page
            elif drafts >= _DRAFTS:
                self.add(speculation(self._mark, page)["accepted_length"])
                self._mark = page
        self._note_served(version)

    def _note_served(self, version: str) -> None:
        """Notes the samples since the last note: of a new version soon, later every few minutes."""
        samples = self.watched.samples
        # Samples before the last swap are gone.
        fresh = min(self._fresh, len(samples))
        is_new = len(samples) < _PROVEN
        if fresh < _TRIAL or not (is_new or time.time() > self._when + _PAUSE):
            return
        self.note(
            "served",
            version=version,
            served_accepted_length=round(fmean(samples[-fresh:]), 4),
            samples=fresh,
        )
        self._fresh = 0
        self._when = time.time()

    @property
    def waits(self) -> bool:
        """Whether so little is known of what serves that a new version could not be compared with it."""
        return bool(self._mark) and len(self.watched.samples) < _TRIAL

    async def _page(self) -> Samples:
        async with httpx.AsyncClient(timeout=10.0) as client:
            return await read_metrics(client, self._metrics)

    def add(self, length: float) -> None:
        """Takes a sample."""
        self._fresh += 1
        self.watched.samples.append(length)
        self.watched.samples = self.watched.samples[-_PROVEN:]

    def falls(self, version: str) -> Path | None:
        """The folder of the version that has to come back, if any; a version that proved itself
        stays.
        """
        watched = self.watched
        if not watched.previous or len(watched.samples) < _TRIAL:
            return None
        mean = fmean(watched.samples)
        event = "rollback"
        back: Path | None = Path(watched.previous)
        if mean >= watched.usual[1]:
            if len(watched.samples) < _PROVEN:
                return None
            event = "proven"
            back = None
        self.note(
            event,
            version=version,
            served_accepted_length=round(mean, 4),
            samples=len(watched.samples),
            usual=watched.usual,
        )
        watched.previous = ""
        if back is not None:
            watched.samples = []
        return back

    def bring(self, folder: Path) -> bool:
        """Swaps a trained drafter in where the server has another head; False if it refuses.

        A server that does not answer is asked again by the next call.
        """
        # The drafter that the server was started with needs no swap.
        is_first = self.output not in folder.parents and not self.watched.swapped
        if self.swapper is None or is_first:
            return True
        try:
            served = self.swapper.ask()
            self._is_away = False
            if self._tried == (folder, served["sha256"]):
                return True
            self._tried = (folder, served["sha256"])
            after = self.swapper.ask(head_below(str(folder), served, self.swapper.form))
        except HeadRefused as refused:
            self.note("refused", version=folder.name, reason=str(refused))
            return False
        except UserError as error:
            if not self._is_away:
                self.note("away", reason=str(error))
            self._is_away = True
            self._tried = None
            return True
        self._tried = (folder, after["sha256"])
        self.watched.swapped = True
        self._mark = {}
        if after["sha256"] != served["sha256"]:
            self.note("swap", version=folder.name, sha256=after["sha256"])
        return True

    def figures(self) -> dict[str, float]:
        """What Prometheus gets of the served version; by name."""
        found = {"server_away": float(self._is_away)}
        for event in _COUNTED:
            found[f"{event}_total"] = self.events[event]
        if self.watched.samples:
            length = fmean(self.watched.samples)
            found["served_accepted_length"] = length
            # All versions have one shape, so their passes cost the same.
            found["speedup_over_first"] = length / (self.watched.first or length)
        return found
