"""`drafttrain export`: writes a drafter in the form that an engine loads, and prints the command that serves it."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from drafttrain.drafters.shipping import (
    FORMATS,
    ExportRequest,
    Trained,
    check_expressible,
    engine_of,
    find_drafter,
    format_lines,
    shipping,
)
from drafttrain.errors import UserError
from drafttrain.export.batch_schedule import SCHEDULE_HELP, batch_schedule
from drafttrain.export.serving_recipes import as_text, engine_depth, recipes, tuned_tree
from drafttrain.flags import WEIGHTS_HELP, add_drafter_flag
from drafttrain.formats.public_names import public_name
from drafttrain.target import resolve_dtype

HELP = f"""Write a drafter in the form that an engine loads, and print how to serve it.

  drafttrain export --drafter runs/drafter --format vllm --output runs/export

{format_lines()}

A drafter with features that the format does not support is an error that lists them. Check the result by:

  drafttrain verify --drafter runs/drafter --exported runs/export"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_drafter_flag(parser, trained=True)
    add("--format", required=True, choices=FORMATS, help="whose format; see above")
    add("--output", required=True, help="folder to write")
    newest = ", ".join(f"{form}: {engine_of(form).name} {engine_of(form).release}" for form in FORMATS)
    add("--engine-version", default="", help=f"release of the engine that is to load it (default: {newest})")
    add("--dtype", default="bfloat16", help=WEIGHTS_HELP)
    add(
        "--target", default="", help="name in recipes, and source of a missing tokenizer (default: the recorded target)"
    )
    add("--speculative-tokens", type=int, help="drafted per round (default: the depth in decoding.json, else 3)")
    add("--schedule", default="", help=SCHEDULE_HELP)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    if args.speculative_tokens is not None and args.speculative_tokens < 1:
        raise UserError(f"speculative-tokens={args.speculative_tokens} must be at least 1")
    schedule = batch_schedule(Path(args.schedule).expanduser()) if args.schedule else None
    trained, output = find_drafter(args.drafter), Path(args.output).expanduser()
    depth = args.speculative_tokens or engine_depth(trained, tuned_tree(trained.folder))
    target = args.target or trained.target_name
    files = export(trained, args.format, output, resolve_dtype(args.dtype), target, depth, args.engine_version)
    print(f"wrote {', '.join(str(path) for path in files)}\n")
    name = public_name(target) if target else "TARGET"
    made = recipes(trained, str(output), name, args.speculative_tokens, schedule=schedule)
    engines = shipping(trained.kind).formats[args.format].engines
    print(as_text([recipe for recipe in made if recipe.engine in engines]))
    return 0


def export(
    trained: Trained,
    form: str,
    output: Path,
    dtype: torch.dtype = torch.bfloat16,
    target: str = "",
    depth: int = 3,
    release: str = "",
) -> list[Path]:
    """Writes a drafter in one of FORMATS; the arguments from `output` to `depth` are those of `ExportRequest`.

    Args:
        release: of the format's engine, which decides what is supported; the newest known one unless given.

    Returns:
        The files written.

    Raises:
        UserError: the format does not support the drafter, or the output cannot be written.
    """
    if output.resolve() == trained.folder.resolve():
        raise UserError(f"output={str(output)!r} is the drafter's own folder; choose another")
    return check_expressible(trained, form, release).write(trained, form, ExportRequest(output, dtype, target, depth))
