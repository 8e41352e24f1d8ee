"""States arrive ahead of the step: threads read, or ask servers for, the rows of coming steps.

loader     step k+2, k+1 -> `expect` their rows, in this order
threads    read them while step k runs; what is read and not used yet is bounded in bytes
step k+1   `take`s its rows, and waits only for those that have not arrived
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.states.origins import Origin, Row, RowStates

Inputs = dict[str, Tensor]  # a collated batch
Step = TypeVar("Step")

MOST_STEPS = 64  # micro-batches that `ahead` holds; token ids are small
_LAST_READ = 2.0  # seconds that `Ahead.close` waits for reads that run


class StatesLostError(UserError):
    """States that a step needs cannot be read, whatever was tried."""


@dataclass
class _Coming:
    """A row that coming steps need."""

    row: Row  # on the CPU
    uses: int = 1  # coming steps that hold it
    bytes: float = 0  # counted for it since it was asked for
    states: Future[RowStates | None] | None = None  # None until it is asked for


@dataclass(eq=False)
class Ahead(Origin):
    """Reads the states of coming rows in threads, in the order in which they were expected.

    Args:
        origin: its `states` is called by several threads.
        limit: bytes of rows that are asked for and not taken; what a step waits for is read even
            so.
        token_bytes: of a token's states, an estimate until the first states have arrived.

    Attributes:
        waited: seconds in which `take` waited.
        held: bytes that count towards the limit now.
    """

    origin: Origin
    limit: float
    token_bytes: float
    clock = staticmethod(time.perf_counter)  # seconds; tests replace it

    def __post_init__(self) -> None:
        self.name = self.origin.name
        self.has_states = self.origin.has_states
        self.waited = 0.0
        self.held = 0.0
        self._coming: dict[int, _Coming] = {}  # by the row's index
        # In order; some may have been asked for or released since.
        self._unasked: deque[_Coming] = deque()
        self._jobs: SimpleQueue[_Coming | None] = SimpleQueue()
        self._workers: list[threading.Thread] = []

    @property
    def room(self) -> bool:
        """Whether all expected rows are asked for, so that more should be expected."""
        return not self._unasked

    def expect(self, row: Row) -> None:
        """Announces that a coming step needs this row; it is read once for all that were announced."""
        known = self._coming.get(row.index)
        if known is not None:
            known.uses += 1
            return
        self._coming[row.index] = _Coming(row)
        self._unasked.append(self._coming[row.index])
        self._fill()

    def ask(self, row: Row) -> None:
        """Asks for a row that the next `take` needs, regardless of the limit."""
        if row.index not in self._coming:
            # Threads read the states of all its tokens; `take` cuts them.
            self._coming[row.index] = _Coming(Row(row.index, row.tokens.cpu()))
        coming = self._coming[row.index]
        if coming.states is None:
            self._start(coming)

    def take(self, row: Row) -> RowStates | None:
        """The states of a row; waits until they are there.

        Raises:
            StatesLostError: they cannot be read.
        """
        self.ask(row)
        coming = self._coming[row.index]
        assert coming.states is not None
        began = self.clock()
        try:
            found = coming.states.result()
        except UserError as error:
            raise StatesLostError(str(error)) from error
        finally:
            self.waited += self.clock() - began
        if found is not None:
            self.token_bytes = found.nbytes / max(len(coming.row.tokens), 1)
            found = row.cut(found)
        self.release(row.index)
        return found

    def states(self, rows: Sequence[Row]) -> list[RowStates | None]:
        """Takes the rows, all of which are asked for at once. Rows of no data set are not read."""
        for row in rows:
            if row.index >= 0:
                self.ask(row)
        found: list[RowStates | None] = []
        for row in rows:
            if row.index >= 0:
                found.append(self.take(row))
            else:
                found.append(None)
        return found

    def release(self, index: int) -> None:
        """Counts a use as done: the step has its states, or needs them no longer."""
        coming = self._coming.get(index)
        if coming is None:
            return
        coming.uses -= 1
        if coming.uses <= 0:
            del self._coming[index]
            self.held -= coming.bytes
            if coming.states is not None:
                coming.states.cancel()
        self._fill()

    def close(self) -> None:
        """Ends the threads after what they read now; states that were not taken are dropped."""
        for coming in self._coming.values():
            if coming.states is not None:
                coming.states.cancel()
        self._coming.clear()
        self._unasked.clear()
        self.held = 0.0
        workers = self._workers
        self._workers = []
        for _ in workers:
            self._jobs.put(None)
        # A thread that is inside torch when the interpreter ends aborts the process.
        until = time.monotonic() + _LAST_READ
        for worker in workers:
            worker.join(max(until - time.monotonic(), 0))

    def _fill(self) -> None:
        """Asks for expected rows while they fit."""
        while self._unasked:
            first = self._unasked[0]
            if first.states is None and first.uses > 0:
                size = len(first.row.tokens) * self.token_bytes
                # A single row is asked for, however large it is.
                if self.held and self.held + size > self.limit:
                    return
                self._start(first)
            self._unasked.popleft()

    def _start(self, coming: _Coming) -> None:
        coming.states = Future()
        coming.bytes = len(coming.row.tokens) * self.token_bytes
        self.held += coming.bytes
        self._jobs.put(coming)
        while len(self._workers) < self.origin.threads:
            name = f"states-{len(self._workers)}"
            # A daemon: a server that does not answer must not delay the end of the process.
            worker = threading.Thread(
                target=self._work,
                name=name,
                daemon=True,
            )
            self._workers.append(worker)
            worker.start()

    def _work(self) -> None:
        while True:
            coming = self._jobs.get()
            if coming is None:
                return
            self._read_one(coming)
            del coming  # else an idle thread keeps the states that it has read last

    def _read_one(self, coming: _Coming) -> None:
        states = coming.states
        if states is None or not states.set_running_or_notify_cancel():
            return
        try:
            (found,) = self.origin.states([coming.row])
            states.set_result(found)
        except BaseException as error:  # raised again where the states are taken
            states.set_exception(error)


def ahead(
    steps: Iterable[Step],
    expect: Callable[[Step], None],
    room: Callable[[], bool],
    hold: int = MOST_STEPS,
) -> Iterator[Step]:
    """Yields steps in order, and announces those to come before it yields the next one.

    Args:
        expect: announces a step. room: whether more should be announced.
        hold: steps to hold at a time.
    """
    coming = iter(steps)
    held: deque[Step] = deque()
    while True:
        while not held or (room() and len(held) < hold):
            step = next(coming, None)
            if step is None:
                break
            expect(step)
            held.append(step)
        if not held:
            return
        yield held.popleft()
