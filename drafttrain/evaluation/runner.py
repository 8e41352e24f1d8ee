"""`drafttrain eval`: measures a drafter against plain decoding, turn and turn about, and writes results.json."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import decoding_settings, default_tree, kind_of, load_drafter, names_help
from drafttrain.environment import describe_environment, peak_memory, reset_peak
from drafttrain.errors import UserError
from drafttrain.evaluation.diagnose import diagnose, print_findings
from drafttrain.evaluation.metrics import BASELINES, HF_SPECULATIVE, Record, by_category, summarise
from drafttrain.evaluation.records import Partial, fingerprint, folder_state
from drafttrain.evaluation.sides import Side, engine_side, hf_sides
from drafttrain.evaluation.suites import Question, Suite, known_suites, load_suite, render, take_evenly
from drafttrain.files import write_json
from drafttrain.inference import Decoder, SamplingParams, token_limit
from drafttrain.progress import Progress
from drafttrain.reports.report import print_results
from drafttrain.target import Target
from drafttrain.tuning.replay import parts_of
from drafttrain.tuning.tune import calibration_prompts, search_tree

HELP = """Measure a drafter in the lossless tree decoder against plain decoding.

  drafttrain eval --target smollm2-135m --drafter runs/quickstart/drafter --output results.json
  drafttrain eval --target smollm2-135m --drafter ngram --suite mt_bench.jsonl --limit 10 --tree dynamic:4,4,8

Every prompt is answered by our engine with the drafter, by our engine without it (autoregressive) and by transformers'
generate on a model of its own, in rotating order. Interrupted, the same command goes on from the finished prompts."""

WARM_UP_TOKENS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True, help="short name, folder or Hub id")
    add("--drafter", required=True, help=f"{names_help()}, or none")
    add("--suite", default="drafttrain", help=f"{', '.join(known_suites())}, a JSONL file in FastChat's question "
        "format, or NAME:FILE for a public suite in a file")  # fmt: skip
    add("--dtype", default="auto", help="float32, bfloat16, float16 or auto (bfloat16 where the device has it)")
    add("--device", default="auto", help="cpu, cuda or auto")
    add("--temperature", type=float, default=0.0, help="0 decodes greedily")
    add("--top-p", type=float, default=1.0, help="1 keeps all tokens")
    add("--top-k", type=int, default=0, help="0 keeps all tokens")
    add("--min-p", type=float, default=0.0, help="0 keeps all tokens")
    add("--repetition-penalty", type=float, default=1.0, help="1 changes nothing; also when greedy")
    add("--max-new-tokens", type=int, default=128, help="per answer")
    add("--batch-size", type=int, default=1, help="prompts at a time, on every side; --tree auto times single ones")
    add("--tree", help="none, chain:3, fanout:4x2x1, dynamic:5,8,24, paths:0,1,0-0, with @sample or @stop=P behind it if "
        "wanted, or auto: the fastest of a list, found by timing (default: what the drafter's decoding.json says, else auto)"
    )  # fmt: skip
    add(
        "--calibrate",
        metavar="FILE",
        help="prompts for --tree auto (JSONL with messages, turns or text), not from the suite",
    )
    add("--limit", type=int, help="questions at most, taken evenly from all categories")
    add("--seed", type=int, default=0, help="of the sampling")
    add(
        "--baselines",
        default=",".join(BASELINES),
        help=f"a list of {', '.join((*BASELINES, *HF_SPECULATIVE))}, or none (default: %(default)s)",
    )
    add("--assistant", default="", help="draft model of hf_assisted: folder or Hub id of a causal LM (default: the target's "
        "own first layers)")  # fmt: skip
    add("--output", default="results.json", help="results file")
    add("--trust-remote-code", action="store_true", help="run model code that comes with the target")


@dataclass
class Plan:
    """What to measure, once the arguments are checked and everything is loaded."""

    target: Target
    drafter: Drafter | None
    spec: TreeSpec
    sampling: SamplingParams
    max_new_tokens: int
    batch_size: int
    seed: int
    off: tuple[str, ...] = ()  # categories that are decoded plainly

    def decoder(self, drafter: Drafter | None) -> Decoder:
        return Decoder(self.target, drafter, spec=self.spec, sampling=self.sampling, max_rows=self.batch_size)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    Raises:
        UserError: an argument out of its range, or anything that cannot be loaded.
    """
    check(args)
    suite = load_suite(args.suite)
    take_evenly(suite.questions, args.limit)
    target = Target.load(args.target, args.dtype, args.device, args.trust_remote_code)
    results = evaluate(args, target, load_drafter(args.drafter, target), suite)
    print_results(results)
    print_findings(results["diagnosis"])
    print(f"wrote {Path(args.output).expanduser()}")
    return 0


