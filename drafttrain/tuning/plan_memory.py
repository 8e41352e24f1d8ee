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
from drafttrain.training.dry_step import StepMemory, dry_step

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
    """What the memory of a process depends on.

    Attributes:
        rows, length: of a micro-batch; eval_rows: of one in evaluations; prompt: tokens of each row
            that are not learned.
        half: whether the drafter multiplies in 16 bits. checkpointing: of its activations.
        states: where the target's come from. loaded: bytes of a target that is loaded with its
            layers though the step does not run them; shards: GPUs that a process spreads the target
            over.
        stage: of ZeRO, 0 without DeepSpeed; buckets: elements of DeepSpeed's reduction buffers.
        accumulates: an optimizer step has several micro-batches. state_bytes: of the optimizer, per
            trained weight.
        kept, ahead: most bytes of states that a process on a CPU keeps between epochs, and reads
            ahead of their steps.
        data_tokens: of all conversations; no more states than theirs are held.
    """

    rows: int
    length: int
    eval_rows: int
    prompt: int
    gpu: bool
    target_dtype: torch.dtype
    half: bool
    checkpointing: bool
    states: States
    loaded: int = 0
    shards: int = 1
    processes: int = 1
    stage: int = 0
    buckets: int = _BUCKET
    accumulates: bool = False
    state_bytes: int = 8
    kept: float = 0.0
    ahead: float = 0.0
    data_tokens: float = float("inf")


def buckets_of(deepspeed: Json) -> int:
    """Elements of the reduction buffers that a DeepSpeed configuration asks for."""
    zero = deepspeed.get("zero_optimization") or {}
    size = zero.get("reduce_bucket_size", _BUCKET)
    # "auto"
    if isinstance(size, int | float):
        size = int(size)
    else:
        size = _BUCKET
    stage = zero.get("stage", 0)
    if not zero.get("contiguous_gradients", True) and stage < 3:
        return 0
    return size * (2 if zero.get("overlap_comm") and stage < 3 else 1)


