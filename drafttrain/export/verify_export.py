"""`drafttrain verify`: proves that an export computes what the drafter does, from its files alone
and in a real engine.
"""

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

from drafttrain.drafters.shipping import find_drafter, shipping
from drafttrain.environment import describe_environment
from drafttrain.errors import UserError
from drafttrain.evaluation.suites import load_suite, take_evenly
from drafttrain.export.engine_runs import missing
from drafttrain.export.export_drafter import export
from drafttrain.export.serving_recipes import engine_depth, tuned_tree
from drafttrain.export.tiny_drafters import shipped_drafters, tiny_prompts, tiny_target
from drafttrain.export.verify_matrix import (
    DrafterRows,
    VerifyJob,
    VerifyRow,
    agrees,
    as_cells,
    as_line,
    failed,
)
from drafttrain.files import Json, JsonlLog, scratch_folder
from drafttrain.folders import beside, inputs_of, output_file
from drafttrain.formats.engines import ENGINES, PACKAGES
from drafttrain.formats.public_names import write_clean_json
from drafttrain.outcome import command_line, conclude, fault, next_command
from drafttrain.reports.output import table_of, wide_console
from drafttrain.target import Target, resolve_dtype

FEW = 6  # prompts, below which a comparison says little


class _KeptRow(TypedDict):
    """A line of OUTPUT.partial.jsonl."""

    row: VerifyRow
    found: Json  # of `DrafterRows`


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 0 if everything agrees, else 1."""
    if args.output is not None:
        output = output_file(args.output, "verify", inputs_of(args))
    else:
        output = None
    pythons = _interpreters(args.engine_python, args.engine)
    one_only = {"exported": args.exported, "format": args.format}
    if args.engine == "all" and (
        key := next((key for key, value in one_only.items() if value), None)
    ):
        raise UserError(
            f"{key}={one_only[key]!r} is of one format, and --engine all uses every one; name one engine"
        )
    with scratch_folder() as scratch:
        if args.all_kinds:
            found = _all_kinds(args, pythons, scratch, output)
        else:
            found = _one_drafter(args, pythons, scratch, output)
    rows: list[VerifyRow] = found.get("rows", [])
    if len(rows) > 1:
        wide_console().print(table_of([name.replace("_", " ") for name in VerifyRow.__annotations__ if name != "prompts"],
                                      map(as_cells, rows)))  # fmt: skip
    if output is not None:
        command = command_line()
        found = {**describe_environment(torch.device("cpu")), "command": command, **found}
        write_clean_json(output, found)
        _partial(output).unlink(missing_ok=True)
    wrong = [row for row in rows if not agrees(row)]
    for row in wrong:
        fault(f"{row['kind']} in {row['engine']}: {row['verdict']}")
    if rows and not any(row["prompts"] or row in wrong for row in rows):
        raise UserError(f"engine={args.engine!r} ran nothing: {rows[0]['verdict']}")
    then = ""
    if args.drafter and not wrong:
        results, folder = (beside(args.drafter, name) for name in ("results.json", "publish"))
        place = {"drafter": args.drafter, "repo": "USER/NAME", "output": folder}
        then = next_command("push", **place, results=results, dry_run=True)
    conclude(found, [output] if output is not None else [], then)
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
            f"drafter={args.drafter!r}: no engine format is known for kind {trained.kind!r} to verify"
        )
    depth = args.speculative_tokens or engine_depth(trained, tuned_tree(trained.folder))
    if depth != (kind.block_depth(trained) or depth):
        fixed = kind.block_depth(trained)
        raise UserError(
            f"speculative-tokens={depth}: this drafter drafts blocks of {fixed} tokens; drop the flag"
        )
    if args.engine == "auto":
        args.engine = installed_engine(kind.verifiable, pythons)
    if args.engine not in ("none", "all", *kind.verifiable):
        known = ", ".join(kind.verifiable)
        raise UserError(
            f"engine={args.engine!r} runs no {trained.kind!r} drafter; choose {known} or none"
        )
    form = args.format or kind.verifiable.get(args.engine) or next(iter(kind.formats))
    if args.exported:
        exported = {form: Path(args.exported).expanduser()}
    else:
        exported = {}
    if args.exported and not exported[form].is_dir():
        raise UserError(
            f"exported={args.exported!r} is no folder; write one: drafttrain export --help"
        )
    name = args.target or trained.target_name
    if args.engine != "all":
        if not args.exported:
            exported[form] = scratch / "export"
            export(trained, form, exported[form], resolve_dtype(args.dtype), name, depth)
        found: Json = {"files": kind.check(trained, exported[form])}
        figures = ", ".join(
            f"{key.replace('_', ' ')} {value:.3g}" for key, value in found["files"].items()
        )
        print(f"files: as an engine loads them, they compute what the drafter does ({figures})")
    if args.engine == "none":
        return found
    if not name:
        raise UserError("the drafter does not record its target; pass --target")
    target = Target.load(name, args.dtype)
    if not trained.target:
        trained = replace(trained, target=target.identity())
    questions = take_evenly(
        load_suite(args.suite, args.chat_template_kwargs).questions, args.prompts
    )
    prompts = [question.prompt(target.tokenizer) for question in questions]
    if len(prompts) < FEW:
        print(
            f"{len(prompts)} prompts say little about accepted lengths; give at least {FEW}",
            file=sys.stderr,
        )
    job = VerifyJob(trained, target, name, args.dtype, prompts, args.max_new_tokens, depth)
    side = DrafterRows(job, scratch, exported, "" if args.engine == "all" else form)
    rows = _rows([side], args, pythons, output)
    described = {
        "target": name,
        "drafter": args.drafter,
        "dtype": args.dtype,
        "speculative_tokens": depth,
    }
    if args.engine == "all":
        proven = {"files": side.files}
    else:
        proven = {**found, **side.comparison}
    return {
        **proven,
        **described,
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
    """Verifies a tiny drafter of every kind; returns what the JSON file holds beside the
    environment.
    """
    names = ("exported", "format", "target", "chat_template_kwargs")
    given = {name: vars(args)[name] for name in names}
    if named := next((key for key, value in given.items() if value), None):
        raise UserError(
            f"{named}={given[named]!r} goes with --drafter; --all-kinds makes target and drafters itself"
        )
    target = tiny_target(scratch / "target")
    prompts = tiny_prompts(args.prompts)
    drafters = shipped_drafters(target, prompts, args.max_new_tokens, scratch)
    sides = []
    for trained in drafters:
        depth = shipping(trained.kind).block_depth(trained) or args.speculative_tokens or 3
        job = VerifyJob(
            trained,
            target,
            target.path,
            "float32",
            prompts,
            args.max_new_tokens,
            depth,
        )
        sides.append(DrafterRows(job, scratch, {}))
    if args.engine in ("auto", "none"):
        args.engine = "all"
    rows = _rows(sides, args, pythons, output)
    files = {side.job.trained.kind: side.files for side in sides}
    return {
        "files": files,
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
    engines = [engine for engine in ENGINES.values() if args.engine in ("all", engine.name.lower())]
    many = args.all_kinds or args.engine == "all"
    if output is not None and many:
        log = _log(args, output, sides, pythons)
    else:
        log = None
    if log:
        kept = {(entry["row"]["kind"], entry["row"]["engine"]): entry for entry in log.rows}
    else:
        kept = {}
    absent = {engine.name: _absent(engine.name.lower(), pythons) for engine in engines}
    rows = []
    with contextlib.closing(log) if log else contextlib.nullcontext():
        for side, engine in itertools.product(sides, engines):
            kind = side.job.trained.kind
            if entry := kept.get((kind, engine.name)):
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
                row = failed(side, engine, error)
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
        digest.update(
            repr(
                (side.job.trained.config, side.job.prompts, side.job.depth, side.job.dtype)
            ).encode()
        )
        for file in sorted(side.job.trained.folder.glob("*.safetensors")):
            digest.update(file.read_bytes())
    settings = {
        "drafters": digest.hexdigest(),
        "tokens": args.max_new_tokens,
        "target": args.target,
    }
    return JsonlLog(
        _partial(output),
        {**settings, "pythons": dict(pythons)},
        _KeptRow,
        overwrite=True,
    )


def _partial(output: Path) -> Path:
    return output.with_name(output.name + ".partial.jsonl")


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
        if name not in PACKAGES:
            raise UserError(
                f"engine-python={word!r} must be ENGINE=PATH, ENGINE one of {', '.join(PACKAGES)}"
            )
        if name == "transformers" and Path(path).expanduser() != Path(sys.executable):
            raise UserError(
                f"engine-python={word!r}: transformers runs in drafttrain's own environment; leave it out"
            )
        if not Path(path).expanduser().is_file():
            raise UserError(
                f"engine-python={word!r} is no existing file; give the engine's interpreter"
            )
        found[name] = str(Path(path).expanduser())
    return found


def _absent(key: str, pythons: Mapping[str, str]) -> str:
    """Why an engine cannot run here; empty if it can."""
    if key not in PACKAGES:
        return "drafttrain does not start it"
    reason = missing(pythons.get(key, sys.executable), PACKAGES[key])
    if reason:
        return f"{reason}, see --engine-python"
    return ""


def installed_engine(verifiable: Iterable[str], pythons: Mapping[str, str]) -> str:
    """The first of some engines that has an interpreter of its own or is in this environment, or
    none.
    """
    for name in ("vllm", "llama.cpp"):
        if name in verifiable and (name in pythons or importlib.util.find_spec(PACKAGES[name])):
            return name
    return "none"
