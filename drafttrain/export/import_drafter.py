"""`drafttrain import`: a drafter that others published, in an engine's form, as one of ours."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from drafttrain.drafters.shipping import Request, Shipping, shipped_kinds, shipping
from drafttrain.drafters.trained import find_drafter, load_shell
from drafttrain.errors import UserError
from drafttrain.formats.weights import read_config

_READS = "; ".join(filter(None, (shipping(kind).reads for kind in shipped_kinds())))

HELP = f"""Bring a published drafter into drafttrain, to measure, tune or train it further.

Read are {_READS}.

  drafttrain import --checkpoint yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --target meta-llama/Llama-3.1-8B-Instruct \\
      --output runs/eagle3-llama
  drafttrain eval --target meta-llama/Llama-3.1-8B-Instruct --drafter runs/eagle3-llama --output results.json

The drafter's arithmetic is checked on random inputs against that of the engines before it is kept. Of the target only config
and tokenizer are read. Nothing runs on load: weights are safetensors, unless --allow-pickle admits a .bin file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoint", required=True, help="folder or Hub id of the drafter")
    add("--target", required=True, help="the model it was trained for: short name, folder or Hub id")
    add("--output", required=True, help="folder to write")
    add("--allow-pickle", action="store_true", help="also read .bin and .pt files (torch.load with weights_only)")
    add("--trust-remote-code", action="store_true", help="run model code that comes with the target")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    Raises:
        UserError: nothing there, a drafter that ours cannot compute, or one made for another target.
    """
    folder, output = _checkpoint_folder(args.checkpoint, args.allow_pickle), Path(args.output).expanduser()
    kind = find_kind(folder)
    drafter = kind.read(folder, load_shell(args.target, args.trust_remote_code).identity(), args.allow_pickle)
    with tempfile.TemporaryDirectory() as scratch:
        drafter.save_pretrained(Path(scratch) / "ours")
        trained = find_drafter(str(Path(scratch) / "ours"))
        # What engines can run is compared with their arithmetic; what they cannot has nothing to be compared with.
        form = next((form for form in kind.formats if not kind.refusals(trained, form)), "")
        if form:
            exported = Path(scratch) / "engine"
            kind.write(trained, form, Request(exported, next(drafter.parameters()).dtype, args.target))
            kind.check(trained, exported)
    try:
        drafter.save_pretrained(output)
    except OSError as error:
        raise UserError(f"output={str(output)!r} cannot be written ({error.strerror}); choose another place") from error
    print(f"{output}: {kind.line(find_drafter(str(output)), f'{sum(p.numel() for p in drafter.parameters()):,}')}")
    return 0


def find_kind(folder: Path) -> Shipping:
    """The kind that reads a published checkpoint.

    Raises:
        UserError: none does.
    """
    config = read_config(folder)
    for name in shipped_kinds():
        if shipping(name).recognises(config):
            return shipping(name)
    told = {key: config[key] for key in ("architectures", "speculators_model_type", "model_type") if config.get(key)}
    raise UserError(f"checkpoint={str(folder)!r} has {told or 'no architectures'}; import reads {_READS}")


def _checkpoint_folder(name: str, allow_pickle: bool) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"checkpoint={name!r}: no such folder, and not a Hub id (user/name)")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", *(["*.bin", "*.pt"] if allow_pickle else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"checkpoint={name!r}: the Hub does not give it ({first}); check the name, or log in"
        ) from error