class Memory:
    """The memory of a drafter's training by setting; every dry step runs once.

    Args:
        config: the target's. kind, loss: of the recipe. build: makes the drafter, see `dry_step`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        kind: str,
        loss: str,
        build: Callable[[Target], TrainableDrafter],
    ):
        self.config = config
        self.kind = kind
        self.loss = loss
        self.build = build
        self._run = functools.cache(self._dry_step)

    def _dry_step(self, setting: Setting, trains: bool) -> StepMemory:
        deepspeed = setting.stage > 0
        bfloat16 = torch.bfloat16 if setting.half else None
        return dry_step(
            self.config,
            self.kind,
            {},
            rows=setting.rows,
            length=setting.length,
            prompt=min(setting.prompt, setting.length - 2),
            gpu=setting.gpu,
            target_dtype=setting.target_dtype,
            drafter_dtype=(bfloat16 if deepspeed else None) or torch.float32,
            autocast=None if deepspeed else bfloat16,
            checkpointing=setting.checkpointing,
            source={"online": "online", "none": "none"}.get(setting.states, "states"),  # type: ignore[arg-type]
            loss=self.loss,
            accumulates=setting.accumulates and not deepspeed and trains,
            trains=trains,
            keeps=setting.kept > 0,
            build=self.build,
        )

    def step(self, setting: Setting, trains: bool = True) -> StepMemory:
        """A step of this setting, extrapolated where its batch is large."""
        # What does not change a dry step does not start another one.
        plain = replace(
            setting,
            eval_rows=1,
            loaded=0,
            shards=1,
            processes=1,
            stage=min(setting.stage, 1),
            buckets=0,
        )
        plain = replace(
            plain,
            state_bytes=8,
            kept=float(setting.kept > 0),
            ahead=0.0,
            data_tokens=0.0,
        )
        if not trains:
            plain = replace(plain, rows=setting.eval_rows, accumulates=False)
        if plain.rows * plain.length <= _MOST_TOKENS:
            return self._run(plain, trains)
        rows = _MOST_TOKENS // plain.length
        if rows > 1:
            few, many = (replace(plain, rows=n) for n in (rows // 2, rows))
            at = plain.rows
            a = few.rows
            b = many.rows
        else:  # one row is long: the same number of tokens in rows of a length that runs
            few, many = (
                replace(plain, rows=1, length=n) for n in (_MOST_TOKENS // 2, _MOST_TOKENS)
            )
            at = plain.rows * plain.length
            a = few.length
            b = many.length
        return _line(self._run(few, trains), self._run(many, trains), (at - a) / (b - a))

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
            if setting.states in ("stored", "vllm"):
                working["states ahead"] = min(setting.ahead, states)
            else:
                working["states ahead"] = 0.0
        # The optimizer's step holds copies of the gradients that it owns, when the working memory
        # is free again.
        copies = 0.0
        if setting.stage:
            width = 2 if setting.half else 4
            copies = (
                (2 * width + 4) * step.trained / setting.processes
                - held["gradients"]
                - sum(working.values())
            )
            copies = max(0.0, copies - held.get("gradient buckets", 0.0))
        parts = {**held, **working}
        parts["optimizer"] += copies
        evaluation = 0
        if setting.eval_rows:
            evaluation = self.step(setting, trains=False).working
        free = (
            sum(working.values()) + held["gradients"] + held.get("gradient buckets", 0.0) + copies
        )
        if evaluation > free:
            parts["evaluation"] = evaluation - free
        if setting.gpu:
            fragments = _FRAGMENTS * max(sum(working.values()), evaluation)
            parts["reserve"] = (
                _CONTEXT + fragments + (_COMMUNICATION if setting.processes > 1 else 0.0)
            )
        return parts

    def _held(self, setting: Setting, step: StepMemory) -> dict[str, float]:
        """Weights, gradients and optimizer states of one of the processes."""
        stage = setting.stage
        n = setting.processes
        trained = step.trained
        target = max(step.target, setting.loaded) / setting.shards
        if not stage:
            # those of DistributedDataParallel
            if n > 1:
                copies = {"gradient buckets": float(step.gradients)}
            else:
                copies = {}
            parts = {"target": target, "drafter": step.drafter, "gradients": step.gradients}
            return {**parts, "optimizer": float(setting.state_bytes * trained), **copies}
        width = 2 if setting.half else 4
        drafter = float(step.drafter)
        if stage == 3:
            gathered = max(min(trained, _LIVE), step.largest)  # for a forward
            drafter = drafter / n + width * gathered
        return {
            "target": target,
            "drafter": drafter,
            "gradients": width * trained / (n if stage > 1 else 1),
            "optimizer": (4 + setting.state_bytes)
            * trained
            / n,  # with the float32 copy of the weights
            # A module's gradients exist whole until they are reduced, in a bucket or as they are.
            "gradient buckets": float(
                width * (setting.buckets + (step.largest if stage > 1 and n > 1 else 0))
            ),
        }

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
        tokens = _MOST_TOKENS // (setting.length if name == "rows" else setting.rows)
        points = sorted(
            {unit, *(max(unit, min(tokens, highest) // n // unit * unit) for n in (1, 2))}
        )
        if not (len(points) > 1):
            points = [unit, 2 * unit]
        totals = [self.total(replace(setting, eval_rows=0, **{name: n})) for n in points]  # type: ignore[arg-type]

        def fits(size: int) -> bool:
            i = next((i for i in range(1, len(points)) if size <= points[i]), len(points) - 1)
            slope = (totals[i] - totals[i - 1]) / (points[i] - points[i - 1])
            return totals[i] + slope * (size - points[i]) <= limit

        return (
            bisect.bisect_left(
                range(unit, highest + 1, unit),
                True,
                key=lambda size: not fits(size),
            )
            * unit
        )


def _line(a: StepMemory, b: StepMemory, share: float) -> StepMemory:
    """The step at `share` of the way from a to b, beyond b where that is above 1."""
    names = ("features", "logits", "activations", "flops")
    ends = {name: (getattr(a, name), getattr(b, name)) for name in names}
    return replace(
        b,
        **{
            name: max(0, round(first + share * (last - first)))
            for name, (first, last) in ends.items()
        },
    )
