"""`drafttrain verify`: proves that an export computes what the drafter does, from its files alone and in a real engine."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch

from drafttrain.drafters.registry import load_drafter
from drafttrain.drafters.shipping import FORMATS, GGUF_NAME, Shipping, Trained, find_drafter, shipping
from drafttrain.environment import describe_environment
from drafttrain.errors import UserError
from drafttrain.evaluation.suites import load_suite, render, take_evenly
from drafttrain.export import engine_runs
from drafttrain.export.engine_runs import EngineJob
from drafttrain.export.export_drafter import export
from drafttrain.export.serving_recipes import engine_depth, tuned_tree
from drafttrain.files import Json, scratch_folder
from drafttrain.flags import TARGET_HELP, add_drafter_flag
from drafttrain.folders import inputs_of, output_file
from drafttrain.formats.public_names import write_clean_json
from drafttrain.formats.weights import dtype_name
from drafttrain.formats.write_gguf import write_gguf
from drafttrain.target import Target, resolve_dtype
from drafttrain.values import Count, Depth, File, FileDtype, Name, Place, adder

HELP = """Prove that an exported drafter computes what it computes here.

  drafttrain verify --drafter runs/drafter --exported runs/export
  drafttrain verify --drafter runs/drafter --engine vllm --engine-python ~/vllm/bin/python --output verify.json
  drafttrain verify --drafter runs/draft --engine transformers
  drafttrain verify --drafter runs/draft --engine llama.cpp --engine-python ~/llama/bin/python

Always: every tensor of the export must have the name, shape and dtype that the engine's loader expects and be finite; then the
export is read back as a drafter, which must draft what the original drafts on random inputs. With --engine: the engine answers
prompts greedily with a chain of --speculative-tokens, and so does our decoder; texts and accepted lengths are compared.
scripts/verify_vllm_cpu.sh makes an environment with vLLM for CPUs and runs this."""

TOLERANCE = 0.05  # of the accepted length, relative


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add_drafter_flag(parser, trained=True)
    add("--exported", Place, help="folder written by drafttrain export (default: export it now, for the engine)")
    add("--format", choices=FORMATS, help="of what is exported now (default: the engine's, else the kind's first)")
    add("--dtype", FileDtype, default="bfloat16", help="of what is exported now, and of the target")
    engines = ("auto", "none", *engine_runs.ENGINES)
    add("--engine", choices=engines, default="auto", help="also run it there (default: vllm or llama.cpp if installed)")
    add("--engine-python", File, default=sys.executable, help="interpreter that has vllm, or xllamacpp for llama.cpp")
    add("--target", Name, default="", help=f"{TARGET_HELP} (default: the recorded one)")
    add("--suite", Place, default="drafttrain", help="where prompts come from: a suite's name or JSONL file")
    add("--prompts", Count, default=8, help="at most, taken evenly from all categories")
    add("--max-new-tokens", Count, default=64, help="per answer")
    add("--speculative-tokens", Depth, help="length of the chain (default: the tuned depth, else 3)")
    add("--output", Place, help="JSON file to write")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 0 if everything agrees, else 1."""
    output = output_file(args.output, "verify", inputs_of(args)) if args.output is not None else None
    trained = find_drafter(args.drafter)
    kind = shipping(trained.kind)
    if not kind.formats:
        raise UserError(f"drafter={args.drafter!r}: no engine format is known for kind {trained.kind!r} to verify")
    depth = args.speculative_tokens or engine_depth(trained, tuned_tree(trained.folder))
    if depth != (kind.block_depth(trained) or depth):
        fixed = kind.block_depth(trained)
        raise UserError(f"speculative-tokens={depth}: this drafter drafts blocks of {fixed} tokens; drop the flag")
    if args.engine == "auto":
        args.engine = installed_engine(kind)
    if args.engine not in ("none", *kind.verifiable):
        known = ", ".join(kind.verifiable)
        raise UserError(f"engine={args.engine!r} runs no {trained.kind!r} drafter; choose {known} or none")
    form = args.format or kind.verifiable.get(args.engine) or next(iter(kind.formats))
    with scratch_folder() as scratch:
        exported = Path(args.exported).expanduser() if args.exported else scratch / "export"
        if not args.exported:
            export(trained, form, exported, resolve_dtype(args.dtype), args.target or trained.target_name, depth)
        if not exported.is_dir():
            raise UserError(f"exported={str(exported)!r} is no folder; write one: drafttrain export --help")
        found: Json = {"files": kind.check(trained, exported)}
        figures = ", ".join(f"{key.replace('_', ' ')} {value:.3g}" for key, value in found["files"].items())
        print(f"files: as an engine loads them, they compute what the drafter does ({figures})")
        agree = True
        if args.engine != "none":
            found |= _compare_engine(args, trained, exported, depth, scratch)
            agree = abs(found["accepted_length_ratio"] - 1) <= TOLERANCE
    if output is not None:
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        found = {**describe_environment(torch.device("cpu")), "command": command, **found}
        write_clean_json(output, found)
        print(f"wrote {args.output}")
    if not agree:
        print(f"the accepted lengths differ by more than {TOLERANCE:.0%}", file=sys.stderr)
    return 0 if agree else 1


