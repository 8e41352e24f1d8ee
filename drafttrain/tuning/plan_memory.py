"""What a process of a training run holds at its peak, by part, from dry steps
(training/dry_step.py) and the rules of ZeRO.

    dry step               weights, features, logits and activations of one micro-batch, at the recipe's batch or smaller ones
    rows and lengths       bytes and operations of other batches, linear in either
    ZeRO stage             which of weights, gradients and optimizer states each of N processes holds

Source: ZeRO, arXiv 1910.02054; buffers and the phases of a step as in
deepspeed/runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PretrainedConfig

from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.files import Json
from drafttrain.target import Target
from drafttrain.training.dry_step import StepMemory, StepSetting, dry_step

States = Literal["online", "stored", "vllm", "none"]
_MOST_TOKENS = 8192  # of a dry step: its time grows with the batch; larger ones are extrapolated
_CONTEXT = 1e9  # CUDA context and workspaces of cuBLAS
_COMMUNICATION = 0.5e9  # NCCL's buffers
_FRAGMENTS = 0.05  # of what a step allocates and frees
# DeepSpeed's defaults: elements per reduction; weights gathered in stage 3
_BUCKET = 500_000_000
_LIVE = 1_000_000_000


@dataclass(frozen=True)
class Setting:
    """What the memory of a process depends on."""

    rows: int  # of a micro-batch
    length: int  # tokens of a row
    eval_rows: int  # of a batch in evaluations
    prompt: int  # tokens of each row that are not learned
    gpu: bool
    target_dtype: torch.dtype
    half: bool  # the drafter multiplies in 16 bits
    checkpointing: bool  # of the drafter's activations
    states: States  # where the target's come from
    loaded: int = 0  # bytes of a target that is loaded with layers which the step does not run
    shards: int = 1  # GPUs that a process spreads the target over
    processes: int = 1
    stage: int = 0  # of ZeRO, 0 without DeepSpeed
    buckets: int = _BUCKET  # elements of DeepSpeed's reduction buffers
    accumulates: bool = False  # an optimizer step has several micro-batches
    state_bytes: int = 8  # of the optimizer, per trained weight
    muon: bool = False  # which has one state of a matrix in place of two
    kept: float = 0.0  # most bytes of states that a CPU's process keeps between epochs
    ahead: float = 0.0  # most bytes of states that it reads ahead of their steps
    vision: float = 0.0  # bytes of the target's vision part, if it runs in the process
    data_tokens: float = float("inf")  # of all conversations; no more states than theirs are held

    @property
    def width(self) -> int:
        """Bytes of a number in the drafter's products."""
        return 2 if self.half else 4


def buckets_of(deepspeed: Json) -> int:
    """Elements of the reduction buffers that a DeepSpeed configuration asks for."""
    zero = deepspeed.get("zero_optimization") or {}
    size = _BUCKET
    given = zero.get("reduce_bucket_size")
    if isinstance(given, int | float):  # "auto" otherwise
        size = int(given)
    if zero.get("stage", 0) >= 3:
        return size
    if not zero.get("contiguous_gradients", True):
        return 0
    if zero.get("overlap_comm"):
        return 2 * size
    return size


