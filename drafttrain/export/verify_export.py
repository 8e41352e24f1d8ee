"""`drafttrain verify`: proves that an export computes what the drafter does, from its files alone and in a real engine."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from drafttrain.drafters.registry import load_drafter
from drafttrain.drafters.shipping import FORMATS, GGUF_NAME, Shipping, shipping
from drafttrain.drafters.trained import Trained, find_drafter, parse_dtype
from drafttrain.environment import describe_environment
from drafttrain.errors import UserError
from drafttrain.evaluation.suites import load_suite, render, take_evenly
from drafttrain.export import engine_runs
from drafttrain.export.export_drafter import export
from drafttrain.export.serving_recipes import engine_depth, tuned_tree
from drafttrain.files import write_json
from drafttrain.hub.upload import shorten
from drafttrain.target import Target

HELP = """Prove that an exported drafter computes what it computes here.

  drafttrain verify --drafter runs/drafter --exported runs/export
  drafttrain verify --drafter runs/drafter --engine vllm --engine-python ~/vllm/bin/python --output verify.json
  drafttrain verify --drafter runs/draft --engine transformers
  drafttrain verify --drafter runs/draft --engine llama.cpp --engine-python ~/llama/bin/python

Always: the exported files are loaded by name and shape as an engine does, and step outputs are compared with ours. With
--engine: the engine answers prompts greedily with a chain of --speculative-tokens, and so does our decoder; texts and accepted
lengths are compared. scripts/verify_vllm_cpu.sh makes an environment with vLLM for CPUs and runs this."""

TOLERANCE = 0.05  # of the accepted length, relative


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--drafter", required=True, help="a trained drafter's folder or Hub id")
    add("--exported", help="folder written by drafttrain export (default: export it now, for the engine)")
    add(
        "--format",
        choices=FORMATS,
        help="format of what is exported now (default: the engine's, else the kind's first)",
    )
    add("--dtype", default="bfloat16", help="of what is exported now, and of the target: bfloat16, float16, float32")
    add(
        "--engine",
        choices=("auto", "none", *engine_runs.ENGINES),
        default="auto",
        help="also run it in this engine (default: vllm or llama.cpp if installed beside drafttrain)",
    )
    add(
        "--engine-python",
        default=sys.executable,
        help="interpreter of the environment that has vllm, or xllamacpp for llama.cpp",
    )
    add("--target", default="", help="short name, folder or Hub id (default: the recorded one)")
    add("--suite", default="drafttrain", help="where prompts come from: a suite's name or JSONL file")
    add("--prompts", type=int, default=8, help="at most, taken evenly from all categories")
    add("--max-new-tokens", type=int, default=64, help="per answer")
    add("--speculative-tokens", type=int, help="length of the chain (default: the tuned depth, else 3)")
    add("--output", help="JSON file to write")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 0 if everything agrees, else 1.

    Raises:
        UserError: nothing to verify, step outputs that differ, or an engine that cannot run.
    """
    for key in ("prompts", "max_new_tokens", "speculative_tokens"):
        if (value := getattr(args, key)) is not None and value < 1:
            raise UserError(f"{key.replace('_', '-')}={value} must be at least 1")
    trained = find_drafter(args.drafter)
    kind = shipping(trained.kind)
    if not kind.formats:
        raise UserError(f"drafter={args.drafter!r}: no engine format is known for kind {trained.kind!r} to verify")
    depth = args.speculative_tokens or engine_depth(trained, tuned_tree(trained.folder))
    if args.engine == "auto":
        args.engine = installed_engine(kind)
    if args.engine not in ("none", *kind.verifiable):
        raise UserError(
            f"engine={args.engine!r} runs no drafter of kind {trained.kind!r}; choose {', '.join(kind.verifiable)} or none"
        )
    form = args.format or kind.verifiable.get(args.engine) or next(iter(kind.formats))
    with tempfile.TemporaryDirectory() as scratch:
        exported = Path(args.exported).expanduser() if args.exported else Path(scratch) / "export"
        if not args.exported:
            export(trained, form, exported, parse_dtype(args.dtype), args.target or trained.target_name, depth)
        found: dict[str, Any] = {"files": check_files(trained, exported)}
        print(f"files: as an engine loads them, they compute what the drafter does ({_line(found['files'])})")
        agree = True
        if args.engine != "none":
            agree = _compare_engine(args, trained, exported, depth, found, Path(scratch))
    if args.output:
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        described = {**describe_environment(torch.device("cpu")), "command": command, **found}
        write_json(Path(args.output).expanduser(), shorten(described))
        print(f"wrote {args.output}")
    return 0 if agree else 1


