"""The rows of `drafttrain verify`: one drafter, in one engine after the other, beside our decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from typing_extensions import TypedDict

from drafttrain.drafters.registry import load_drafter
from drafttrain.drafters.shipping import shipping
from drafttrain.export.engine_runs import RUNS, EngineJob, ours
from drafttrain.export.export_drafter import export
from drafttrain.files import Json
from drafttrain.formats.engines import EngineRelease
from drafttrain.target import resolve_dtype

# Largest relative difference of accepted lengths. In half precision near ties fall differently on
# both sides, and so do texts.
TOLERANCE = 0.02
HALF_TOLERANCE = 0.05


class VerifyRow(TypedDict):
    """A drafter in an engine; null where the engine was not run."""

    kind: str
    engine: str
    # the engine's own name of it where it was run, else the one whose rules the export follows
    release: str
    loads: bool | None
    same_text: int | None  # prompts with the same tokens
    prompts: int | None
    rounds: int | None  # target passes after the prefill, in the engine
    accepted_length: float | None  # in the engine
    ours: float | None  # accepted length in our decoder; null where it cannot run the drafter
    verdict: str  # "same", or what is wrong, or why it was not run


@dataclass
class DrafterRows:
    """Makes a drafter's rows; exports and our own run are made once.

    Args:
        exported: exports to verify, by format; others are written. form: the format to give engines
            in place of their own.

    Attributes:
        found: per engine that ran, what it did, for the JSON file. comparison: of the last one with
            our decoder.
        files: figures of the proof of each export, by format.
    """

    job: EngineJob
    exported: dict[str, Path]
    form: str = ""
    found: dict[str, Json] = field(default_factory=dict)
    comparison: Json = field(default_factory=dict)
    files: dict[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kind = shipping(self.job.trained.kind)

    def prove(self, form: str) -> Path:
        """The export in a format, read back and compared with the drafter.

        Raises:
            UserError: it cannot be exported, or differs.
        """
        job = self.job
        if form not in self.exported:
            place = job.scratch / f"{job.trained.kind}-{form}"
            export(job.trained, form, place, resolve_dtype(job.dtype), job.target_name, job.depth)
            self.exported[form] = place
        if form not in self.files:
            self.files[form] = self.kind.check(job.trained, self.exported[form])
        return self.exported[form]

    def row(self, engine: EngineRelease, python: str = "", absent: str = "") -> VerifyRow:
        """The row of an engine, which runs if its interpreter is given.

        Args:
            absent: why it cannot run here, for the verdict.

        Raises:
            UserError: the export differs from the drafter, or the engine fails.
        """
        trained = self.job.trained
        row = empty_row(trained.kind, engine)
        form = self.form
        if not form:
            form = self.kind.verifiable.get(engine.name.lower(), engine.form)
        reasons = self.kind.unserved(trained, form, engine)
        if reasons:
            row["verdict"] = f"unsupported by release {engine.release}: {'; '.join(reasons)}"
            return row

        exported = self.prove(form)
        if python and engine.name in self.kind.needs_gpu and not torch.cuda.is_available():
            python = ""
            absent = f"it drafts with {trained.kind} on GPUs only"
        if python and self.job.seen and not RUNS[engine.name].sees:
            python = ""
            absent = "prompts with images are compared in vLLM alone"
        if not python:
            rules = f"the files follow the rules of release {engine.release}"
            row["verdict"] = f"not run here ({absent}); {rules}"
            return row
        self._compare(row, RUNS[engine.name].run(self.job, exported, python))
        return row

    @cached_property
    def ours(self) -> Json | None:
        """Our decoder's run; None for a draft model with another vocabulary than the target's.

        Engines translate between vocabularies otherwise.
        """
        if not self.kind.shares_vocabulary(self.job.trained, self.job.target):
            return None
        drafter = load_drafter(str(self.job.trained.folder), self.job.target)
        assert drafter is not None, "a folder is not 'none'"
        return ours(self.job, drafter)

    def _compare(self, row: VerifyRow, theirs: Json) -> None:
        """Fills a row, and `found`, by the comparison with our decoder.

        Where our decoder cannot run the drafter, texts are compared with plain decoding's.
        """
        mine = self.ours
        ratio = 1.0
        if mine:
            texts = mine["tokens"]
            # 0 where every answer ends with its first token: no round was run.
            if mine["accepted_length"]:
                ratio = theirs["accepted_length"] / mine["accepted_length"]
        else:
            texts = ours(self.job, None)["tokens"]
        pairs = list(zip(texts, theirs["tokens"], strict=True))
        same = sum(a == b for a, b in pairs)

        wrong = []
        tolerance = HALF_TOLERANCE
        if self.job.dtype == "float32":
            tolerance = TOLERANCE
            if same < len(pairs):
                wrong.append(f"{len(pairs) - same} other texts")
        if abs(ratio - 1) > tolerance:
            wrong.append(f"accepted length {ratio - 1:+.1%}")
        verdict = "same"
        if wrong:
            verdict = f"differs: {', '.join(wrong)}"

        self.found[row["engine"].lower().replace(".", "_")] = theirs
        self.comparison = {
            "identical_texts": same,
            "common_prefix": [_common(a, b) for a, b in pairs],
            "accepted_length_ratio": round(ratio, 4),
        }
        row |= {
            "release": theirs["version"],
            "loads": True,
            "same_text": same,
            "prompts": len(pairs),
            "rounds": theirs["rounds"],
            "accepted_length": theirs["accepted_length"],
            "ours": mine["accepted_length"] if mine else None,
            "verdict": verdict,
        }


def empty_row(kind: str, engine: EngineRelease) -> VerifyRow:
    """The row of an engine that was not run."""
    return VerifyRow(
        kind=kind,
        engine=engine.name,
        release=engine.release,
        loads=None,
        same_text=None,
        prompts=None,
        rounds=None,
        accepted_length=None,
        ours=None,
        verdict="",
    )


def agrees(row: VerifyRow) -> bool:
    return not row["verdict"].startswith(("differs", "failed"))


def as_line(row: VerifyRow) -> str:
    """What a row found, for the terminal."""
    if not row["prompts"]:
        return f"{row['engine']}: {row['verdict']}"
    same = f"identical texts on {row['same_text']} of {row['prompts']} prompts"
    theirs = row["accepted_length"] or 0.0
    ours = row["ours"]
    here = "no run here"
    if ours is not None:
        here = f"ours {ours:.3f}"
    if ours:
        here += f" ({theirs / ours - 1:+.1%})"
    return f"{row['engine']}: accepted length {theirs:.3f}, {here}; {same}"


def as_cells(row: VerifyRow) -> list[str]:
    """A row of the table on the terminal, under the names of `VerifyRow`."""
    cells = {}
    for name, value in row.items():
        if name != "prompts":
            cells[name] = "-" if value is None else str(value)
    if row["loads"] is not None:
        cells["loads"] = "yes" if row["loads"] else "no"
    if row["prompts"]:
        cells["same_text"] = f"{row['same_text']} of {row['prompts']}"
    return list(cells.values())


def _common(left: list[int], right: list[int]) -> int:
    """Number of tokens before the first difference."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
