"""Compares our decoder with other Python decoders that install by name: greedy, float32, one prompt at a time, by threads.

Sides: transformers' generate, ours plain and with n-grams, the n-gram drafting of each Python peer that is named, and llama.cpp
decoding plainly in float32. Each side is a process of its own, a peer's in an environment of its own; all sides answer all
prompts in turn, several times:

    python3 -m venv ~/economize && ~/economize/bin/pip install economize torch
    python3 -m venv ~/flashspec && ~/flashspec/bin/pip install flashspec torch accelerate
    python3 -m venv ~/llama && ~/llama/bin/pip install xllamacpp
    python eval/bench_peers.py --peer economize=~/economize/bin/python flashspec=~/flashspec/bin/python \\
        llama.cpp=~/llama/bin/python --output eval/results/peers_smollm2-135m_cpu.json

Seconds are of whole requests, the prompt included. A side is lossless where its tokens are those of transformers' generate.
The headline is ours with n-grams over the fastest other side, the least over the numbers of threads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_llama import BUILD, llama_answers
from benchmark import alternate, median, result_path, write_result

from drafttrain.evaluation.suites import load_suite
from drafttrain.files import Json
from drafttrain.formats.write_gguf import write_gguf
from drafttrain.target import load_shell

SCRIPT = Path(__file__).with_name("peer_side.py")
THEIRS = "transformers"
OURS = ("plain", "ngram")
LLAMA = "llama.cpp"
PEERS = ("economize", "flashspec", LLAMA)
Kept = dict[int, list[int]]  # the answer's tokens of each prompt
Run = Callable[[int, Kept], dict[str, float]]  # with so many threads


class Side:
    """A decoder's process."""

    def __init__(self, python: str, job: Json, folder: Path, threads: int):
        path = folder / f"{job['decoder']}.json"
        path.write_text(json.dumps(job))
        # Thread pools are made for the most threads; orders lower them.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        if job["decoder"] not in (THEIRS, *OURS):
            environment.pop("PYTHONPATH", None)
        self.process = subprocess.Popen(
            [python, str(SCRIPT), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.version = self.read("version")["version"]

    def read(self, key: str) -> Json:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{") and key in line:
                return json.loads(line)
        raise SystemExit(f"a side ended early, its lines above say why: {self.process.args}")

    def answer(self, prompt: int, threads: int) -> Json:
        assert self.process.stdin is not None
        order = {"prompt": prompt, "threads": threads}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.read("seconds")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def keep(kept: Kept, prompt: int, tokens: list[int]) -> None:
    """Keeps an answer, which must be the same every time."""
    if kept.setdefault(prompt, tokens) != tokens:
        raise SystemExit(f"prompt {prompt} has another answer now: {tokens}")


def rate(tokens: int, seconds: float) -> dict[str, float]:
    return {"tokens_per_second": round(tokens / seconds, 2)}


def run(side: Side, count: int, threads: int, kept: Kept) -> dict[str, float]:
    """Answers all prompts with a Python decoder."""
    seconds = 0.0
    tokens = 0
    for prompt in range(count):
        made = side.answer(prompt, threads)
        keep(kept, prompt, made["tokens"])
        seconds += made["seconds"]
        tokens += len(made["tokens"])
    return rate(tokens, seconds)


def run_llama(python: str, job: Json, threads: int, kept: Kept) -> dict[str, float]:
    """Answers all prompts with llama.cpp, in a process that ends with them."""
    described = {"target": job["gguf"], "exact": True, "tokens": job["tokens"], "threads": threads}
    # Its context is made for the first prompt, which it answers once more to warm up.
    order = sorted(range(len(job["prompts"])), key=lambda i: -len(job["prompts"][i]))
    answers = llama_answers(python, described, [job["prompts"][i] for i in order])
    for prompt, answer in zip(order, answers, strict=True):
        keep(kept, prompt, answer.tokens)
    seconds = sum(answer.reading + answer.decoding for answer in answers)
    return rate(sum(len(answer.tokens) for answer in answers), seconds)


def measure(sides: dict[str, Run], count: int, threads: int, repeats: int) -> dict[str, Json]:
    """Medians, runs and lossless prompts of each side, with a number of threads."""
    answers: dict[str, Kept] = {name: {} for name in sides}
    runs = alternate(
        {name: partial(side, threads, answers[name]) for name, side in sides.items()}, repeats
    )
    found: dict[str, Json] = {}
    for name, made in runs.items():
        alike = sum(answers[name][i] == answers[THEIRS][i] for i in range(count))
        found[name] = {
            "tokens_per_second": median(made, "tokens_per_second"),
            "lossless_prompts": alike,
            "runs": made,
        }
    return found


def headline(found: dict[str, Json]) -> float:
    """Our n-grams over the fastest side that is not ours."""
    others = [side["tokens_per_second"] for name, side in found.items() if name not in OURS]
    return found["ngram"]["tokens_per_second"] / max(others)


def table(by_threads: dict[int, dict[str, Json]], count: int) -> str:
    """The sides as Markdown; ratios are to transformers' generate in the same run."""
    lines = ["| threads | decoder | tokens/s | over transformers | lossless |", "| --- " * 5 + "|"]
    for threads, found in by_threads.items():
        base = found[THEIRS]["tokens_per_second"]
        for name, side in found.items():
            speed = side["tokens_per_second"]
            alike = f"{side['lossless_prompts']} of {count}"
            lines.append(f"| {threads} | {name} | {speed:.1f} | {speed / base:.2f}x | {alike} |")
    return "\n".join(lines)


def peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in PEERS or not python:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=PYTHON with one of {', '.join(PEERS)}"
        )
    return name, os.path.expanduser(python)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=peer, nargs="*", default=[], help="NAME=interpreter")
    parser.add_argument("--target", default="smollm2-135m", help="short name or folder")
    parser.add_argument("--suite", default="drafttrain", help="source of the prompts")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="new ones per prompt at most")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    if min(args.prompts, args.tokens, args.repeats, *args.threads) < 1:
        parser.error("--prompts, --tokens, --threads and --repeats must be at least 1")

    target = load_shell(args.target)
    questions = list(load_suite(args.suite).questions)
    random.Random(0).shuffle(questions)
    prompts = [each.prompt(target.tokenizer) for each in questions[: args.prompts]]
    job: dict[str, Any] = {"target": target.path, "prompts": prompts, "tokens": args.tokens}
    pythons = {THEIRS: sys.executable, **dict.fromkeys(OURS, sys.executable), **dict(args.peer)}
    by_threads = {}
    versions: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides: dict[str, Run] = {}
        for name, python in pythons.items():
            if name == LLAMA:
                file = write_gguf(Path(target.path), folder / "target.gguf", "float32")
                sides[name] = partial(run_llama, python, {**job, "gguf": str(file)})
                continue
            side = Side(python, {**job, "decoder": name}, folder, max(args.threads))
            stack.callback(side.close)
            versions[name] = side.version
            sides[name] = partial(run, side, len(prompts))
        for threads in args.threads:
            by_threads[threads] = measure(sides, len(prompts), threads, args.repeats)
    if LLAMA in sides:
        versions[LLAMA] = BUILD["version"]
    print(f"\n{table(by_threads, len(prompts))}\n")
    write_result(
        args.output,
        min(headline(found) for found in by_threads.values()),
        1.0,
        by_threads,
        torch.device("cpu"),
        versions_of_sides=versions,
        prompts=len(prompts),
        tokens=args.tokens,
    )


if __name__ == "__main__":
    main()