def installed_engine(kind: Shipping) -> str:
    """The first engine in this environment that runs drafters of a kind, or none."""
    for name, package in (("vllm", "vllm"), ("llama.cpp", "xllamacpp")):
        if name in kind.verifiable and importlib.util.find_spec(package):
            return name
    return "none"


def _compare_engine(args: argparse.Namespace, trained: Trained, exported: Path, depth: int, scratch: Path) -> Json:
    """Answers the prompts on both sides; returns `ours`, the engine's entry and the comparison."""
    name = args.target or trained.target_name
    if not name:
        raise UserError("the drafter does not record its target; pass --target")
    target = Target.load(name, args.dtype)
    questions = take_evenly(load_suite(args.suite).questions, args.prompts)
    prompts = [render(target.tokenizer, question.turns[:1], []) for question in questions]
    job = EngineJob(target, args.dtype, prompts, args.max_new_tokens, depth, args.engine_python)
    if args.engine == "vllm":
        theirs = engine_runs.vllm(job, exported, shipping(trained.kind).options(trained)["vLLM"])
    elif args.engine == "transformers":
        theirs = engine_runs.transformers(job, exported)
    else:
        target_file = write_gguf(Path(target.path), scratch / "target.gguf", dtype_name(resolve_dtype(args.dtype)))
        kind = str(shipping(trained.kind).options(trained)["llama.cpp"]["spec-type"])
        theirs = engine_runs.llama_cpp(job, target_file, exported / GGUF_NAME, kind)
    drafter = load_drafter(str(trained.folder), target)
    assert drafter is not None, "a folder is no 'none'"
    mine = engine_runs.ours(job, drafter)
    pairs = list(zip(mine["tokens"], theirs["tokens"], strict=True))
    same = sum(a == b for a, b in pairs)
    ratio = theirs["accepted_length"] / mine["accepted_length"]
    print(
        f"{args.engine}: accepted length {theirs['accepted_length']:.3f}, ours {mine['accepted_length']:.3f} "
        f"({ratio - 1:+.1%}); identical texts on {same} of {len(pairs)} prompts"
    )
    return {
        "target": name,
        "drafter": args.drafter,
        "dtype": args.dtype,
        "speculative_tokens": depth,
        "prompts": len(prompts),
        "ours": mine,
        args.engine.replace(".", "_"): theirs,
        "identical_texts": same,
        "common_prefix": [_common(a, b) for a, b in pairs],
        "accepted_length_ratio": round(ratio, 4),
    }


def _common(left: list[int], right: list[int]) -> int:
    """Tokens until the first difference."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
