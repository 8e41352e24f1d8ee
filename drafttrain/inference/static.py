"""Static target passes: functions of fixed buffers, which a GPU replays as CUDA graphs.

A pass over a root and a few nodes takes a GPU less time than Python takes to launch its thousand
kernels. A `StaticStep` therefore fixes everything that the host decides: shapes, addresses, grids.
What changes from round to round (token ids, positions, cache slots, ancestors) is copied into its
buffers, and the captured launches are replayed.

    round      [root + nodes] of all rows, N tokens     ->   padded to the next bucket: 1 2 4 8 16 24 32 48 64 ...
    buffers    ids, slots, plan (offsets, prefix lengths, positions, ancestor bits)
    function   embedding .. last norm, features, head, argmax; writes keys and values to the cache at `slots`

`TargetSteps` keeps the steps of a target together with the cache that they write to, and captures
each shape at its first use. Prompts, passes larger than the last bucket, models that cannot be
captured, and CPUs use dynamic passes instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.combined import parts_of
from drafttrain.drafters.common.static_draft import DraftSteps, SlotAttention
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.ops.graphs import BUCKETS, Captured, GraphPool, PlanBuffers, step_shape
from drafttrain.ops.sampling import argmax
from drafttrain.ops.tree_attention_triton import Opened, PlanShape
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target import Target

# Most slots that padding tokens take behind a row's own.
_SPARE = max(after - before - 1 for before, after in pairwise(BUCKETS))
# Capacities are multiples of this, so that few sequences outgrow a cache whose graphs are captured.
_CAPACITY_STEP = 128


class Pass(NamedTuple):
    """The target's output at N packed tokens; valid until the next pass."""

    features: Tensor  # [N, f*h]
    logits: Tensor  # [N, v] float32
    choices: Tensor | None  # [N] int64, argmax of the logits; None if it was not computed


class StaticStep:
    """The pass for one shape, which reads only its buffers.

    Args:
        target: a target whose forward can be captured.
        feature_layers: as in `Target.forward`.
        cache: with the buffers of all layers, which a first forward has allocated.
        shape: upper bounds of the passes that it serves.
        choose: whether to compute `choices`.

    Attributes:
        ids: [1, N] int64.
        places: slots, ancestors and prefixes of the tokens.
        shifts: [N] int64, positions of the tokens less their indices; see `TreeCache.shifts`.
    """

    def __init__(
        self,
        target: Target,
        feature_layers: Sequence[int],
        cache: TreeCache,
        shape: PlanShape,
        choose: bool,
    ):
        self.target = target
        self.feature_layers = tuple(feature_layers)
        self.cache = cache
        self.shape = shape
        self.choose = choose
        self.ids = torch.zeros(1, shape.tokens, dtype=torch.long, device=target.device)
        self.places = PlanBuffers(shape, target.device)
        self.shifts = torch.zeros(shape.tokens, dtype=torch.long, device=target.device)
        self._shifted = False
        self.context = SlotAttention(cache, self.places.slots, [self.places.plan])
        # Hooks collect the features; they must be in place before the pass is captured.
        target.hook(self.feature_layers)

    def fill(self, ids: Tensor, opened: Opened) -> None:
        """Writes the next pass to the buffers.

        Args:
            ids: [n] on the device. opened: cache row and layout of each part.
        """
        self.ids[0, : len(ids)].copy_(ids)
        self.places.fill(opened, self.cache.capacity)
        shifted = any(layout.base for _, layout in opened)
        if shifted or self._shifted:
            counts = torch.tensor([layout.count for _, layout in opened])
            bases = torch.tensor([layout.base for _, layout in opened])
            self.shifts.zero_()
            self.shifts[: len(ids)].copy_(bases.repeat_interleave(counts))
            self._shifted = shifted

    @torch.no_grad()
    def forward(self) -> Pass:
        """The pass over all N tokens. It reads the buffers and never waits for the device."""
        positions = (self.places.plan.positions.long() + self.shifts)[None]  # [1, N]
        out = self.target.forward(
            self.ids,
            self.feature_layers,
            positions,
            self.context,
        )
        logits = self.target.head(out.last_hidden[0])  # [N, v]
        choices = argmax(logits) if self.choose else None
        return Pass(out.features[0], logits, choices)


