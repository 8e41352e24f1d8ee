"""`drafttrain export`: a drafter in the form that an engine loads, and the command that serves it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafttrain.errors import UserError
from drafttrain.hub.drafters import DRAFT_MODEL, EAGLE3, Trained, find_drafter, load_shell, parse_dtype
from drafttrain.hub.eagle3_formats import FLAT, SPECULATORS, default_layers, obstacles, write_eagle3
from drafttrain.hub.serving import as_text, fastest, public_name, recipes, tuned_tree
from drafttrain.target import resolve_target

HELP = """Write a drafter in the form that an engine loads, and print how to serve it.

  drafttrain export --drafter runs/drafter --format vllm --output runs/export        EAGLE-3 in speculators' form
  drafttrain export --drafter runs/drafter --format sglang --output runs/export      EAGLE-3 as LlamaForCausalLMEagle3
  drafttrain export --drafter runs/draft --format transformers --output runs/export  a draft model as plain HF checkpoint
  drafttrain export --drafter runs/draft --format gguf --output runs/export          a draft model for llama.cpp

TensorRT-LLM takes the sglang format, and vLLM both. What a format cannot express is refused with the reason. Check the result
by: drafttrain verify --drafter runs/drafter --exported runs/export"""

# Formats, and which engines load a folder in them.
FORMATS = {
    "vllm": ("vLLM",),
    "sglang": ("SGLang", "TensorRT-LLM, Triton", "vLLM"),
    "transformers": ("transformers", "vLLM", "SGLang", "TensorRT-LLM, Triton"),
    "gguf": ("llama.cpp",),
}
GGUF_NAME = "draft.gguf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--drafter", required=True, help="a trained drafter's folder or Hub id")
    add("--format", required=True, choices=FORMATS, help="whose format; see above")
    add("--output", required=True, help="folder to write")
    add("--dtype", default="bfloat16", help="of the weights: bfloat16 (default), float16, float32")
    add("--target", default="", help="the target's name in the recipes, and where a draft model without a tokenizer gets it "
        "(default: the recorded one)")  # fmt: skip
    add(
        "--speculative-tokens",
        type=int,
        help="drafted per round (default: the depth in the drafter's decoding.json, else 3)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    Raises:
        UserError: no drafter there, or one that the format cannot express.
    """
    if args.speculative_tokens is not None and args.speculative_tokens < 1:
        raise UserError(f"speculative-tokens={args.speculative_tokens} must be at least 1")
    trained, output = find_drafter(args.drafter), Path(args.output).expanduser()
    tree = tuned_tree(trained.folder)
    depth = args.speculative_tokens or tree.depth
    target = args.target or trained.target_name
    files = export(trained, args.format, output, parse_dtype(args.dtype), target, depth)
    print(f"wrote {', '.join(str(path) for path in files)}\n")
    made = drafter_recipes(trained, str(output), public_name(target) if target else "TARGET", args.speculative_tokens)
    serving = FORMATS["transformers"] if trained.kind == DRAFT_MODEL and args.format != "gguf" else FORMATS[args.format]
    print(as_text([recipe for recipe in made if recipe.engine in serving]))
    return 0


def export(
    trained: Trained, form: str, output: Path, dtype: torch.dtype = torch.bfloat16, target: str = "", depth: int = 3
) -> list[Path]:
    """Writes a drafter in one of FORMATS.

    Args:
        output: folder to write. target: its name, for speculators' form and for a tokenizer.
        depth: speculative tokens that speculators' form proposes.

    Returns:
        The files written.

    Raises:
        UserError: the format cannot express the drafter, or the output cannot be written.
    """
    if output.resolve() == trained.folder.resolve():
        raise UserError(f"output={str(output)!r} is the drafter's own folder; choose another")
    if trained.kind == EAGLE3:
        return _export_eagle3(trained, form, output, dtype, target, depth)
    return _export_model(trained, form, output, dtype, target)


