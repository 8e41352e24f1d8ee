"""`drafttrain import`: reads a drafter that others published in an engine's form, as one of ours."""

from __future__ import annotations

import argparse
from pathlib import Path

from drafttrain.drafters.adapters import adapted, is_adapter
from drafttrain.drafters.shipping import (
    ExportRequest,
    Shipping,
    find_drafter,
    shipped_kinds,
    shipping,
)
from drafttrain.errors import UserError
from drafttrain.files import hub_snapshot, scratch_folder, writing
from drafttrain.folders import OutputFolder, inputs_of
from drafttrain.formats.weights import read_config
from drafttrain.outcome import conclude, next_command
from drafttrain.target import load_shell

_READS = "; ".join(filter(None, (shipping(kind).reads for kind in shipped_kinds())))


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    with OutputFolder(args.output, "import", inputs_of(args)) as output:
        return convert(args, output)


def convert(args: argparse.Namespace, output: OutputFolder) -> int:
    """Reads the checkpoint, checks it, and writes the drafter."""
    folder = checkpoint_folder(args.checkpoint, args.allow_pickle)
    # Before the target loads: a folder may be no drafter at all.
    kind = None if is_adapter(folder) else find_kind(folder)
    target = load_shell(args.target, trust_remote_code=args.trust_remote_code)
    if kind is None:
        drafter = adapted(folder, target)
        kind = shipping(drafter.kind)
    else:
        drafter = kind.read(folder, target.identity(), args.allow_pickle)

    with output.staged(keep=("decoding.json",)) as part, scratch_folder() as scratch:
        with writing(output.path):
            drafter.save_pretrained(part)
        trained = find_drafter(str(part))
        # Check an export of what was read. A drafter with features that no engine supports has
        # none; GGUF files need more than the drafter.
        for form in kind.formats:
            if form != "gguf" and not kind.unsupported(trained, form):
                exported = scratch / "engine"
                dtype = next(drafter.parameters()).dtype
                depth = kind.checked_depth(trained.config)
                kind.write(trained, form, ExportRequest(exported, dtype, args.target, depth))
                kind.check(trained, exported)
                break

    parameters = sum(p.numel() for p in drafter.parameters())
    print(f"{output.path}: {kind.line(trained, f'{parameters:,}')}")
    then = next_command("eval", carry=args, target=args.target, drafter=output.path)
    conclude({"kind": trained.kind, "parameters": parameters}, [output.path], then)
    return 0


def checkpoint_folder(name: str, allow_pickle: bool) -> Path:
    """The folder of a published checkpoint; one on the Hub is downloaded to the Hub's cache."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    patterns = ["*.json", "*.safetensors"]
    if allow_pickle:
        patterns += ["*.bin", "*.pt"]
    return hub_snapshot(name, patterns, "checkpoint")


def find_kind(folder: Path) -> Shipping:
    """The kind that reads a published checkpoint.

    Raises:
        UserError: none does.
    """
    config = read_config(folder)
    for name in shipped_kinds():
        if shipping(name).recognizes(config):
            return shipping(name)
    keys = ("architectures", "speculators_model_type", "model_type")
    found = {key: config[key] for key in keys if config.get(key)}
    raise UserError(
        f"checkpoint={str(folder)!r} has {found or 'no architectures'}; import reads {_READS}"
    )
