"""`drafttrain verify`: proves that an export drafts as the drafter does, in files and engines."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from typing_extensions import TypedDict

from drafttrain.drafters.engine_trees import engine_chain
from drafttrain.drafters.shipping import find_drafter, shipping
from drafttrain.environment import describe_environment, describe_run
from drafttrain.errors import UserError
from drafttrain.evaluation.metrics import partial_file
from drafttrain.evaluation.suites import load_suite, take_evenly
from drafttrain.export.engine_runs import EngineJob, SeenPrompt, missing
from drafttrain.export.export_drafter import export
from drafttrain.export.serving_recipes import check_depth
from drafttrain.export.tiny_drafters import shipped_drafters, tiny_prompts, tiny_target
from drafttrain.export.verify_matrix import (
    DrafterRows,
    VerifyRow,
    agrees,
    as_cells,
    as_line,
    empty_row,
)
from drafttrain.files import Json, JsonlLog, scratch_folder
from drafttrain.folders import asked_file, beside
from drafttrain.formats.engines import ENGINES, MROPE_NOTE, PACKAGES
from drafttrain.formats.public_names import write_clean_json
from drafttrain.outcome import command_line, conclude, fault, next_command
from drafttrain.reports.output import table_of, wide_console
from drafttrain.target import Target, resolve_dtype
from drafttrain.target.loading import has_mrope
from drafttrain.target.sight import ImagePrompt

FEW = 6  # prompts, below which a comparison says little


class _KeptRow(TypedDict):
    """A line of OUTPUT.partial.jsonl."""

    row: VerifyRow
    found: Json  # of `DrafterRows`


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 0 if everything agrees, else 1."""
    if args.all_kinds and args.drafter:
        raise UserError(
            f"drafter={args.drafter!r} and all-kinds exclude each other; drop one of them"
        )
    if not args.all_kinds and not args.drafter:
        raise UserError("--drafter or --all-kinds must be given; see drafttrain verify --help")
    output = asked_file(args, "verify")
    pythons = _interpreters(args.engine_python, args.engine)
    if args.engine == "all":
        for key in ("exported", "format"):
            if vars(args)[key]:
                raise UserError(
                    f"{key}={vars(args)[key]!r} is of one format, "
                    "and --engine all uses every one; name one engine"
                )
    with scratch_folder() as scratch:
        if args.all_kinds:
            found = _all_kinds(args, pythons, scratch, output)
        else:
            found = _one_drafter(args, pythons, scratch, output)

    rows: list[VerifyRow] = found.get("rows", [])
    if len(rows) > 1:
        headings = []
        for name in VerifyRow.__annotations__:
            if name != "prompts":
                headings.append(name.replace("_", " "))
        wide_console().print(table_of(headings, [as_cells(row) for row in rows]))
    wrote = []
    if output is not None:
        environment = describe_environment(torch.device("cpu"))
        found = {**environment, **describe_run(), "command": command_line(), **found}
        write_clean_json(output, found)
        partial_file(output).unlink(missing_ok=True)
        wrote.append(output)

    wrong = [row for row in rows if not agrees(row)]
    for row in wrong:
        fault(f"{row['kind']} in {row['engine']}: {row['verdict']}")
    if rows and not wrong and not any(row["prompts"] for row in rows):
        raise UserError(f"engine={args.engine!r} ran nothing: {rows[0]['verdict']}")
    then = ""
    if args.drafter and not wrong:
        then = next_command(
            "push",
            drafter=args.drafter,
            repo="USER/NAME",
            output=beside(args.drafter, "publish"),
            results=beside(args.drafter, "results.json"),
            dry_run=True,
        )
    conclude(found, wrote, then)
    return 1 if wrong else 0


