"""`drafttrain import`: a published EAGLE-3 head, in speculators' form or as LlamaForCausalLMEagle3, as one of ours."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from drafttrain.errors import UserError
from drafttrain.hub.drafters import load_shell
from drafttrain.hub.eagle3_formats import FLAT, obstacles, read_eagle3, write_eagle3
from drafttrain.hub.verify_eagle3 import compare_steps

HELP = """Bring a published EAGLE-3 head into drafttrain, to measure, tune or train it further.

  drafttrain import --checkpoint yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --target meta-llama/Llama-3.1-8B-Instruct \\
      --output runs/eagle3-llama
  drafttrain eval --target meta-llama/Llama-3.1-8B-Instruct --drafter runs/eagle3-llama --output results.json

The head's arithmetic is checked on random inputs against that of the engines before anything is written. Of the target only
config and tokenizer are read. Nothing runs on load: weights are safetensors, unless --allow-pickle admits a .bin file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoint", required=True, help="folder or Hub id of the head")
    add("--target", required=True, help="the model it was trained for: short name, folder or Hub id")
    add("--output", required=True, help="folder to write")
    add("--allow-pickle", action="store_true", help="also read .bin and .pt files (torch.load with weights_only)")
    add("--trust-remote-code", action="store_true", help="run model code that comes with the target")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    Raises:
        UserError: nothing there, a head that ours cannot compute, or one made for another target.
    """
    folder, output = _checkpoint_folder(args.checkpoint, args.allow_pickle), Path(args.output).expanduser()
    target = load_shell(args.target, args.trust_remote_code)
    head = read_eagle3(folder, target.identity(), args.allow_pickle)
    # What engines can run is compared with their arithmetic; what they cannot has nothing to be compared with.
    if not obstacles(head, "vllm"):
        with tempfile.TemporaryDirectory() as scratch:
            write_eagle3(head, Path(scratch), FLAT, dtype=head.fc.weight.dtype)
            compare_steps(read_eagle3(Path(scratch), target.identity()), Path(scratch))
    try:
        head.save_pretrained(output)
    except OSError as error:
        raise UserError(f"output={str(output)!r} cannot be written ({error.strerror}); choose another place") from error
    kept = f"{head.config.draft_vocab_size} of {head.config.vocab_size} tokens"
    print(f"{output}: EAGLE-3 for {args.target}, {kept}, target states {list(head.feature_layers)}")
    return 0


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