def installed_engine(kind: Shipping) -> str:
    """An engine in this environment that runs drafters of a kind, or none."""
    packages = {"vllm": "vllm", "llama.cpp": "xllamacpp"}
    found = (
        name for name, package in packages.items() if name in kind.verifiable and importlib.util.find_spec(package)
    )
    return next(found, "none")


def check_files(trained: Trained, exported: Path) -> dict[str, Any]:
    """Loads exported files as an engine would and compares what they compute with ours.

    Raises:
        UserError: they differ, or lack what an engine looks for.
    """
    if not exported.is_dir():
        raise UserError(f"exported={str(exported)!r} is no folder; write one: drafttrain export --help")
    return shipping(trained.kind).check(trained, exported)


def _line(found: dict[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value:.3g}" for key, value in found.items())


def _compare_engine(
    args: argparse.Namespace, trained: Trained, exported: Path, depth: int, found: dict[str, Any], scratch: Path
) -> bool:
    """Runs both sides; adds `ours`, the engine's entry and the comparison to `found`; True if they agree."""
    name = args.target or trained.target_name
    if not name:
        raise UserError("the drafter does not record its target; pass --target")
    target = Target.load(name, args.dtype)
    questions = take_evenly(load_suite(args.suite).questions, args.prompts)
    prompts = [render(target.tokenizer, question.turns[:1], []) for question in questions]
    limits = args.max_new_tokens, depth
    if args.engine == "vllm":
        key, theirs = "vllm", engine_runs.vllm(
            args.engine_python, target, shipping(trained.kind).options(trained)["vLLM"], exported, prompts, *limits, args.dtype
        )  # fmt: skip
    elif args.engine == "transformers":
        key, theirs = "transformers", engine_runs.transformers(target, exported, prompts, *limits)
    else:
        from drafttrain.formats.write_gguf import write_gguf

        whole = write_gguf(Path(target.path), scratch / "target.gguf", parse_dtype(args.dtype))
        key, theirs = "llama_cpp", engine_runs.llama_cpp(
            args.engine_python, whole, exported / GGUF_NAME, prompts, *limits
        )  # fmt: skip
    drafter = load_drafter(str(trained.folder), target)
    assert drafter is not None, "a folder is no 'none'"
    mine = engine_runs.ours(target.pack(), drafter, prompts, *limits)
    same = [a == b for a, b in zip(mine["tokens"], theirs["tokens"], strict=True)]
    ratio = theirs["accepted_length"] / mine["accepted_length"]
    found |= {
        "target": name,
        "drafter": args.drafter,
        "dtype": args.dtype,
        "speculative_tokens": depth,
        "prompts": len(prompts),
        "ours": mine,
        key: theirs,
        "identical_texts": sum(same),
        "common_prefix": [_common(a, b) for a, b in zip(mine["tokens"], theirs["tokens"], strict=True)],
        "accepted_length_ratio": round(ratio, 4),
    }
    print(
        f"{args.engine}: accepted length {theirs['accepted_length']:.3f}, ours {mine['accepted_length']:.3f} "
        f"({ratio - 1:+.1%}); identical texts on {sum(same)} of {len(same)} prompts"
    )
    if abs(ratio - 1) > TOLERANCE:
        print(f"the accepted lengths differ by more than {TOLERANCE:.0%}", file=sys.stderr)
        return False
    return True


def _common(left: list[int], right: list[int]) -> int:
    """Tokens until the first difference."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