class Memory:
    """The memory of a drafter's training by setting; every dry step runs once.

    Args:
        config: the target's. loss: of the recipe. build: makes the drafter, see `dry_step`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        loss: str,
        build: Callable[[Target], TrainableDrafter],
    ):
        def run(setting: StepSetting) -> StepMemory:
            return dry_step(config, setting, loss, build)

        self._run = functools.cache(run)

    def step(self, setting: Setting, trains: bool = True) -> StepMemory:
        """A step of this setting, extrapolated where its batch is large."""
        plain = _step_setting(setting, trains)
        tokens = plain.rows * plain.length
        if tokens <= _MOST_TOKENS:
            return self._run(plain)

        rows = _MOST_TOKENS // plain.length
        if rows > 1:
            few = self._run(replace(plain, rows=rows // 2))
            many = self._run(replace(plain, rows=rows))
            return _line(few, many, (plain.rows - rows // 2) / (rows - rows // 2))
        # One row is long: the same number of tokens in rows of a length that runs.
        half = _MOST_TOKENS // 2
        few = self._run(replace(plain, rows=1, length=half))
        many = self._run(replace(plain, rows=1, length=_MOST_TOKENS))
        return _line(few, many, (tokens - half) / (_MOST_TOKENS - half))

    def parts(self, setting: Setting) -> dict[str, float]:
        """Bytes at the peak by part."""
        step = self.step(setting)
        held = self._held(setting, step)
        working = {
            "features": float(step.features),
            "logits": step.logits,
            "activations": step.activations,
        }
        if not setting.gpu:
            states = 2.0 * step.state_width * setting.data_tokens  # bfloat16
            working["states kept"] = min(setting.kept, states)
            working["states ahead"] = 0.0
            if setting.states in ("stored", "vllm"):
                working["states ahead"] = min(setting.ahead, states)
        # What the process may use for other things when a step's backward has ended.
        free = sum(working.values()) + held["gradients"] + held.get("gradient buckets", 0.0)

        # DeepSpeed's optimizer holds copies of the gradients that it owns, in free memory first.
        if setting.stage:
            copies = (2 * setting.width + 4) * step.trained / setting.processes
            beyond = max(0.0, copies - free)
            held["optimizer"] += beyond
            free += beyond

        parts = {**held, **working}
        evaluation = 0
        if setting.eval_rows:
            evaluation = self.step(setting, trains=False).working
        if evaluation > free:
            parts["evaluation"] = evaluation - free
        if setting.gpu:
            reserve = _CONTEXT + _FRAGMENTS * max(sum(working.values()), evaluation)
            if setting.processes > 1:
                reserve += _COMMUNICATION
            parts["reserve"] = reserve
        return parts

    def _held(self, setting: Setting, step: StepMemory) -> dict[str, float]:
        """Weights, gradients and optimizer states of one of the processes."""
        n = setting.processes
        trained = step.trained
        parts = {
            "target": max(step.target, setting.loaded) / setting.shards,
            "drafter": float(step.drafter),
        }
        if setting.vision:
            parts["vision part"] = setting.vision / setting.shards
        if not setting.stage:
            parts["gradients"] = step.gradients
            parts["optimizer"] = float(optimizer_states(setting, step))
            if n > 1:  # DistributedDataParallel's buckets
                parts["gradient buckets"] = float(step.gradients)
            return parts

        gradients = float(setting.width * trained)
        buckets = setting.buckets
        if setting.stage > 1:
            gradients = gradients / n
            if n > 1:  # a module's gradients exist whole until they are reduced
                buckets += step.largest
        if setting.stage == 3:
            gathered = max(min(trained, _LIVE), step.largest)  # for a forward
            parts["drafter"] = step.drafter / n + setting.width * gathered
        parts["gradients"] = gradients
        # With the float32 copy of the weights.
        parts["optimizer"] = (4 * trained + optimizer_states(setting, step)) / n
        parts["gradient buckets"] = float(setting.width * buckets)
        return parts

    def total(self, setting: Setting) -> float:
        return sum(self.parts(setting).values())

    def most(
        self,
        setting: Setting,
        limit: float,
        name: Literal["rows", "length"],
        highest: int,
        unit: int = 1,
    ) -> int:
        """The largest number of rows, or length, whose peak is at most `limit` bytes; 0 if none."""
        # Peaks grow ever faster with the batch, as the largest of several sums that grow evenly:
        # lines between points are safe.
        other = setting.rows
        if name == "rows":
            other = setting.length
        runs = min(_MOST_TOKENS // other, highest)  # the largest that a dry step runs
        half = max(unit, runs // 2 // unit * unit)
        whole = max(unit, runs // unit * unit)
        points = sorted({unit, half, whole})
        if len(points) == 1:
            points = [unit, 2 * unit]
        totals = []
        for size in points:
            changed = replace(setting, eval_rows=0, rows=size)
            if name == "length":
                changed = replace(setting, eval_rows=0, length=size)
            totals.append(self.total(changed))

        def exceeds(size: int) -> bool:
            # The piece that holds the size; the last one is extended beyond its end.
            i = min(bisect.bisect_left(points, size, lo=1), len(points) - 1)
            slope = (totals[i] - totals[i - 1]) / (points[i] - points[i - 1])
            return totals[i] + slope * (size - points[i]) > limit

        sizes = range(unit, highest + 1, unit)
        return bisect.bisect_left(sizes, True, key=exceeds) * unit


def optimizer_states(setting: Setting, step: StepMemory) -> int:
    """Bytes of the optimizer's states of all trained weights."""
    states = setting.state_bytes * step.trained
    if setting.muon:
        states -= 4 * step.matrices
    return states


def _step_setting(setting: Setting, trains: bool) -> StepSetting:
    """The part of a setting on which a dry step depends: equal ones share a step."""
    # DeepSpeed holds the drafter in the dtype of its products; else autocast narrows them.
    drafter_dtype = torch.float32
    autocast: torch.dtype | None = None
    if setting.half:
        if setting.stage:
            drafter_dtype = torch.bfloat16
        else:
            autocast = torch.bfloat16
    source: Literal["online", "states", "none"] = "states"
    if setting.states == "online" or setting.states == "none":
        source = setting.states
    return StepSetting(
        rows=setting.rows if trains else setting.eval_rows,
        length=setting.length,
        prompt=setting.prompt,
        gpu=setting.gpu,
        target_dtype=setting.target_dtype,
        drafter_dtype=drafter_dtype,
        autocast=autocast,
        checkpointing=setting.checkpointing,
        source=source,
        accumulates=setting.accumulates and not setting.stage and trains,
        trains=trains,
        keeps=setting.kept > 0,
    )


def _line(a: StepMemory, b: StepMemory, share: float) -> StepMemory:
    """The step at `share` of the way from a to b, beyond b where that is above 1."""

    def at(first: float, last: float) -> int:
        return max(0, round(first + share * (last - first)))

    return replace(
        b,
        features=at(a.features, b.features),
        logits=at(a.logits, b.logits),
        activations=at(a.activations, b.activations),
        flops=at(a.flops, b.flops),
    )
