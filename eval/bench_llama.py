"""Compares our decoder with llama.cpp on the same CPU, threads and prompts: greedy, one prompt at a time, by prompt length.

Reading a prompt (seconds to the first token) and decoding (milliseconds per token after it) are measured apart. Ours decodes
plainly in bfloat16, with n-grams, and with the head and n-grams. llama.cpp decodes plainly in bfloat16 and in Q8_0, and drafts
with the same head exported, with and without `--spec-draft-p-min`. It runs in an environment of its own, each run in a process
of its own:

    python3 -m venv ~/llama && ~/llama/bin/pip install xllamacpp==2026.10.11549
    python eval/bench_llama.py --llama-python ~/llama/bin/python --drafter runs/quickstart/drafter \\
        --output eval/results/llama_smollm2-135m_cpu.json

The headline is the least ratio over the prompt lengths of llama.cpp's milliseconds per token to ours, both plain in bfloat16. A
drafter's own reading of the prompt counts where the engine does it: in our decoding, after the first token.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch
from benchmark import alternate, median, result_path, write_result

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter
from drafttrain.drafters.shipping import GGUF_NAME, find_drafter, shipping
from drafttrain.errors import UserError
from drafttrain.evaluation.suites import load_suite
from drafttrain.export.engine_runs import SIDES, missing, run_side
from drafttrain.export.export_drafter import export
from drafttrain.export.serving_recipes import engine_depth, tuned_tree
from drafttrain.files import Json
from drafttrain.formats.write_gguf import write_gguf
from drafttrain.inference import generate
from drafttrain.target import Target
from drafttrain.target.generation import LogitsRules

GOALS = {"decoding_over_bfloat16": 1.5, "decoding_over_q8_0": 1.15, "drafted_over_best": 2.5}
PLAIN = "ours, plain"
NGRAM = "ours, n-grams"
HEAD = "ours, head and n-grams"
BFLOAT16 = "llama.cpp, bfloat16"
Q8_0 = "llama.cpp, Q8_0"
LLAMA_HEAD = "llama.cpp, bfloat16, head"
BUILD: Json = {}  # llama.cpp's release and instructions, known after its first run


class Answer(NamedTuple):
    """One prompt's answer on one side."""

    tokens: list[int]
    reading: float  # seconds to the first token
    decoding: float  # seconds after it
    passes: int  # of the target after the first token


Side = Callable[[list[list[int]]], list[Answer]]  # from prompts


def our_answers(
    target: Target, tokens: int, drafter: Drafter | None, tree: TreeSpec, prompts: list[list[int]]
) -> list[Answer]:
    raw = LogitsRules()  # llama.cpp knows no generation_config
    answers = []
    for prompt in prompts:
        made = generate(target, drafter, prompt, max_new_tokens=tokens, spec=tree, rules=raw)
        stats = made.stats
        decoding = stats.total_seconds - stats.prefill_seconds
        answer = Answer(made.tokens, stats.prefill_seconds, decoding, stats.target_passes)
        answers.append(answer)
    return answers


def llama_answers(python: str, job: Json, prompts: list[list[int]]) -> list[Answer]:
    """Runs a process of llama.cpp, which answers the first prompt twice, to warm up.

    job: keys of llama_side.py, without those that are the same for all sides.
    """
    described = {
        "draft": None,
        "depth": 0,
        "exact": False,
        "timed": True,
        "prompts": [prompts[0], *prompts],
        "threads": torch.get_num_threads(),
        **job,
    }
    described["max_model_len"] = len(prompts[0]) + job["tokens"] + 2 * described["depth"] + 32
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    found = run_side(python, SIDES / "llama_side.py", described, environment)
    BUILD.update(version=found["version"], instructions=found["instructions"])
    made = zip(found["tokens"][1:], found["timings"][1:], strict=True)
    return [server_answer(tokens, timings) for tokens, timings in made]


