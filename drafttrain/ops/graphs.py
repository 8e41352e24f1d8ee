"""CUDA graphs: functions of buffers with fixed addresses, whose launches a GPU replays.

A captured function may not wait for the device. What the host decides in it (shapes, addresses,
grids) stays as it was at the capture. What changes from call to call is copied into its buffers
before the replay.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from drafttrain.ops.tree_attention_triton import PlanShape

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
        current.wait_stream(side)
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
