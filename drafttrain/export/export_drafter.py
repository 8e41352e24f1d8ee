"""`drafttrain export`: writes a drafter as an engine loads it, and prints what serves it."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import torch

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.engine_trees import engine_chain
from drafttrain.drafters.registry import is_untrained, keep_decoding
from drafttrain.drafters.shipping import (
    ExportRequest,
    Trained,
    check_expressible,
    find_drafter,
    format_lines,
    shipping,
)
from drafttrain.errors import UserError
from drafttrain.export.serving_recipes import (
    as_text,
    check_depth,
    own_drafting,
    read_schedule,
    recipes,
)
from drafttrain.files import hub_snapshot, is_hub_id
from drafttrain.folders import OutputFolder, beside, check_folder, inputs_of
from drafttrain.formats.engines import MROPE_NOTE
from drafttrain.formats.public_names import public_name
from drafttrain.formats.small_layers import SMALL
from drafttrain.formats.write_gguf import write_gguf
from drafttrain.inside_vllm.swap_worker import METHODS
from drafttrain.outcome import conclude, next_command
from drafttrain.target import load_shell, resolve_dtype, resolve_target
from drafttrain.target.loading import seeing_target

TARGET_GGUF = "target.gguf"
_TARGET_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt"]


def run(args: argparse.Namespace, drafter: Drafter | None, scratch: Path) -> int:
    """Runs the command; returns the exit status.

    Args:
        drafter: loaded already; `args` has its name. scratch: an empty folder.
    """
    if is_untrained(args.drafter):
        return _print_own_drafting(args)
    # The files of a drafter from Python are written first, so that both take one way.
    if drafter is None:
        trained = find_drafter(args.drafter)
    else:
        trained = saved(drafter, scratch)
    # Without a format the question is which there are.
    if args.format is None:
        return _print_formats(args, trained)
    if args.output is None:
        raise UserError(
            "--output is required to write a trained drafter; see drafttrain export --help"
        )
    if args.target_gguf and args.format != "gguf":
        raise UserError(
            f"target-gguf={args.target_gguf!r} goes with --format gguf, not {args.format!r}; "
            "drop the flag"
        )
    target = args.target or trained.target_name
    # A drafter from elsewhere may not record its target.
    if args.target and not trained.target:
        trained = _beside(trained, target)
    kind = check_expressible(trained, args.format, args.engine_version)
    engines = kind.formats[args.format].engines
    schedule = None
    if args.schedule:
        schedule = read_schedule(trained, str(args.schedule), engines)
    output = check_folder(args.output, "export", inputs_of(args))
    root = swap_root(args, trained, output)

    # Write the files.
    # Engines draft chains: the one that was tuned here, else the depth of the tuned tree.
    depth = args.speculative_tokens or engine_chain(trained)
    if args.format != "gguf":  # llama.cpp takes a part of a block
        check_depth(trained, depth)
    dtype = args.dtype
    layers = ""
    if dtype in SMALL:
        layers = dtype
        dtype = "bfloat16"
    files = export(
        trained,
        args.format,
        output,
        resolve_dtype(dtype),
        target,
        depth,
        args.engine_version,
        layers,
    )
    if args.target_gguf:
        files.append(write_target(target, output / TARGET_GGUF, args.target_gguf))

    # Print the commands that serve them.
    # A local target is named as others would find it.
    name = public_name(target) if target else "TARGET"
    made = recipes(
        trained,
        str(output),
        name,
        args.speculative_tokens,
        schedule=schedule,
        swap_root=root,
    )
    text = as_text([recipe for recipe in made if recipe.engine in engines])
    if args.target_gguf:
        place = shlex.quote(str(output / TARGET_GGUF))
        text = text.replace(f"-m {TARGET_GGUF}", f"-m {place}")
    print(f"{text}\n")
    seeing = seeing_target(target)
    if seeing is not None and seeing.has_mrope and "vLLM" in engines:
        print(f"note: {MROPE_NOTE}\n")
    then = next_command("verify", drafter=args.drafter, exported=output)
    conclude({"format": args.format, "serve": text}, files, then)
    return 0


def swap_root(args: argparse.Namespace, trained: Trained, output: Path) -> str:
    """The folder from which a server of this export takes other heads; '' if none is asked for.

    Raises:
        UserError: the export is not below it, or vLLM does not swap drafters of its kind.
    """
    if not args.swap_root:
        return ""
    # The route takes names below the root only, and this export must be one of them.
    root = Path(args.swap_root).expanduser().resolve()
    options = shipping(trained.kind).options(trained).get("vLLM", {})
    is_swapped = options.get("method") in METHODS and "parallel_drafting" not in options
    if args.format != "vllm" or not is_swapped or root not in output.resolve().parents:
        raise UserError(
            f"swap-root={args.swap_root!r} goes with --format vllm, heads of vLLM's methods "
            f"{', '.join(METHODS)} without parallel drafting, and an --output below it"
        )
    return str(root)


def _print_own_drafting(args: argparse.Namespace) -> int:
    """Prints how engines draft by themselves what a drafter without weights drafts."""
    if args.format or args.output or args.schedule:
        raise UserError(
            f"drafter={args.drafter!r} has no weights to write; "
            "without --format, --output and --schedule it prints its recipes"
        )
    depth = args.speculative_tokens or 5
    text = as_text(own_drafting(args.drafter, args.target or "TARGET", depth))
    print(text)
    conclude({"serve": text})
    return 0


def saved(drafter: Drafter, folder: Path) -> Trained:
    """A loaded drafter on disk: its present weights, with the tuned tree of the name it was loaded by.

    Raises:
        UserError: a kind without weights, or a combination.
    """
    drafter.save_pretrained(folder)
    if drafter.name:
        keep_decoding(drafter.name, folder)
    return find_drafter(str(folder))


def _print_formats(args: argparse.Namespace, trained: Trained) -> int:
    """Prints the formats of a trained drafter, and which of its kind's formats cannot express it."""
    lines = format_lines(trained.kind)
    kind = shipping(trained.kind)
    can = []
    refused = []
    for form in kind.formats:
        reasons = kind.unsupported(trained, form)
        if reasons:
            refused.append(f"{form} cannot express this drafter: {'; '.join(reasons)}")
        else:
            can.append(form)
    then = ""
    if lines:
        print("\n".join(lines + refused))
    else:
        print(f"no engine loads drafters of kind {trained.kind}")
    if can:
        place = beside(args.drafter, "export")
        then = next_command("export", drafter=args.drafter, format=can[0], output=place)
    conclude({"kind": trained.kind, "formats": lines, "refused": refused}, then=then)
    return 0