def server_answer(tokens: list[int], timings: Json) -> Answer:
    """An answer of llama.cpp's server, whose predicted_ms begins with the first token."""
    # A round commits its accepted tokens and one more.
    passes = len(tokens) - 1 - timings.get("draft_n_accepted", 0)
    return Answer(tokens, timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000, passes)


def figures(answers: list[Answer]) -> dict[str, float]:
    """Seconds to read a prompt, and milliseconds and accepted length of the tokens after the first."""
    decoded = max(1, sum(len(answer.tokens) - 1 for answer in answers))
    passes = max(1, sum(answer.passes for answer in answers))
    seconds = sum(answer.decoding for answer in answers)
    return {
        "reading_seconds": sum(answer.reading for answer in answers) / len(answers),
        "ms_per_token": 1000 * seconds / decoded,
        "accepted_length": decoded / passes,
    }


def tokens_alike(answers: list[Answer], others: list[Answer]) -> int:
    """Tokens before the first difference, over all prompts."""
    alike = 0
    for answer, other in zip(answers, others, strict=True):
        pairs = zip(answer.tokens, other.tokens, strict=False)
        alike += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return alike


def ratios(sides: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """llama.cpp's times over ours at one prompt length, above 1 where ours is faster."""
    drafted = [sides[name]["ms_per_token"] for name in (NGRAM, HEAD) if name in sides]
    theirs = [side["ms_per_token"] for name, side in sides.items() if name.startswith("llama.cpp")]
    plain = sides[PLAIN]
    found = {
        "decoding_over_bfloat16": sides[BFLOAT16]["ms_per_token"] / plain["ms_per_token"],
        "decoding_over_q8_0": sides[Q8_0]["ms_per_token"] / plain["ms_per_token"],
        "drafted_over_best": min(theirs) / min(drafted),
        "reading_over_bfloat16": sides[BFLOAT16]["reading_seconds"] / plain["reading_seconds"],
        "reading_over_q8_0": sides[Q8_0]["reading_seconds"] / plain["reading_seconds"],
    }
    return {name: round(ratio, 3) for name, ratio in found.items()}


def table(length: int, sides: Mapping[str, Mapping[str, float]]) -> str:
    """The sides at one prompt length, as Markdown; ratios are to llama.cpp plain in bfloat16."""
    lines = [
        f"| {length} prompt tokens | reading, s | ms per token | accepted length | decoding | same tokens as ours |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    base = sides[BFLOAT16]["ms_per_token"]
    for name, side in sides.items():
        cells = [
            name,
            f"{side['reading_seconds']:.2f}",
            f"{side['ms_per_token']:.1f}",
            f"{side['accepted_length']:.2f}",
            f"{base / side['ms_per_token']:.2f}x",
            f"{side['tokens_alike']:.0f} of {side['tokens']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def prompts_of(
    plain: Side, questions: list[list[int]], length: int, count: int, tokens: int
) -> list[list[int]]:
    """Prompts of one length whose plain answers have all the tokens to measure.

    Each ends with one of the questions; others stand before it.
    """
    text: list[int] = []
    while len(text) < length:
        for question in questions:
            text += question
    prompts: list[list[int]] = []
    for question in questions:
        text += question
        prompt = text[-length:]
        if len(plain([prompt])[0].tokens) == tokens:
            prompts.append(prompt)
        if len(prompts) == count:
            return prompts
    raise SystemExit(
        f"{len(prompts)} prompts of {length} tokens have answers of {tokens} tokens, not {count}; lower --tokens"
    )


def measure(
    sides: Mapping[str, Side],
    prompts: list[list[int]],
    repeats: int,
) -> dict[str, Json]:
    """Each side's medians over the repeats, with its runs, on prompts of one length."""
    answers: dict[str, list[Answer]] = {}  # of the last run

    def run(name: str) -> dict[str, float]:
        answers[name] = sides[name](prompts)
        return figures(answers[name])

    for name in sides:
        if name.startswith("ours"):  # llama.cpp's processes warm up themselves
            run(name)
    runs = alternate({name: partial(run, name) for name in sides}, repeats, warm_up=False)
    found: dict[str, Json] = {}
    for name, made in runs.items():
        found[name] = {key: round(median(made, key), 4) for key in made[0]}
        found[name]["tokens"] = sum(len(answer.tokens) for answer in answers[name])
        found[name]["tokens_alike"] = tokens_alike(answers[name], answers[PLAIN])
        found[name]["runs"] = made
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-python", required=True, help="interpreter that has xllamacpp")
    parser.add_argument("--target", default="smollm2-135m", help="short name or folder")
    parser.add_argument("--drafter", help="folder of a trained head (default: n-grams alone)")
    parser.add_argument("--tree", help="our tree of head and n-grams (default: the tuned one)")
    parser.add_argument("--spec-draft-p-min", type=float, default=0.75)
    parser.add_argument("--suite", default="drafttrain", help="source of the prompts' text")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 2500])
    parser.add_argument("--prompts", type=int, default=2, help="of each length")
    parser.add_argument("--tokens", type=int, default=128, help="new ones per prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    if args.tokens < 2 or min(args.prompts, args.repeats, *args.lengths) < 1:
        parser.error("--tokens must be at least 2; --lengths, --prompts and --repeats at least 1")
    if absent := missing(args.llama_python, "xllamacpp"):
        parser.error(f"--llama-python: {absent}")

    target = Target.load(args.target, "bfloat16", "cpu").pack()
    questions = [each.prompt(target.tokenizer) for each in load_suite(args.suite).questions]
    random.Random(0).shuffle(questions)
    drafted = partial(our_answers, target, args.tokens)
    sides: dict[str, Side] = {PLAIN: partial(drafted, None, TreeSpec.parse("none"))}
    sides[NGRAM] = partial(drafted, load_drafter("ngram", target), TreeSpec.parse("chain:5"))
    jobs: dict[str, Json] = {}
    refused = None
    with tempfile.TemporaryDirectory() as scratch:
        for name, kind in ((BFLOAT16, "bfloat16"), (Q8_0, "q8_0")):
            file = write_gguf(Path(target.path), Path(scratch, f"{kind}.gguf"), kind)
            jobs[name] = {"target": str(file)}
        if args.drafter:
            trained = find_drafter(args.drafter)
            tree = tuned_tree(trained.folder)
            if args.tree:
                tree = TreeSpec.parse(args.tree)
            sides[HEAD] = partial(drafted, load_drafter(f"{args.drafter}+ngram", target), tree)
            depth = engine_depth(trained, tree)
            exported = Path(scratch, "draft")
            try:
                export(trained, "gguf", exported, torch.bfloat16, args.target, depth)
            except UserError as error:
                refused = str(error)
                print(f"{LLAMA_HEAD}: left out, {refused}")
            else:
                kind = shipping(trained.kind).options(trained)["llama.cpp"]["spec-type"]
                draft = {"draft": str(exported / GGUF_NAME), "type": kind, "depth": depth}
                p_min = args.spec_draft_p_min
                jobs[LLAMA_HEAD] = {**jobs[BFLOAT16], **draft}
                jobs[f"{LLAMA_HEAD}, p-min {p_min}"] = {**jobs[LLAMA_HEAD], "p_min": p_min}
        for name, job in jobs.items():
            sides[name] = partial(llama_answers, args.llama_python, {"tokens": args.tokens, **job})

        by_length = {}
        for length in args.lengths:
            prompts = prompts_of(sides[PLAIN], questions, length, args.prompts, args.tokens)
            by_length[length] = measure(sides, prompts, args.repeats)
    compared = {length: ratios(found) for length, found in by_length.items()}
    for length, found in by_length.items():
        print(f"\n{table(length, found)}\n\n{compared[length]}")
    write_result(
        args.output,
        min(found["decoding_over_bfloat16"] for found in compared.values()),
        GOALS["decoding_over_bfloat16"],
        by_length,
        target.device,
        ratios=compared,
        goals=GOALS,
        prompts=args.prompts,
        tokens=args.tokens,
        llama_cpp=BUILD,
        refused=refused,
    )


if __name__ == "__main__":
    main()