def check(args: argparse.Namespace) -> SamplingParams:
    """What can be checked before anything is loaded.

    Raises:
        UserError: an argument out of its range.
    """
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty)
    baselines = parse_baselines(args.baselines)
    if args.batch_size < 1:
        raise UserError(f"batch-size={args.batch_size} must be at least 1")
    if args.batch_size > 1 and set(baselines) & set(HF_SPECULATIVE):
        raise UserError(f"batch-size={args.batch_size}: transformers speculates on single prompts only; use 1")
    if args.tree not in (None, "auto"):
        TreeSpec.parse(args.tree).check(sampling)
    return sampling


def evaluate(args: argparse.Namespace, target: Target, drafter: Drafter | None, suite: Suite) -> dict[str, Any]:
    """Measures, writes and returns the results.

    Args:
        args: of the command; target, drafter: what they name.

    Raises:
        UserError: an argument out of its range, prompts that do not fit, or an output that cannot be written.
    """
    sampling, baselines, output = check(args), parse_baselines(args.baselines), Path(args.output).expanduser()
    questions = take_evenly(suite.questions, args.limit)
    target.check_head()
    check_lengths(target, questions, args.max_new_tokens)
    settings = describe(args, target, suite, sampling)
    # Kinds of request that decoding.json switches off; naming a tree measures them all.
    off = tuple(decoding_settings(args.drafter).get("off", ())) if args.tree is None else ()
    state = [folder_state(target.path), folder_state(args.drafter.partition("+")[0])]
    choices = [baselines, args.assistant, args.tree, args.calibrate, args.limit, off]
    partial = Partial(output, fingerprint({"settings": settings, "files": state, "choices": choices}))
    target.pack()
    spec, tree_search = choose_tree(args, target, drafter, sampling, questions, partial)
    settings["decoding"]["tree"] = {"spec": str(spec), **dataclasses.asdict(spec)}
    plan = Plan(target, drafter, spec, sampling, args.max_new_tokens, args.batch_size, args.seed, off)
    others: dict[str, Side] = {}
    if "autoregressive" in baselines:
        others["autoregressive"] = engine_side(plan.decoder(None))
    theirs = [name for name in baselines if name.startswith("hf_")]
    if theirs:
        others |= hf_sides(target, target.dtype, sampling, theirs, args.assistant, args.trust_remote_code)
    records = measure(plan, questions, others, partial)
    results = {
        **settings,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "tree_search": tree_search,
        "overall": summarise(records),
        "categories": by_category(records),
        "prompts": records,
    }
    results["diagnosis"] = diagnose(results, training_record(args.drafter))
    write_json(output, results)
    partial.remove()
    return results


def training_record(drafter: str) -> dict[str, Any]:
    """The drafter folder's training.json; empty without one."""
    path = Path(drafter.partition("+")[0]).expanduser() / "training.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def parse_baselines(text: str) -> list[str]:
    """Raises UserError for a name that is no baseline."""
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in (*BASELINES, *HF_SPECULATIVE):
            known = ", ".join((*BASELINES, *HF_SPECULATIVE))
            raise UserError(f"baselines={text!r}: {name!r} is not one of {known}; or write none")
    return names


def check_lengths(target: Target, questions: Sequence[Question], max_new_tokens: int) -> None:
    """Finds prompts that cannot be decoded before hours are spent on others.

    Raises:
        UserError: names the question.
    """
    for question in questions:
        try:
            token_limit(target, len(render(target.tokenizer, question.turns[:1], [])), max_new_tokens)
        except UserError as error:
            raise UserError(f"question {question.question_id!r}: {error}") from error