def _one_drafter(
    args: argparse.Namespace,
    pythons: Mapping[str, str],
    scratch: Path,
    output: Path | None,
) -> Json:
    """Verifies --drafter; returns what the JSON file holds beside the environment."""
    trained = find_drafter(args.drafter)
    kind = shipping(trained.kind)
    if not kind.formats:
        raise UserError(
            f"drafter={args.drafter!r}: no engine format is known "
            f"for kind {trained.kind!r} to verify"
        )
    depth = args.speculative_tokens or engine_chain(trained)
    check_depth(trained, depth)
    if args.engine == "auto":
        args.engine = installed_engine(kind.verifiable, pythons)
    if args.engine not in ("none", "all", *kind.verifiable):
        known = ", ".join(kind.verifiable)
        raise UserError(
            f"engine={args.engine!r} runs no {trained.kind!r} drafter; choose {known} or none"
        )
    form = args.format
    if form is None:
        form = kind.verifiable.get(args.engine, next(iter(kind.formats)))
    exported = {}
    if args.exported:
        exported[form] = Path(args.exported).expanduser()
        if not exported[form].is_dir():
            raise UserError(
                f"exported={args.exported!r} is not a folder; write one: drafttrain export --help"
            )

    # The proof of the files alone.
    name = args.target or trained.target_name
    found: Json = {}
    if args.engine != "all":
        if not args.exported:
            exported[form] = scratch / "export"
            export(trained, form, exported[form], resolve_dtype(args.dtype), name, depth)
        found["files"] = kind.check(trained, exported[form])
        figures = ", ".join(
            f"{key.replace('_', ' ')} {value:.3g}" for key, value in found["files"].items()
        )
        print(f"files: as an engine loads them, they compute what the drafter does ({figures})")
    if args.engine == "none":
        return found

    # The comparison in engines.
    if not name:
        raise UserError("the drafter does not record its target; pass --target")
    target = Target.load(name, args.dtype)
    if not trained.target:
        trained = replace(trained, target=target.identity())
    suite = load_suite(args.suite, args.chat_template_kwargs)
    questions = take_evenly(suite.questions, args.prompts)
    prompts = []
    seen = {}
    for number, question in enumerate(questions):
        prompt = question.prompt_for(target)
        if isinstance(prompt, ImagePrompt):
            seen[number] = SeenPrompt(prompt, question.images)
            prompt = prompt.ids.tolist()
        prompts.append(prompt)
    if seen and depth > 1 and has_mrope(target.model.config):
        print(f"note: {MROPE_NOTE}", file=sys.stderr, flush=True)
        if args.speculative_tokens is None and not kind.block_depth(trained):
            depth = 1  # later drafts are in wrong slots there
    if len(prompts) < FEW:
        print(
            f"{len(prompts)} prompts say little about accepted lengths; give at least {FEW}",
            file=sys.stderr,
        )
    job = EngineJob(
        trained=trained,
        target=target,
        target_name=name,
        dtype=args.dtype,
        prompts=prompts,
        tokens=args.max_new_tokens,
        depth=depth,
        scratch=scratch,
        seen=seen,
    )
    side = DrafterRows(job, exported, "" if args.engine == "all" else form)
    if "files" in found:
        side.files[form] = found["files"]  # proven already
    rows = _rows([side], args, pythons, output)
    if args.engine == "all":
        found["files"] = side.files
    else:
        found |= side.comparison
    return {
        **found,
        "target": name,
        "drafter": args.drafter,
        "dtype": args.dtype,
        "speculative_tokens": depth,
        "prompts": len(prompts),
        "ours": side.ours,
        **side.found,
        "rows": rows,
    }


def _all_kinds(
    args: argparse.Namespace,
    pythons: Mapping[str, str],
    scratch: Path,
    output: Path | None,
) -> Json:
    """Verifies a tiny drafter of every kind; returns what the JSON file holds."""
    for key in ("exported", "format", "target", "chat_template_kwargs"):
        if vars(args)[key]:
            raise UserError(
                f"{key}={vars(args)[key]!r} goes with --drafter; "
                "--all-kinds makes target and drafters itself"
            )
    target = tiny_target(scratch / "target")
    prompts = tiny_prompts(args.prompts)
    sides = []
    for trained in shipped_drafters(target, prompts, args.max_new_tokens, scratch):
        block = shipping(trained.kind).block_depth(trained)
        depth = block or args.speculative_tokens or 3
        job = EngineJob(
            trained=trained,
            target=target,
            target_name=target.path,
            dtype="float32",
            prompts=prompts,
            tokens=args.max_new_tokens,
            depth=depth,
            scratch=scratch,
        )
        sides.append(DrafterRows(job, {}))
    if args.engine in ("auto", "none"):
        args.engine = "all"
    rows = _rows(sides, args, pythons, output)
    return {
        "files": {side.job.trained.kind: side.files for side in sides},
        "target": "a tiny random Llama",
        "dtype": "float32",
        "prompts": len(prompts),
        "rows": rows,
    }