def _beside(trained: Trained, name: str) -> Trained:
    """A drafter that records no target, such as a downloaded draft model, as one of a target.

    Args:
        name: the target that --target names.
    """
    try:
        return replace(trained, target=load_shell(name).identity())
    except UserError:
        print(
            f"note: target={name!r} cannot be read here: vocabularies are not compared",
            file=sys.stderr,
            flush=True,
        )
        return trained


def write_target(name: str, output: Path, kind: str) -> Path:
    """Writes a target as GGUF file of a type in TYPES.

    Raises:
        UserError: no target is named, or it is of a family that is not written.
    """
    if not name:
        raise UserError("target-gguf: the drafter does not record its target; pass --target")
    path = resolve_target(name)
    folder = Path(path)
    if is_hub_id(path):
        folder = hub_snapshot(path, _TARGET_FILES, "target", ignore=["*/*"])
    return write_gguf(folder, output, kind)


def export(
    trained: Trained,
    form: str,
    output: Path,
    dtype: torch.dtype = torch.bfloat16,
    target: str = "",
    depth: int = 3,
    release: str = "",
    layers: str = "",
) -> list[Path]:
    """Writes a drafter in one of FORMATS; returns the files written.

    Args:
        output, dtype, target, depth, layers: as in `ExportRequest`.
        release: of the format's engine, which decides what is supported; the newest known one
            unless given.

    Raises:
        UserError: the format does not support the drafter, or the output cannot be written.
    """
    kind = check_expressible(trained, form, release)
    if layers and layers not in kind.small_layers.get(form, ()):
        raise UserError(
            f"dtype={layers!r}: no engine was tried with such layers of a drafter of kind {trained.kind} as {form}; use bfloat16"
        )
    inputs = [("drafter", str(trained.folder)), ("target", target)]
    with OutputFolder(output, "export", inputs) as folder, folder.staged() as part:
        request = ExportRequest(part, dtype, target, depth, layers=layers)
        files = kind.write(trained, form, request)
        return [folder.path / file.relative_to(part) for file in files]