def _export_eagle3(
    trained: Trained, form: str, output: Path, dtype: torch.dtype, target: str, depth: int
) -> list[Path]:
    if form not in ("vllm", "sglang"):
        raise UserError(
            f"format={form!r}: an EAGLE-3 head reads the target's states and is no language model of its own; use vllm or "
            "sglang, or train a draft model (kind=draft_model)"
        )
    head = trained.eagle3()
    reasons = obstacles(head, form)
    if reasons:
        raise UserError(f"format={form!r} cannot express this head: {'; '.join(reasons)}")
    architectures = _architectures(target)
    write_eagle3(
        head,
        output,
        SPECULATORS if form == "vllm" else FLAT,
        dtype=dtype,
        speculative_tokens=depth,
        target_name=public_name(target) if target else "",
        target_architectures=architectures,
    )
    return [output / "config.json", output / "model.safetensors"]


def _architectures(target: str) -> list[str]:
    """The target's class names, as far as its config is at hand."""
    from transformers import AutoConfig

    try:
        return list(AutoConfig.from_pretrained(resolve_target(target)).architectures or []) if target else []
    except (UserError, OSError, ValueError):
        return []


def _export_model(trained: Trained, form: str, output: Path, dtype: torch.dtype, target: str) -> list[Path]:
    """A draft model, loaded once to prove that it is whole, and written without our own keys."""
    if form in ("vllm", "sglang"):
        recorded = trained.target.get("vocab_size")
        if recorded and recorded != trained.config["vocab_size"]:
            raise UserError(
                f"format={form!r}: vocab_size={trained.config['vocab_size']} differs from the target's {recorded}, and the "
                "engine verifies drafts by token id"
            )
    tokenizer = _tokenizer_folder(trained, target)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            trained.folder, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"drafter={str(trained.folder)!r} is no causal language model ({first})") from error
    model, info = loaded
    wrong = sorted({*info["missing_keys"], *info["unexpected_keys"]})
    if wrong:
        raise UserError(
            f"drafter={str(trained.folder)!r}: weights and config disagree on {', '.join(map(str, wrong[:3]))}"
        )
    for key in ("drafter_kind", "target", "loss"):
        if hasattr(model.config, key):
            delattr(model.config, key)
    if form == "gguf":
        from drafttrain.hub.write_gguf import write_gguf

        if tokenizer is None:
            raise UserError("format='gguf' holds the tokenizer too, and the drafter's folder has none; pass --target")
        return [write_gguf(trained.folder, output / GGUF_NAME, dtype, tokenizer)]
    model.save_pretrained(output)
    if tokenizer is not None:
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(output)
    return sorted(path for path in output.iterdir() if path.is_file())


def _tokenizer_folder(trained: Trained, target: str) -> Path | None:
    """Where a draft model's tokenizer is: with it, or with its target; None if neither is at hand."""
    if (trained.folder / "tokenizer_config.json").is_file():
        return trained.folder
    try:
        return Path(resolve_target(target)) if target and load_shell(target) else None
    except UserError:
        return None


def drafter_recipes(
    trained: Trained, drafter: str, target: str, depth: int | None = None, results: list[dict[str, Any]] | None = None
) -> list[Any]:
    """The recipes of a drafter under the name `drafter` for every engine.

    Args:
        depth: speculative tokens; the tuned tree's unless given.
    """
    tree = tuned_tree(trained.folder, results or [])
    if depth:
        tree = type(tree).parse(f"chain:{depth}")
    blocked: dict[str, list[str]] = {}
    layers: tuple[int, ...] = ()
    gguf = ""
    if trained.kind == EAGLE3:
        head = trained.eagle3()
        blocked = {engine: obstacles(head, engine) for engine in ("vllm", "sglang")}
        if head.feature_layers != default_layers(trained.target.get("num_layers", 0)):
            layers = head.feature_layers
    else:
        gguf = f"{drafter}/{GGUF_NAME}"
    _, plus, side = str((fastest(results or []) or {}).get("kind", "")).partition("+")
    return recipes(trained.kind, drafter, target, tree, blocked, layers, gguf, plus + side)