def _rows(
    sides: list[DrafterRows],
    args: argparse.Namespace,
    pythons: Mapping[str, str],
    output: Path | None,
) -> list[VerifyRow]:
    """The rows of drafters in engines, those of an interrupted run taken from its file."""
    many = args.all_kinds or args.engine == "all"
    engines = []
    absent = {}  # why an engine cannot run here, by name; empty if it can
    for engine in ENGINES.values():
        key = engine.name.lower()
        if args.engine not in ("all", key):
            continue
        engines.append(engine)
        absent[engine.name] = "drafttrain does not start it"
        if key in PACKAGES:
            absent[engine.name] = missing(pythons.get(key, sys.executable), PACKAGES[key])
            if absent[engine.name]:
                absent[engine.name] += ", see --engine-python"

    rows = []
    with contextlib.ExitStack() as stack:
        log = None
        kept = {}  # rows of an interrupted run by kind and engine
        if output is not None and many:
            log = stack.enter_context(contextlib.closing(_log(args, output, sides, pythons)))
            for entry in log.rows:
                kept[entry["row"]["kind"], entry["row"]["engine"]] = entry
        for side, engine in itertools.product(sides, engines):
            kind = side.job.trained.kind
            if (kind, engine.name) in kept:
                entry = kept[kind, engine.name]
                side.found |= entry["found"]
                rows.append(entry["row"])
                continue
            python = ""
            if not absent[engine.name]:
                python = pythons.get(engine.name.lower(), sys.executable)
            print(f"{kind} in {engine.name} ...", file=sys.stderr, flush=True)
            try:
                row = side.row(engine, python, absent[engine.name])
            except UserError as error:
                if not many:
                    raise
                # The engine failed, or the export differs from the drafter.
                row = empty_row(kind, engine)
                row |= {"loads": False, "verdict": f"failed: {error}"}
            rows.append(row)
            print(as_line(row), flush=True)
            if log is not None and row["verdict"] == "same":
                log.add({"row": row, "found": side.found})
    return rows


def _log(
    args: argparse.Namespace,
    output: Path,
    sides: list[DrafterRows],
    pythons: Mapping[str, str],
) -> JsonlLog:
    """Finished rows of this command on these drafters."""
    digest = hashlib.sha256()
    for side in sides:
        job = side.job
        digest.update(repr((job.trained.config, job.prompts, job.depth, job.dtype)).encode())
        for seen in job.seen.values():  # placeholders are the same for all images
            digest.update(repr(seen.prompt.digests).encode())
        for file in sorted(job.trained.folder.glob("*.safetensors")):
            digest.update(file.read_bytes())
    settings = {
        "drafters": digest.hexdigest(),
        "tokens": args.max_new_tokens,
        "target": args.target,
        "pythons": dict(pythons),
    }
    return JsonlLog(partial_file(output), settings, _KeptRow, overwrite=True)


def _interpreters(words: Iterable[str], engine: str) -> dict[str, str]:
    """--engine-python as interpreter by engine.

    Raises:
        UserError: no such file, an engine that has none, or a path that does not say whose it is.
    """
    found: dict[str, str] = {}
    for word in words:
        name, is_named, path = word.partition("=")
        if not is_named or name not in PACKAGES:
            name = engine
            path = word
        place = Path(path).expanduser()
        if name not in PACKAGES:
            raise UserError(
                f"engine-python={word!r} must be ENGINE=PATH, ENGINE one of {', '.join(PACKAGES)}"
            )
        if name == "transformers" and place != Path(sys.executable):
            raise UserError(
                f"engine-python={word!r}: transformers runs in drafttrain's own environment; "
                "leave it out"
            )
        if not place.is_file():
            raise UserError(
                f"engine-python={word!r} is not an existing file; give the engine's interpreter"
            )
        found[name] = str(place)
    return found


def installed_engine(verifiable: Iterable[str], pythons: Mapping[str, str]) -> str:
    """The first of some engines that can run: it has an interpreter, or is installed here; or none."""
    for name in ("vllm", "llama.cpp"):
        if name in verifiable and (name in pythons or importlib.util.find_spec(PACKAGES[name])):
            return name
    return "none"
