"""The rows of `drafttrain verify`: one drafter, in one engine after the other, beside our decoder."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from typing_extensions import TypedDict

from drafttrain.drafters.registry import load_drafter
from drafttrain.drafters.shipping import GGUF_NAME, Trained, shipping
from drafttrain.errors import UserError
from drafttrain.export import engine_runs
from drafttrain.export.engine_runs import EngineJob
from drafttrain.export.export_drafter import export
from drafttrain.export.verify_export_flags import HALF_TOLERANCE, TOLERANCE
from drafttrain.files import Json
from drafttrain.formats.engines import EngineRelease
from drafttrain.formats.weights import dtype_name
from drafttrain.formats.write_gguf import write_gguf
from drafttrain.target import Target, resolve_dtype


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


class VerifyJob(NamedTuple):
    """What every engine is to do with a drafter."""

    trained: Trained
    target: Target
    target_name: str
    dtype: str  # of the target and of what is exported
    prompts: list[list[int]]  # token ids
    tokens: int  # new ones per prompt at most
    depth: int  # drafted tokens per round


class DrafterRows:
    """Makes a drafter's rows; exports, our own run and the target's GGUF file are made once.

    Args:
        scratch: folder for what is written. exported: exports to verify, by format; others are
            written. form: the format to give engines in place of their own.

    Attributes:
        found: per engine that ran, what it did, for the JSON file. comparison: of the last one with
            our decoder.
        files: figures of the proof of each export, by format.
    """

    def __init__(self, job: VerifyJob, scratch: Path, exported: dict[str, Path], form: str = ""):
        self.job = job
        self.scratch = scratch
        self.exported = exported
        self.form = form
        self.kind = shipping(job.trained.kind)
        self.found: dict[str, Json] = {}
        self.comparison: Json = {}
        self.files: dict[str, Json] = {}

    def prove(self, form: str) -> Path:
        """The export in a format, read back and compared with the drafter. Raises UserError: it
        cannot be, or differs.
        """
        job = self.job
        if form not in self.exported:
            place = self.scratch / f"{job.trained.kind}-{form}"
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
        key = engine.name.lower()
        row = VerifyRow(
            kind=trained.kind, engine=engine.name, release=engine.release, loads=None, same_text=None, prompts=None,
            rounds=None, accepted_length=None, ours=None, verdict="",
        )  # fmt: skip
        form = self.form or self.kind.verifiable.get(key, engine.form)
        if engine.name not in self.kind.options(trained):
            reasons = [f"it knows no drafter of kind {trained.kind}"]
        else:
            reasons = self.kind.unsupported(trained, form, engine)
        if reasons:
            return {
                **row,
                "verdict": f"unsupported by release {engine.release}: {'; '.join(reasons)}",
            }
        exported = self.prove(form)
        if python and engine.name in self.kind.needs_gpu and not torch.cuda.is_available():
            python = ""
            absent = f"it drafts with {trained.kind} on GPUs only"
        if not python:
            rules = f"the files follow the rules of release {engine.release}"
            return {**row, "verdict": f"not run here ({absent}); {rules}"}
        theirs = self._run(key, python, exported)
        return self._compared(row, key, theirs)

    @cached_property
    def ours(self) -> Json | None:
        """Our decoder's run; None for a draft model with another vocabulary than the target's:
        engines translate otherwise.
        """
        if not self.kind.shares_vocabulary(self.job.trained, self.job.target):
            return None
        drafter = load_drafter(str(self.job.trained.folder), self.job.target)
        assert drafter is not None, "a folder is no 'none'"
        return engine_runs.ours(self._engine_job(""), drafter)

    @cached_property
    def _target_gguf(self) -> Path:
        file = self.scratch / "target.gguf"
        if not file.exists():  # drafters of one target share it
            write_gguf(Path(self.job.target.path), file, dtype_name(resolve_dtype(self.job.dtype)))
        return file

    def _engine_job(self, python: str) -> EngineJob:
        job = self.job
        return EngineJob(job.target, job.dtype, job.prompts, job.tokens, job.depth, python)

    def _run(self, key: str, python: str, exported: Path) -> Json:
        job, options = self._engine_job(python), self.kind.options(self.job.trained)
        if key == "vllm":
            return engine_runs.vllm(job, exported, options["vLLM"])
        if key == "transformers":
            return engine_runs.transformers(job, exported, options["transformers"])
        spec_type = str(options["llama.cpp"]["spec-type"])
        return engine_runs.llama_cpp(job, self._target_gguf, exported / GGUF_NAME, spec_type)

    def _compared(self, row: VerifyRow, key: str, theirs: Json) -> VerifyRow:
        """Fills a row, and `found`, by the comparison with our decoder; without it, with plain
        decoding's texts.
        """
        mine = self.ours
        job = self.job
        if mine:
            texts = mine["tokens"]
        else:
            texts = engine_runs.ours(self._engine_job(""), None)["tokens"]
        pairs = list(zip(texts, theirs["tokens"], strict=True))
        same = sum(a == b for a, b in pairs)
        ratio = 1.0
        if mine:
            ratio = theirs["accepted_length"] / mine["accepted_length"]
        exact = job.dtype == "float32"
        if exact and same < len(pairs):
            wrong = [f"{len(pairs) - same} other texts"]
        else:
            wrong = []
        if abs(ratio - 1) > (TOLERANCE if exact else HALF_TOLERANCE):
            wrong.append(f"accepted length {ratio - 1:+.1%}")
        self.found[key.replace(".", "_")] = theirs
        self.comparison = {
            "identical_texts": same,
            "common_prefix": [_common(a, b) for a, b in pairs],
            "accepted_length_ratio": round(ratio, 4),
        }
        return {
            **row,
            "release": theirs["version"],
            "loads": True,
            "same_text": same,
            "prompts": len(pairs),
            "rounds": theirs["rounds"],
            "accepted_length": theirs["accepted_length"],
            "ours": mine["accepted_length"] if mine else None,
            "verdict": f"differs: {', '.join(wrong)}" if wrong else "same",
        }


def failed(row_of: DrafterRows, engine: EngineRelease, error: UserError) -> VerifyRow:
    """The row of an engine that failed, or of an export that differs from the drafter."""
    return VerifyRow(
        kind=row_of.job.trained.kind, engine=engine.name, release=engine.release, loads=False, same_text=None,
        prompts=None, rounds=None, accepted_length=None, ours=None, verdict=f"failed: {error}",
    )  # fmt: skip


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
        here = f"ours {ours:.3f} ({theirs / ours - 1:+.1%})"
    return f"{row['engine']}: accepted length {theirs:.3f}, {here}; {same}"


def as_cells(row: VerifyRow) -> list[str]:
    """A row of the table on the terminal, under the names of `VerifyRow`."""
    cells = {
        name: "-" if value is None else str(value)
        for name, value in row.items()
        if name != "prompts"
    }
    cells["loads"] = {None: "-", True: "yes", False: "no"}[row["loads"]]
    if row["prompts"]:
        cells["same_text"] = f"{row['same_text']} of {row['prompts']}"
    return list(cells.values())


def _common(left: list[int], right: list[int]) -> int:
    """Tokens until the first difference."""
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
