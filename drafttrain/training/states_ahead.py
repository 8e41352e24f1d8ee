"""Target states arrive ahead of the step: threads read, or ask servers for, the conversations of
coming micro-batches.

loader     micro-batch k+2, k+1 -> `expect` their conversations, in this order
threads    read them while step k runs; what is read and not used yet is bounded in bytes
step k+1   `take`s its conversations, and waits only for those that have not arrived
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

from torch import Tensor

from drafttrain.errors import UserError

States = dict[str, Tensor] | None  # what `FeatureStore.get` returns
Inputs = dict[str, Tensor]  # a collated batch

MOST_BATCHES = 64  # that `LookAhead` holds; token ids are small
_LAST_READ = 2.0  # seconds that `StatesAhead.close` waits for reads that run


class StatesLostError(UserError):
    """States that a step needs cannot be read, whatever was tried."""


@dataclass
class _Coming:
    """A conversation that coming steps need."""

    index: int
    tokens: Tensor  # [s], on the CPU
    uses: int = 1  # coming micro-batches that hold it
    bytes: float = 0  # counted for it since it was asked for
    states: Future[States] | None = None  # None until it is asked for


class StatesAhead:
    """Reads the states of coming conversations in threads, in the order in which they were
    expected.

    Args:
        read: (data set index, token ids [s]) -> tensors; called by several threads. `take` raises
            what it raises.
        limit: bytes of conversations that are asked for and not taken; what a step waits for is
            read even so.
        token_bytes: of a token's states, an estimate until the first states have arrived.
        threads: reads at once.

    Attributes:
        waited: seconds in which `take` waited.
        held: bytes that count towards the limit now.
    """

    clock = staticmethod(time.perf_counter)  # seconds; tests replace it

    def __init__(
        self,
        read: Callable[[int, Tensor], States],
        limit: float,
        token_bytes: float,
        threads: int,
    ):
        self.read = read
        self.limit = limit
        self.token_bytes = token_bytes
        self.threads = threads
        self.waited = self.held = 0.0
        self._coming: dict[int, _Coming] = {}  # by index
        self._unasked: deque[_Coming] = (
            deque()
        )  # in order; some may have been asked for or released since
        self._jobs: SimpleQueue[_Coming | None] = SimpleQueue()
        self._workers: list[threading.Thread] = []

    @property
    def room(self) -> bool:
        """Whether all expected conversations are asked for, so that more should be expected."""
        return not self._unasked

    def expect(self, index: int, tokens: Tensor) -> None:
        """Announces that a coming micro-batch needs this conversation; it is read once for all that
        were announced.
        """
        if (known := self._coming.get(index)) is not None:
            known.uses += 1
            return
        self._coming[index] = _Coming(index, tokens)
        self._unasked.append(self._coming[index])
        self._fill()

    def ask(self, index: int, tokens: Tensor) -> None:
        """Asks for a conversation that the next `take` needs, regardless of the limit."""
        if index not in self._coming:
            self._coming[index] = _Coming(index, tokens)
        if self._coming[index].states is None:
            self._start(self._coming[index])

    def take(self, index: int, tokens: Tensor) -> States:
        """The states of a conversation; waits until they are there."""
        self.ask(index, tokens)
        coming = self._coming[index]
        assert coming.states is not None
        began = self.clock()
        try:
            found = coming.states.result()
        except UserError as error:
            raise StatesLostError(str(error)) from error
        finally:
            self.waited += self.clock() - began
        if found is not None:
            self.token_bytes = sum(tensor.nbytes for tensor in found.values()) / max(
                len(coming.tokens), 1
            )
        self.release(index)
        return found

    def release(self, index: int) -> None:
        """Counts a use as done: the micro-batch has its states, or needs them no longer."""
        if (coming := self._coming.get(index)) is None:
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
        """Asks for expected conversations while they fit."""
        while self._unasked:
            first = self._unasked[0]
            if first.states is None and first.uses > 0:
                if self.held and self.held + len(first.tokens) * self.token_bytes > self.limit:
                    return
                self._start(first)
            self._unasked.popleft()

    def _start(self, coming: _Coming) -> None:
        coming.states, coming.bytes = Future(), len(coming.tokens) * self.token_bytes
        self.held += coming.bytes
        self._jobs.put(coming)
        while len(self._workers) < self.threads:
            # A daemon: a server that does not answer must not delay the end of the process.
            worker = threading.Thread(
                target=self._work,
                name=f"states-{len(self._workers)}",
                daemon=True,
            )
            self._workers.append(worker)
            worker.start()

    def _work(self) -> None:
        while (coming := self._jobs.get()) is not None:
            self._read_one(coming)
            del coming  # else an idle thread keeps the states that it has read last

    def _read_one(self, coming: _Coming) -> None:
        states = coming.states
        if states is None or not states.set_running_or_notify_cancel():
            return
        try:
            states.set_result(self.read(coming.index, coming.tokens))
        except BaseException as error:  # raised again where the states are taken
            states.set_exception(error)


class LookAhead:
    """Iterates over one process's micro-batches, and announces those to come before it hands out
    the next one.

    Args:
        batches: collated micro-batches in the order of the steps.
        expect: announces a micro-batch. room: whether more should be announced.
        most: micro-batches to announce; those of the end of training have no later ones.
        announced: of the first micro-batches, how many were announced as `following` of the epoch
            before.
        following: micro-batches of the next epoch, to be announced when this one has no more.
    """

    def __init__(
        self,
        batches: Iterator[Inputs],
        expect: Callable[[Inputs], None],
        room: Callable[[], bool],
        most: float = float("inf"),
        announced: int = 0,
        following: Callable[[], Iterator[Inputs]] = lambda: iter(()),
    ):
        self.batches = batches
        self.expect = expect
        self.room = room
        self.most = most
        self.announced = announced
        self.drawn = self.ahead = (
            0  # micro-batches drawn from `batches`; announced from the next epoch
        )
        self._held: deque[Inputs] = deque()
        self._next_epoch: Iterator[Inputs] | None = None  # set when `batches` has ended
        self._following = following

    def __iter__(self) -> LookAhead:
        return self

    def __next__(self) -> Inputs:
        while not self._held or (self.room() and self._draws_more):
            if not self._draw():
                break
        if not self._held:
            raise StopIteration
        return self._held.popleft()

    @property
    def _draws_more(self) -> bool:
        return self.drawn + self.ahead < self.most and len(self._held) + self.ahead < MOST_BATCHES

    def _draw(self) -> bool:
        """Draws and announces one more micro-batch; False if there is none."""
        if self._next_epoch is None:
            if (batch := next(self.batches, None)) is not None:
                self.drawn += 1
                self._held.append(batch)
                if self.drawn > self.announced:
                    self.expect(batch)
                return True
            if self.drawn < self.most:
                self._next_epoch = self._following()
            else:
                self._next_epoch = iter(())
        if (batch := next(self._next_epoch, None)) is None or not self._held:
            return False
        self.ahead += 1
        self.expect(batch)
        return True
