"""`drafttrain adapt --watch`: what a server accepts of the drafts, swaps in it, and the way back.

sample     accepted length of the served version: vLLM's counters over some drafts, or the log's lines
swap       a better version goes into the server (`drafttrain swap`); a server that is away gets it when it is back
go back    the mean of the new version's samples lies below the interval of the old one's

OUTPUT/journal.jsonl   a line for every decision, with its figures
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import httpx

from drafttrain.data.servers import key_headers
from drafttrain.errors import UserError
from drafttrain.evaluation.resampling import FEWEST, paired_ratio
from drafttrain.files import Json, append_line, complete_bytes, lock, writing
from drafttrain.serving.client import Samples, Server, increase, read_metrics, speculation
from drafttrain.serving.swap import HeadRefused, Swapper, head_below

JOURNAL = "journal.jsonl"
_LOCK = ".drafttrain-watch"  # in the server's root: one watcher a server
_DRAFTS = 100  # of a sample of vLLM's counters
_TRIAL = 16  # samples of a new version before it may be dropped
_PROVEN = 64  # samples after which a new version stays; of the old one, those that are kept


@dataclass
class Watched:
    """What the watcher keeps between its runs.

    Attributes:
        samples: accepted lengths of the version that serves, the newest last.
        previous: folder of the version before, while the present one may still be dropped; '' if
            none. usual: [mean, low, high] of its samples.
        swapped: whether the server ever got another head than it was started with.
    """

    samples: list[float] = field(default_factory=list)
    previous: str = ""
    usual: list[float] = field(default_factory=list)
    swapped: bool = False


class Journal:
    """A JSON-lines file of decisions. An incomplete last line, whose writer was killed, is cut off."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, event: str, **figures: object) -> None:
        """Appends a decision. Raises UserError: it cannot be written."""
        row = {"time": round(time.time(), 3), "event": event, **figures}
        with writing(self.path):
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(file, complete_bytes(self.path))
                append_line(file, row)
            finally:
                os.close(file)


class Watch:
    """Watches the version that serves.

    Args:
        server: address of a vLLM server that swaps heads; '' for a server of one's own that follows
            OUTPUT/current. variable: environment variable of its API key.
        output: folder of the versions. watched: state, changed in place.

    Raises:
        UserError: no such server, its root is not on this machine, or another watcher has it.
    """

    def __init__(self, server: str, variable: str, output: Path, watched: Watched):
        self.output = output
        self.watched = watched
        self.journal = Journal(output / JOURNAL)
        self.swapper = None
        self._lock: int | None = None
        self._mark: Samples = {}  # the counters at the beginning of a sample
        self._digests: dict[Path, str] = {}  # of versions as the server has them
        self._away = False
        if server:
            self.swapper = Swapper(server, variable)
            self._metrics = Server(self.swapper.url, "", key_headers(variable))
            self._take(Path(self.swapper.show()["root"]))
        self.journal.add("start", server=server)

    def _take(self, root: Path) -> None:
        """Locks a server's root. Raises UserError."""
        if not root.is_dir():
            raise UserError(
                f"server: its root {str(root)!r} is not on this machine, and versions are exported "
                "into it; run adapt where it is"
            )
        with writing(root):
            self._lock = lock(root / _LOCK)
        if self._lock is None:
            raise UserError(
                f"server: another drafttrain adapt --watch swaps heads below {str(root)!r}; stop it "
                "first"
            )

    def close(self) -> None:
        self.journal.add("stop")
        if self.swapper is not None:
            self.swapper.close()
        if self._lock is not None:
            os.close(self._lock)

    # -- samples -----------------------------------------------------------------------------------

    def logged(self, length: float) -> None:
        """Takes an accepted length that the log has; a server's counters are preferred."""
        if self.swapper is None:
            self._add(length)

    def sample(self) -> float:
        """Reads the server's counters; returns the accepted length of a completed sample, else 0."""
        if self.swapper is None:
            return 0.0
        page = asyncio.run(self._page())
        drafts = increase(self._mark, page, "drafts")
        # A server that was started again counts from 0.
        if not self._mark or drafts < 0:
            self._mark = page
            return 0.0
        if drafts < _DRAFTS:
            return 0.0
        length: float = speculation(self._mark, page)["accepted_length"]
        self._mark = page
        self._add(length)
        return length

    async def _page(self) -> Samples:
        async with httpx.AsyncClient(timeout=10.0) as client:
            return await read_metrics(client, self._metrics)

    def _add(self, length: float) -> None:
        self.watched.samples.append(length)
        self.watched.samples = self.watched.samples[-_PROVEN:]

    # -- decisions ---------------------------------------------------------------------------------

    def begin_trial(self, previous: Path) -> None:
        """A new version serves from now on; the one before may come back, if its length is known."""
        watched = self.watched
        watched.usual = interval_of(watched.samples)
        watched.previous = ""
        if watched.usual:
            watched.previous = str(previous)
        watched.samples = []
        self._mark = {}

    def judge(self, version: str) -> bool:
        """Whether the version before has to come back; a version that proved itself stays."""
        watched = self.watched
        if not watched.previous or len(watched.samples) < _TRIAL:
            return False
        mean = fmean(watched.samples)
        figures: Json = {
            "version": version,
            "served_accepted_length": round(mean, 4),
            "samples": len(watched.samples),
            "usual": watched.usual,
        }
        if mean < watched.usual[1]:
            self.journal.add("rollback", **figures, to=Path(watched.previous).name)
            return True
        if len(watched.samples) >= _PROVEN:
            self.journal.add("proven", **figures)
            watched.previous = ""
            watched.usual = []
        return False

    def end_trial(self) -> None:
        """The version before serves again."""
        self.watched.previous = ""
        self.watched.usual = []
        self.watched.samples = []
        self._mark = {}

    # -- the server --------------------------------------------------------------------------------

    def bring(self, folder: Path) -> str:
        """Swaps a version in where the server has another head; returns why it refuses, else ''.

        A server that does not answer is asked again by the next call.

        Args:
            folder: of a trained drafter.
        """
        if self.swapper is None:
            return ""
        # The drafter that the server was started with needs no swap.
        if self.output not in folder.parents and not self.watched.swapped:
            return ""
        try:
            served = self.swapper.show()
            if self._away:
                self._away = False
                self.journal.add("back")
            if served["sha256"] == self._digests.get(folder):
                return ""
            body = head_below(str(folder), served)
            self._digests[folder] = body["sha256"]
            if body["sha256"] == served["sha256"]:
                return ""
            after = self.swapper.send(body)
        except HeadRefused as refused:
            self.journal.add("refused", version=folder.name, reason=str(refused))
            return str(refused)
        except UserError as error:
            if not self._away:
                self._away = True
                self.journal.add("away", reason=str(error))
            return ""
        self.watched.swapped = True
        self._mark = {}
        self.journal.add(
            "swap", version=folder.name, sha256=after["sha256"], before=served["sha256"]
        )
        return ""


def interval_of(samples: list[float]) -> list[float]:
    """[mean, low, high] of accepted lengths, 95 %; empty for too few."""
    if len(samples) < FEWEST:
        return []
    found = paired_ratio([samples], [[1.0] * len(samples)])
    return [round(part, 4) for part in found]