class TargetSteps:
    """The captured passes of a target, with the cache that they share with the prompts' forwards.

    One call uses them at a time: `lease` takes them from the target, `release` returns them.

    Attributes:
        cache: set by `open`.
        pool: of its graphs and of the drafter's.
    """

    def __init__(self, target: Target):
        self.target = target
        self.pool = GraphPool(target.device)
        kind = type(target.model).__name__
        note = f"target {target.name!r} ({kind}) decodes without CUDA graphs"
        self._passes = Captured(self.pool, note)
        self.choose = False
        self.feature_layers: tuple[int, ...] = ()
        self._weights = _addresses(target.model)
        self._drafts: tuple[tuple[int, ...], DraftSteps] | None = None  # weights, steps
        self._reset(TreeCache(0))

    @property
    def failure(self) -> str:
        """Why the target's passes stay dynamic; empty unless a capture failed."""
        return self._passes.failure

    @staticmethod
    def lease(target: Target, graphs: bool | None) -> TargetSteps | None:
        """The steps that an earlier call released, or new ones; None where passes are dynamic.

        Args:
            graphs: False for dynamic passes; None reads $DRAFTTRAIN_GRAPHS (0 turns graphs off).
                CPUs have no graphs.
        """
        if graphs is None:
            graphs = os.environ.get("DRAFTTRAIN_GRAPHS", "1") != "0"
        if not graphs or not _serves(target.device):
            return None
        steps: TargetSteps | None = target.take_idle_steps()
        # Graphs hold addresses: weights that moved would be read from freed memory.
        while steps is not None and steps._weights != _addresses(target.model):
            steps = target.take_idle_steps()
        if steps is None:
            return TargetSteps(target)
        return steps

    def release(self) -> None:
        """Leaves cache and graphs to the next call."""
        if not self.target.idle_steps:
            self.target.idle_steps.append(self)

    def open(
        self,
        capacity: int,
        rows: int,
        feature_layers: Sequence[int],
        choose: bool,
    ) -> TreeCache:
        """The cache for new sequences.

        The last cache is reused if it is large enough, because graphs hold its address.

        Args:
            capacity: least number of slots per row; rows: least number of sequences at a time.
            feature_layers, choose: outputs of the passes; see `StaticStep`.
        """
        self.feature_layers = tuple(feature_layers)
        self.choose = choose
        if capacity + _SPARE > self.cache.capacity or rows > self.cache.rows:
            grown = rounded_capacity(capacity)
            if rows <= self.cache.rows:
                # Growing sequences shall seldom drop the graphs.
                context = self.target.max_positions or capacity
                doubled = min(2 * self.cache.capacity, rounded_capacity(context))
                grown = max(grown, doubled)
            self._reset(TreeCache(grown, rows))
        return self.cache

    def open_drafts(self, drafter: Drafter, spec: TreeSpec) -> DraftSteps | None:
        """The drafter's static steps, an earlier call's if they fit; None if passes are dynamic."""
        weights: tuple[int, ...] = ()
        main, side = parts_of(drafter)
        while side is not None:  # a combination may be combined again
            main, side = parts_of(main)
        if isinstance(main, nn.Module):
            weights = _addresses(main)
        last: DraftSteps | None = None
        if self._drafts is not None:
            known, last_steps = self._drafts
            if weights == known:
                last = last_steps
        steps = drafter.open_steps(
            self.pool,
            self.cache.capacity,
            self.cache.rows,
            spec,
            last,
        )
        if steps is None:
            self._drafts = None
        else:
            self._drafts = (weights, steps)
        return steps

    def reserve(self, capacity: int) -> None:
        """Grows the cache, which moves its buffers, so all graphs are dropped.

        To no more than was asked for: callers of many rows count what they take.
        """
        if capacity > self.cache.capacity:
            self.cache.reserve(rounded_capacity(capacity))
            self._reset(self.cache)

    def _reset(self, cache: TreeCache) -> None:
        self.cache = cache
        self._passes.made.clear()
        self._drafts = None
        self.pool.clear()

    @property
    def memory(self) -> tuple[int, str]:
        """Bytes of caches and graphs, and their description."""
        text = str(self.cache)
        nbytes = self.cache.nbytes + self.pool.nbytes
        if self._drafts is not None:
            drafted = self._drafts[1].cache.nbytes
            text = f"{text}, the drafter's {drafted / 2**20:,.1f} MiB"
            nbytes = nbytes + drafted
        if self.pool.count:
            text += f", {self.pool.count} captured CUDA graphs {self.pool.nbytes / 2**20:,.1f} MiB"
        return nbytes, text

    def run(self, ids: Tensor) -> Pass | None:
        """The pass over the new tokens [n] that `cache.open` announced; None if it must be dynamic."""
        opened = self.cache.opened
        shape = step_shape([layout.count for _, layout in opened])
        if self.failure or shape is None:
            return None
        most = self.target.most_captured
        if most is not None and shape.tokens > most:
            return None
        # Padding tokens take slots behind the last row's own.
        _, last = opened[-1]
        n = len(ids)
        if last.prefix_len + last.count + shape.tokens - n > self.cache.capacity:
            return None
        replay = self._passes.step(
            (self.feature_layers, self.choose, shape),
            lambda: StaticStep(self.target, self.feature_layers, self.cache, shape, self.choose),
            lambda step: step.fill(ids, opened),
        )
        if replay is None:  # the capture failed, and passes stay dynamic
            self._reset(self.cache)
            return None
        out = replay()
        choices = out.choices
        if choices is not None:
            choices = choices[:n]
        return Pass(out.features[:n], out.logits[:n], choices)


def rounded_capacity(capacity: int) -> int:
    """The slots that a row of static passes takes for sequences of `capacity` tokens."""
    return -(-(capacity + _SPARE) // _CAPACITY_STEP) * _CAPACITY_STEP  # rounded up


def _serves(device: torch.device) -> bool:
    """Whether launches cost more than the work."""
    return device.type == "cuda"


def _addresses(model: nn.Module) -> tuple[int, ...]:
    """Addresses of all weights and buffers."""
    found = [tensor.data_ptr() for tensor in model.parameters()]
    found += [tensor.data_ptr() for tensor in model.buffers()]
    return tuple(found)