def describe(args: argparse.Namespace, target: Target, suite: Suite, sampling: SamplingParams) -> dict[str, Any]:
    """The head of results.json: what was measured, where, with what."""
    folder, plus, side = args.drafter.partition("+")
    return {
        **describe_environment(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "compute_dtype": str(target.compute_dtype).removeprefix("torch."),
        "target": args.target,
        "drafter": args.drafter,
        "kind": kind_of(folder) + plus + side,
        "suite": suite.name,
        "suite_digest": suite.digest,
        **({"suite_licence": suite.licence} if suite.licence else {}),
        "decoding": {
            **dataclasses.asdict(sampling),
            "max_new_tokens": args.max_new_tokens,
            "batch_size": args.batch_size,
            "seed": args.seed,
        },
    }


def choose_tree(
    args: argparse.Namespace,
    target: Target,
    drafter: Drafter | None,
    sampling: SamplingParams,
    questions: Sequence[Question],
    partial: Partial,
) -> tuple[TreeSpec, list[dict[str, Any]] | None]:
    """The tree asked for, the drafter's own default, or the fastest of a timed search; and the search's table."""
    if drafter is None:
        return TreeSpec.parse("none"), None
    wanted = args.tree or default_tree(args.drafter) or "auto"
    if wanted != "auto":
        return TreeSpec.parse(wanted), None
    if partial.tree is None:
        exclude = {turn for question in questions for turn in question.turns}
        prompts = calibration_prompts(target, args.calibrate, exclude)
        search = search_tree(target, drafter, prompts, sampling)
        partial.add_tree(str(search.best.spec), search.table())
    assert partial.tree is not None
    return TreeSpec.parse(partial.tree["tree"]), partial.tree["tree_search"]


def measure(plan: Plan, questions: Sequence[Question], others: dict[str, Side], partial: Partial) -> list[Record]:
    """Answers every question by every side; returns a record per turn, in the suite's order."""
    decoder = plan.decoder(plan.drafter)
    sides = {"drafter": engine_side(decoder), **others}
    keys = [f"{index}:{question.question_id}" for index, question in enumerate(questions)]
    left = [index for index, key in enumerate(keys) if key not in partial.records]
    if left:
        prompt = render(plan.target.tokenizer, questions[left[0]].turns[:1], [])
        for side in sides.values():
            side([prompt], [min(WARM_UP_TOKENS, token_limit(plan.target, len(prompt), WARM_UP_TOKENS))], plan.seed)
    with Progress("answering", len(questions), "prompts") as meter:
        meter.start_at(len(questions) - len(left))
        for begin in range(0, len(left), plan.batch_size):
            batch = {index: questions[index] for index in left[begin : begin + plan.batch_size]}
            for index, records in answer(plan, batch, sides).items():
                partial.add_question(keys[index], records)
                rate = summarise(records)["tokens_per_second"]
                meter.advance(note=f"{rate:.1f} tokens/s")
    if left:
        print(decoder.memory[1])
    return [record for key in keys for record in partial.records[key]]


def answer(plan: Plan, batch: dict[int, Question], sides: dict[str, Side]) -> dict[int, list[Record]]:
    """A batch of questions, turn by turn; each turn follows the drafter side's answer. The sides' order rotates.

    A turn that no longer fits into the target's context ends its question; the first turn has been checked before.

    Args:
        batch: questions by their index in the suite.

    Returns:
        Each question's records.
    """
    tokenizer = plan.target.tokenizer
    kept = pruned_vocabulary(plan.drafter, plan.target.vocab_size)
    records: dict[int, list[Record]] = {index: [] for index in batch}
    answers: dict[int, list[str]] = {index: [] for index in batch}
    for turn in range(max(len(question.turns) for question in batch.values())):
        prompts: dict[int, list[int]] = {}
        limits: dict[int, int] = {}
        for index, question in batch.items():
            if turn < len(question.turns) and len(answers[index]) == turn:
                prompt = render(tokenizer, question.turns[: turn + 1], answers[index])
                with contextlib.suppress(UserError):
                    limits[index] = token_limit(plan.target, len(prompt), plan.max_new_tokens)
                    prompts[index] = prompt
        if not prompts:
            break
        first = min(batch)
        start = (first // plan.batch_size + turn) % len(sides)
        names = list(sides)
        wanted = [batch[index].category not in plan.off for index in prompts]
        results, memory = {}, 0
        for name in names[start:] + names[:start]:
            ours = name == "drafter"
            if ours:
                reset_peak(plan.target.device)
            choice = (wanted,) if ours and plan.off else ()
            results[name] = sides[name](list(prompts.values()), list(limits.values()), plan.seed + first, *choice)
            if ours:
                memory = peak_memory(plan.target.device)
        for row, index in enumerate(prompts):
            tokens = results["drafter"][row][0]
            same = {name: results[name][row][0] == tokens for name in names[1:]} if plan.sampling.greedy else {}
            differing = [name for name, equal in same.items() if not equal]
            texts = {
                name: tokenizer.decode(results[name][row][0], skip_special_tokens=True)
                for name in ("drafter", *differing)
            }
            records[index].append(
                {
                    "question_id": batch[index].question_id,
                    "turn": turn,
                    "category": batch[index].category,
                    "prompt_tokens": len(prompts[index]),
                    "sides": {name: results[name][row][1] for name in names},
                    "identical": same,
                    **({"outputs": texts} if differing else {}),
                    "memory": memory,
                    **({"covered": covered(kept, tokens)} if kept is not None else {}),
                    **({} if wanted[row] else {"speculation": False}),
                }
            )
            answers[index].append(texts["drafter"])
    return records


def pruned_vocabulary(drafter: Drafter | None, vocab_size: int) -> Tensor | None:
    """[d] the target ids that a pruned vocabulary holds; None where every token can be drafted."""
    kept = parts_of(drafter)[0].vocabulary if drafter is not None else None
    return None if kept is None or len(kept) == vocab_size else kept


def covered(kept: Tensor, tokens: list[int]) -> float:
    """Share of tokens that a vocabulary holds."""
    return round(float(torch.isin(torch.tensor(tokens, device=kept.device), kept).float().mean()), 4) if tokens else 1.0
