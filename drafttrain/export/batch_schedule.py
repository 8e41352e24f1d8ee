"""Draft lengths by batch size, from a sweep or an estimate.

Speculation pays less, and ends, as batches grow.

vLLM    num_speculative_tokens_per_batch_size: [[first, last, tokens], ...], in --speculative-config
SGLang  --speculative-adaptive-config FILE: {"first": {"candidate_steps": [tokens]}, ...}, for EAGLE and EAGLE3 chains

Sources: vllm/v1/spec_decode/dynamic/utils.py of vLLM 0.32; srt/speculative/adaptive_spec_params.py
of SGLang 0.5.23.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.files import Json, read_json

_LARGEST = 4096  # batch size where the last entry ends; engines carry it on


_BatchSize = Annotated[int, Field(ge=1, le=_LARGEST)]


class _CellSize(TypedDict):
    batch_size: _BatchSize


class _MeasuredChain(TypedDict):
    cell: _CellSize
    spec: str
    speedup_vs_fastest: float | None


class _EstimatedBatch(TypedDict):
    batch_size: _BatchSize
    length: Annotated[int, Field(ge=0)]


class _ScheduleFile(TypedDict):
    cells: NotRequired[list[_MeasuredChain]]  # of a sweep
    rows: NotRequired[list[_EstimatedBatch]]  # of an estimate


class Entry(NamedTuple):
    """Batch sizes first to last (inclusive) draft `tokens` per round; 0 switches speculation off."""

    first: int
    last: int
    tokens: int


def batch_schedule(path: Path) -> list[Entry]:
    """The fastest draft length for every batch size; sizes in between take the next smaller one's.

    Args:
        path: summary.json of `drafttrain sweep` over --lengths and --batch-sizes with --grid, or
            the --output of `drafttrain estimate`.

    Raises:
        UserError: neither of both, or no chain and batch size in it.
    """
    fix = "give a sweep's summary.json or the output of drafttrain estimate"
    content = read_json(path, "schedule", fix, _ScheduleFile)
    if "cells" not in content and "rows" not in content:
        raise UserError(f"schedule={str(path)!r} holds no draft lengths by batch size; {fix}")
    best = {row["batch_size"]: row["length"] for row in content.get("rows", [])}
    # Of a sweep the fastest chain of each size; 0 where none is faster than plain decoding.
    highest: dict[int, tuple[float, int]] = {}  # speed-up and length by batch size
    for cell in content.get("cells", []):
        spec = TreeSpec.parse(cell["spec"])
        speedup = cell["speedup_vs_fastest"]
        if speedup is not None and spec.shape == "chain":
            size = cell["cell"]["batch_size"]
            highest[size] = max(highest.get(size, (1.0, 0)), (speedup, spec.depth))
    best |= {size: length for size, (_, length) in highest.items()}
    if not best:
        raise UserError(
            f"schedule={str(path)!r} measured no chain; "
            "sweep --lengths 1,2,4 --batch-sizes 1,8,32 --grid"
        )

    sizes = sorted(best)
    found: list[Entry] = []
    for number, size in enumerate(sizes):
        first = 1 if number == 0 else size
        last = _LARGEST
        if number + 1 < len(sizes):
            last = sizes[number + 1] - 1
        if found and found[-1].tokens == best[size]:  # neighbors of the same length are one entry
            found[-1] = found[-1]._replace(last=last)
        else:
            found.append(Entry(first, last, best[size]))
    return found


def vllm_keys(schedule: list[Entry]) -> Json:
    """Keys of --speculative-config; num_speculative_tokens is the longest draft, for which vLLM
    reserves room.
    """
    return {
        "num_speculative_tokens": max(1, *(entry.tokens for entry in schedule)),
        "num_speculative_tokens_per_batch_size": [list(entry) for entry in schedule],
    }


def sglang_config(schedule: list[Entry]) -> Json:
    """The content of --speculative-adaptive-config."""
    return {str(entry.first): {"candidate_steps": [entry.tokens]} for entry in schedule}
