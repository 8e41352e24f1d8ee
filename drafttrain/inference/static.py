"""A round's target pass as one function of buffers that stay where they are, so that a GPU can replay it as a CUDA graph.

A pass over a root and a few nodes takes a GPU less time than Python takes to launch its thousand kernels. A `StaticStep`
therefore fixes everything that the host decides: shapes, addresses, grids. What changes from round to round (token ids,
positions, slots of the cache, who sees whom) is copied into its buffers, and the launches are replayed as they were captured.

    round      [root + nodes] of all rows, N tokens     ->   padded to the next bucket: 1 2 4 8 16 24 32 48 64 ...
    buffers    ids, slots, plan (offsets, prefix lengths, positions, ancestor bits)
    function   embedding .. last norm, features, head, argmax; keys and values go into the cache at `slots`

`TargetSteps` keeps the steps of a target with the cache that they write to, captures each shape when it first comes, and
runs everything else (prompts, more tokens than the largest bucket, models that cannot be captured, CPUs) as before.
"""

from __future__ import annotations

import os
import sys
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafttrain.ops.sampling import argmax
from drafttrain.ops.tree_attention import TreeLayout
from drafttrain.ops.tree_attention_triton import PackedPlan, PlanShape, pack_plan, packed_tree_attention
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target import Target

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, 128, 16), *range(128, 513, 32))
_WORD = 32
# Slots that padding tokens may take behind a row's own.
_SPARE = max(after - before - 1 for before, after in pairwise(_BUCKETS))
# Capacities are multiples of this, so that few sequences outgrow a cache whose graphs were captured.
_ROOM = 1024


class Pass(NamedTuple):
    """What the target says about N packed tokens; valid until the next pass.

    Attributes:
        features: [N, f*h]; logits: [N, v] float32; choices: [N] int64, their argmax, or None where it was not asked for.
    """

    features: Tensor
    logits: Tensor
    choices: Tensor | None


def step_shape(counts: Sequence[int]) -> PlanShape | None:
    """The static shape for rows with so many new tokens each; None beyond the largest bucket.

    Padding tokens go to the last row. The number of rows is a power of two, and the bound of a row's tokens is a bucket of
    its own, because the attention kernel's grid follows from it.
    """
    total = sum(counts)
    if total > _BUCKETS[-1]:
        return None
    tokens = _bucket(total)
    most = _bucket(max(*counts, counts[-1] + tokens - total))
    return PlanShape(1 << (len(counts) - 1).bit_length(), tokens, most, -(-most // _WORD))


def _bucket(count: int) -> int:
    return _BUCKETS[bisect_left(_BUCKETS, count)]


class StaticStep:
    """The pass for one shape; an `AttentionContext` that reads nothing but its buffers.

    Args:
        target: whose forward can be captured.
        feature_layers: as in `Target.forward`.
        cache: with the buffers of all layers, which a first forward has allocated.
        shape: upper bounds of the passes that it serves.
        choose: whether `choices` are wanted.

    Attributes:
        ids: [1, N]; slots: [N] int64, on the cache's common axis; plan: who sees whom.
    """

    def __init__(self, target: Target, feature_layers: Sequence[int], cache: TreeCache, shape: PlanShape, choose: bool):
        self.target, self.feature_layers, self.cache = target, tuple(feature_layers), cache
        self.shape, self.choose = shape, choose
        tokens = shape.tokens
        self.ids = torch.zeros(1, tokens, dtype=torch.long, device=target.device)
        # Plan and slots are one upload. A plan's size keeps the slots aligned.
        self._numbers = torch.zeros(shape.numbers + 2 * tokens, dtype=torch.int32, device=target.device)
        self.plan = PackedPlan.static(self._numbers[: shape.numbers], shape)
        self.slots = self._numbers[shape.numbers :].view(torch.int64)
        target.hook(self.feature_layers)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: Pass | None = None

    def fill(self, ids: Tensor, opened: Sequence[tuple[int, TreeLayout]]) -> None:
        """Sets the next pass: ids [n] on the device, and row of the cache and layout of each part."""
        rows, layouts = [row for row, _ in opened], [layout for _, layout in opened]
        self.ids[0, : len(ids)].copy_(ids)
        counts = [layout.count for layout in layouts]
        counts[-1] += self.shape.tokens - len(ids)
        starts = [row * self.cache.capacity + layout.prefix_len for row, layout in opened]
        slots = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)])
        numbers = np.concatenate((pack_plan(layouts, rows, self.shape), slots.view(np.int32)))
        # Pageable memory is staged before the call returns, so the host need not wait for the device here.
        self._numbers.copy_(torch.from_numpy(numbers), non_blocking=True)

    @torch.no_grad()
    def forward(self) -> Pass:
        """The function itself, which reads the buffers and never waits for the device."""
        positions = self.plan.positions.long()[None]
        out = self.target.forward(self.ids, self.feature_layers, positions, self)
        logits = self.target.head(out.last_hidden[0])
        return Pass(out.features[0], logits, argmax(logits) if self.choose else None)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **form: Any) -> Tensor:
        """See `AttentionContext.attend`."""
        self.cache.store(layer, self.slots, key, value)
        return packed_tree_attention(query, *self.cache.by_row(layer), self.plan, **form).transpose(1, 2)

    def capture(self, pool: Any) -> None:
        """Captures the function on the GPU, after a warm-up with what the buffers hold.

        Args:
            pool: memory that the graphs share: they run one after the other, and what one returns stays its own.

        Raises:
            RuntimeError: the model's forward waits for the device, for control flow that depends on data.
        """
        device = self.target.device
        current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):
                self.forward()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings(), torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
                warnings.filterwarnings("ignore", "Synchronization debug mode")
                # Waiting is then refused before CUDA sees it, which would spoil the capture, and with a clear reason.
                torch.cuda.set_sync_debug_mode("error")
                try:
                    self._out = self.forward()
                finally:
                    torch.cuda.set_sync_debug_mode(mode)
        finally:
            torch.cuda.set_stream(current)  # a capture that fails to end leaves its own
        self._graph = graph

    def run(self) -> Pass:
        """The pass over what the buffers hold, all N tokens: replayed if captured, else computed."""
        if self._graph is None:
            return self.forward()
        self._graph.replay()
        assert self._out is not None
        return self._out


