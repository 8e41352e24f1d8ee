"""CUDA graphs: functions of buffers with fixed addresses, whose launches a GPU replays.

A captured function may not wait for the device. What the host decides in it (shapes, addresses,
grids) stays as it was at the capture. What changes from call to call is copied into its buffers
before the replay.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from drafttrain.errors import first_line
from drafttrain.ops.tree_attention_triton import Opened, PackedPlan, PlanShape, pack_plan

T = TypeVar("T")

# Numbers of tokens that graphs are captured for.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, 128, 16), *range(128, 513, 32))
_WORD = 32  # bits
_capturing = threading.Lock()  # the synchronization debug mode is global


def bucket(count: int) -> int:
    """The smallest bucket that holds `count` tokens."""
    return BUCKETS[bisect_left(BUCKETS, count)]


def step_shape(counts: Sequence[int]) -> PlanShape | None:
    """The static shape for rows with these counts of new tokens; None beyond the largest bucket.

    Padding tokens go to the last row. The number of rows is a power of two. The bound of a row's
    tokens is a bucket of its own, because it determines the attention kernel's grid.
    """
    total = sum(counts)
    if total > BUCKETS[-1]:
        return None
    tokens = bucket(total)
    padded_last = counts[-1] + tokens - total
    most = bucket(max(max(counts), padded_last))
    words = -(-most // _WORD)  # rounded up
    return PlanShape(padded_rows(len(counts)), tokens, most, words)


def padded_rows(count: int) -> int:
    """The power of two that a number of rows is padded to."""
    return 1 << (count - 1).bit_length()


def upload(numbers: Tensor, to: Tensor) -> None:
    """Copies numbers of the host into a buffer of the device without waiting for it."""
    # Pageable memory is staged before the call returns.
    to.copy_(numbers, non_blocking=True)


class PlanBuffers:
    """A plan of fixed shape and its tokens' slots, which one upload fills.

    Args:
        more: how many int64 numbers follow the slots.

    Attributes:
        plan: where the tokens stand.
        slots: [N] int64, on the cache's common axis.
        more: [more] int64.
    """

    def __init__(self, shape: PlanShape, device: torch.device, more: int = 0):
        self.shape = shape
        # In 4 bytes, of which an int64 number takes two. A plan's size keeps those aligned.
        count = shape.numbers + 2 * (shape.tokens + more)
        self._numbers = torch.zeros(count, dtype=torch.int32, device=device)
        self.plan = PackedPlan.static(self._numbers[: shape.numbers], shape)
        long = self._numbers[shape.numbers :].view(torch.int64)
        self.slots, self.more = long.split([shape.tokens, more])

    def fill(
        self,
        opened: Opened,
        capacity: int,
        more: Sequence[int] = (),
    ) -> None:
        """Writes the next pass.

        Args:
            opened: cache row and layout of each part. capacity: slots of a row.
        """
        counts = [layout.count for _, layout in opened]
        # Padding tokens take the slots behind the last row's own.
        counts[-1] += self.shape.tokens - sum(counts)
        parts = []
        for (row, layout), count in zip(opened, counts, strict=True):
            start = row * capacity + layout.prefix_len
            parts.append(np.arange(start, start + count))
        parts.append(np.array(more, dtype=np.int64))
        long = np.concatenate(parts).astype(np.int64)
        numbers = np.concatenate((pack_plan(opened, self.shape), long.view(np.int32)))
        upload(torch.from_numpy(numbers), self._numbers)


class Step(Protocol):
    """A function of buffers."""

    def forward(self) -> Any: ...


S = TypeVar("S", bound=Step)


class Captured:
    """Steps by key, each captured at its first use.

    Args:
        pool: of the graphs. note: what a failed capture means; its reason follows on the same line.

    Attributes:
        made: each key's step, and the function that replays it.
        failure: why no step is captured; empty unless a capture failed.
    """

    def __init__(self, pool: GraphPool, note: str):
        self.pool = pool
        self.note = note
        self.made: dict[object, tuple[Any, Callable[[], Any]]] = {}
        self.failure = ""

    def step(
        self,
        key: object,
        make: Callable[[], S],
        fill: Callable[[S], None],
    ) -> Callable[[], Any] | None:
        """Fills the buffers of a key's step; returns what replays it, None if a capture failed."""
        if self.failure:
            return None
        if key in self.made:
            step, replay = self.made[key]
            fill(step)
            return replay
        step = make()
        fill(step)
        try:
            replay = self.pool.capture(step.forward)
        except Exception as error:  # whatever its reason, passes are then launched one by one
            self.failure = first_line(error)
            print(f"{self.note}: {self.failure}", file=sys.stderr, flush=True)
            return None
        self.made[key] = (step, replay)
        return replay


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """The stream of all captures: cuBLAS keeps a workspace for each stream that it has seen."""
    return torch.cuda.Stream(device)


class GraphPool:
    """Graphs that share memory.

    They run one after the other. A graph's outputs stay valid until its own next replay.

    Attributes:
        count: captured graphs. nbytes: their memory.
        seconds: time of warm-ups and captures, which no timing should count.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = 0.0
        self.clear()

    def clear(self) -> None:
        """Forgets the memory of graphs that nobody holds any more."""
        self._pool: Any = None
        self.count = 0
        self.nbytes = 0

    def capture(self, function: Callable[[], T]) -> Callable[[], T]:
        """Captures a function after two warm-up runs with the present contents of its buffers.

        Returns:
            A function that replays the graph; on a CPU, which has no graphs, `function` itself.

        Raises:
            RuntimeError: `function` waits for the device, for control flow that depends on data.
        """
        if self.device.type != "cuda":
            return function
        torch.cuda.synchronize(self.device)  # so that `seconds` counts the capture alone
        begun = time.perf_counter()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # a capture does so too, and would hide its own memory
        before = torch.cuda.memory_reserved(self.device)
        try:
            with _capturing, torch.cuda.device(self.device):
                graph, out = self._record(function)
        finally:
            self.seconds += time.perf_counter() - begun
        self.count += 1
        self.nbytes += max(0, torch.cuda.memory_reserved(self.device) - before)

        def replay() -> T:
            graph.replay()
            return out

        return replay

    def _record(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        current = torch.cuda.current_stream(self.device)
        side = _side_stream(self.device)

        # Warm up: kernels are compiled and workspaces allocated outside the graph.
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):
                function()
        current.wait_stream(side)  # replays run on the caller's stream
        torch.cuda.synchronize(self.device)

        graph = torch.cuda.CUDAGraph()
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with (
                warnings.catch_warnings(),
                torch.cuda.graph(graph, self._pool, side, capture_error_mode="thread_local"),
            ):
                warnings.filterwarnings("ignore", "Synchronization debug mode")
                # A wait for the device then fails with a clear reason, before it reaches CUDA and
                # invalidates the capture.
                torch.cuda.set_sync_debug_mode("error")
                try:
                    out = function()
                finally:
                    torch.cuda.set_sync_debug_mode(mode)
        finally:
            torch.cuda.set_stream(current)  # a capture that fails to end leaves its own
        return graph, out