class TargetSteps:
    """How a decoder's rounds run the target, and the cache that they share with the prompts' forwards.

    Args:
        target: the target.
        static: whether rounds run as static steps.

    Attributes:
        cache: of the sequences at hand; `open` sets it.
        failure: why the target's passes stay dynamic; empty unless a capture failed.
        graph_bytes: memory that the captured graphs took.
    """

    def __init__(self, target: Target, static: bool):
        self.target, self.static = target, static
        self.cache = TreeCache(0)
        self.failure = ""
        self._weights = _addresses(target) if static else ()
        self._forget()
        self.choose, self.feature_layers = False, tuple[int, ...]()

    @staticmethod
    def lease(target: Target, graphs: bool | None) -> TargetSteps:
        """Those that an earlier call has left with the target, or new ones.

        Args:
            graphs: False for dynamic passes; None leaves it to $DRAFTTRAIN_GRAPHS (0 turns them off). CPUs have none.
        """
        if graphs is None:
            graphs = os.environ.get("DRAFTTRAIN_GRAPHS", "1") != "0"
        if not (graphs and _serves(target.device)):
            return TargetSteps(target, static=False)
        while (steps := target.take_idle_steps()) is not None:
            if steps._weights == _addresses(
                target
            ):  # graphs hold addresses; moved weights would be read from freed memory
                return steps
        return TargetSteps(target, static=True)

    def release(self) -> None:
        """Leaves cache and graphs to the next call."""
        if self.static and not self.target.idle_steps:
            self.target.idle_steps.append(self)

    def open(self, capacity: int, rows: int, feature_layers: Sequence[int], choose: bool) -> TreeCache:
        """The cache for new sequences: the last one, if it is large enough, because graphs know its address.

        Args:
            capacity: slots per row, at least; rows: sequences at a time, at least.
            feature_layers, choose: what the passes return; see `StaticStep`.
        """
        self.feature_layers, self.choose = tuple(feature_layers), choose
        if not self.static:
            self.cache = TreeCache(capacity, rows)
        elif capacity + _SPARE > self.cache.capacity or rows > self.cache.rows:
            self._forget()
            self.cache = TreeCache(-(-(capacity + _SPARE) // _ROOM) * _ROOM, rows)
        return self.cache

    def _forget(self) -> None:
        self.cache = TreeCache(0)
        self._steps: dict[tuple[tuple[int, ...], bool, PlanShape], StaticStep] = {}
        self._pool: Any = None
        self.graph_bytes = 0

    @property
    def memory(self) -> tuple[int, str]:
        """Bytes of cache and graphs, and their description."""
        text = str(self.cache)
        if self.graph_bytes:
            text += f", {len(self._steps)} captured CUDA graphs {self.graph_bytes / 2**20:,.1f} MiB"
        return self.cache.nbytes + self.graph_bytes, text

    def run(self, ids: Tensor) -> Pass:
        """The pass over the new tokens [n] that `cache.open` has announced; called without gradients."""
        step = self._static_step(ids) if self.static and not self.failure else None
        if step is not None:
            out = step.run()
            choices = None if out.choices is None else out.choices[: len(ids)]
            return Pass(out.features[: len(ids)], out.logits[: len(ids)], choices)
        made = self.target.forward(ids[None], self.feature_layers, self.cache.positions(ids.device), self.cache)
        features, last = made.features[0], made.last_hidden[0]
        return Pass(features, self.target.head(last), None)

    def _static_step(self, ids: Tensor) -> StaticStep | None:
        """The step that serves the announced pass, its buffers filled; None if none does."""
        opened = self.cache.opened
        shape = step_shape([layout.count for _, layout in opened])
        last = opened[-1][1]
        if shape is None or last.prefix_len + last.count + shape.tokens - len(ids) > self.cache.capacity:
            return None
        key = (self.feature_layers, self.choose, shape)
        step = self._steps.get(key)
        if step is not None:
            step.fill(ids, opened)
            return step
        step = StaticStep(self.target, self.feature_layers, self.cache, shape, self.choose)
        step.fill(ids, opened)
        try:
            self._capture(step)
        except Exception as error:  # whatever a model does that a graph cannot hold, it can be decoded without one
            self.failure = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._steps, self._pool, self.graph_bytes = {}, None, 0
            kind = type(self.target.model).__name__
            note = f"target {self.target.name!r} ({kind}) decodes without CUDA graphs: {self.failure}"
            print(note, file=sys.stderr, flush=True)
            return None
        self._steps[key] = step
        return step

    def _capture(self, step: StaticStep) -> None:
        device = self.target.device
        if device.type != "cuda":
            return
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # a capture does so too, and would hide what it takes
        before = torch.cuda.memory_reserved(device)
        with torch.cuda.device(device):
            step.capture(self._pool)
        self.graph_bytes += max(0, torch.cuda.memory_reserved(device) - before)


def _serves(device: torch.device) -> bool:
    """Static steps pay where launches cost more than work."""
    return device.type == "cuda"


def _addresses(target: Target) -> tuple[int, ...]:
    model = target.model
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
