"""Evaluation of a drafter: answers a suite with it and with the baselines in rotating order, and writes results.json."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.combined import parts_of
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import decoding_settings, default_tree, kind_of
from drafttrain.environment import describe_environment, peak_memory, reset_peak
from drafttrain.errors import UserError
from drafttrain.evaluation.diagnose import diagnose
from drafttrain.evaluation.metrics import BASELINES, HF_SPECULATIVE, Record, by_category, summarize
from drafttrain.evaluation.records import PartialResults, fingerprint, folder_state, training_record
from drafttrain.evaluation.sides import Side, engine_side, hf_sides
from drafttrain.evaluation.suites import Question, Suite, render, take_evenly
from drafttrain.files import Json, write_json
from drafttrain.inference import Decoder, SamplingParams, token_limit
from drafttrain.progress import Progress
from drafttrain.target import Target

WARM_UP_TOKENS = 12
# (target, drafter, sampling, texts of the suite that must not be searched with) -> the fastest tree, a table of candidates
TreeSearch = Callable[[Target, Drafter, SamplingParams, Collection[str]], tuple[TreeSpec, list[Json]]]


@dataclass(frozen=True)
class EvalSettings:
    """The options of `drafttrain eval`.

    Attributes:
        target, drafter: as the user names them. output: the results file.
        tree: a tree's text form, `auto` to search for the fastest, or None for the drafter's default, else `auto`.
        calibrate: file with prompts for `auto`. limit: questions at most.
        assistant: draft model of the baseline hf_assisted.

    Raises:
        UserError: a value out of range, found before any model is loaded.
    """

    target: str = ""
    drafter: str = ""
    output: Path = Path("results.json")
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 128
    batch_size: int = 1
    tree: str | None = None
    calibrate: str | None = None
    limit: int | None = None
    seed: int = 0
    baselines: tuple[str, ...] = BASELINES
    assistant: str = ""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch-size={self.batch_size} must be at least 1")
        if self.batch_size > 1 and set(self.baselines) & set(HF_SPECULATIVE):
            raise UserError(f"batch-size={self.batch_size}: transformers speculates on single prompts only; use 1")
        if self.tree not in (None, "auto"):
            TreeSpec.parse(self.tree or "").check(self.sampling)


@dataclass
class EvalPlan:
    """A loaded target and drafter with the settings that they are measured with. off: categories decoded without drafts."""

    target: Target
    drafter: Drafter | None
    spec: TreeSpec
    settings: EvalSettings
    off: tuple[str, ...] = ()

    def decoder(self, drafter: Drafter | None) -> Decoder:
        """The engine with a drafter, or with None for plain decoding."""
        sampling, rows = self.settings.sampling, self.settings.batch_size
        return Decoder(self.target, drafter, spec=self.spec, sampling=sampling, max_rows=rows)


def evaluate(settings: EvalSettings, target: Target, drafter: Drafter | None, suite: Suite, search: TreeSearch) -> Json:
    """Measures a drafter, writes the results file and returns its content.

    Args:
        target, drafter: the models that the settings name.
        search: finds the tree if `settings.tree` asks for it.

    Raises:
        UserError: prompts that do not fit, or an output that cannot be written.
    """
    questions = take_evenly(suite.questions, settings.limit)
    target.check_head()
    check_lengths(target, questions, settings.max_new_tokens)
    head = describe(settings, target, suite)
    # A tree named by the user applies to all categories.
    off = tuple(decoding_settings(settings.drafter).get("off", ())) if settings.tree is None else ()
    state = [folder_state(target.path), folder_state(settings.drafter.partition("+")[0])]
    baselines, tree = list(settings.baselines), settings.tree
    choices = [baselines, settings.assistant, tree, settings.calibrate, settings.limit, off]
    partial = PartialResults(settings.output, fingerprint({"settings": head, "files": state, "choices": choices}))
    target.pack()
    spec, tree_search = choose_tree(settings, target, drafter, questions, partial, search)
    head["decoding"]["tree"] = {"spec": str(spec), **dataclasses.asdict(spec)}
    plan = EvalPlan(target, drafter, spec, settings, off)
    others: dict[str, Side] = {}
    if "autoregressive" in baselines:
        others["autoregressive"] = engine_side(plan.decoder(None))
    theirs = [name for name in baselines if name.startswith("hf_")]
    if theirs:
        others |= hf_sides(target, settings.sampling, theirs, settings.assistant, settings.trust_remote_code)
    records = measure(plan, questions, others, partial)
    results = {
        **head,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "tree_search": tree_search,
        "overall": summarize(records),
        "categories": by_category(records),
        "prompts": records,
    }
    results["diagnosis"] = diagnose(results, training_record(settings.drafter))
    write_json(settings.output, results)
    partial.remove()
    return results


def check_lengths(target: Target, questions: Sequence[Question], max_new_tokens: int) -> None:
    """Checks that every first turn fits into the target's context, before any time is spent.

    Raises:
        UserError: names the first question that does not fit.
    """
    for question in questions:
        try:
            token_limit(target, len(render(target.tokenizer, question.turns[:1], [])), max_new_tokens)
        except UserError as error:
            raise UserError(f"question {question.question_id!r}: {error}") from error


def describe(settings: EvalSettings, target: Target, suite: Suite) -> Json:
    """The head of results.json: what is measured, on which machine, with which settings."""
    folder, plus, side = settings.drafter.partition("+")
    return {
        **describe_environment(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "compute_dtype": str(target.compute_dtype).removeprefix("torch."),
        "target": settings.target,
        "drafter": settings.drafter,
        "kind": kind_of(folder) + plus + side,
        "suite": suite.name,
        "suite_digest": suite.digest,
        **({"suite_licence": suite.license} if suite.license else {}),
        "decoding": {
            **dataclasses.asdict(settings.sampling),
            "max_new_tokens": settings.max_new_tokens,
            "batch_size": settings.batch_size,
            "seed": settings.seed,
        },
    }


def choose_tree(
    settings: EvalSettings,
    target: Target,
    drafter: Drafter | None,
    questions: Sequence[Question],
    partial: PartialResults,
    search: TreeSearch,
) -> tuple[TreeSpec, list[Json] | None]:
    """Returns the tree that the user or decoding.json names, or the result of a search with its table of candidates."""
    if drafter is None:
        return TreeSpec.parse("none"), None
    wanted = settings.tree or default_tree(settings.drafter) or "auto"
    if wanted != "auto":
        return TreeSpec.parse(wanted), None
    if partial.tree is None:
        spec, table = search(target, drafter, settings.sampling, {turn for each in questions for turn in each.turns})
        partial.add_tree(str(spec), table)
    assert partial.tree is not None
    return TreeSpec.parse(partial.tree["tree"]), partial.tree["tree_search"]


def measure(
    plan: EvalPlan, questions: Sequence[Question], others: dict[str, Side], partial: PartialResults
) -> list[Record]:
    """Answers every question by every side; returns one record per turn, in the suite's order."""
    seed, size = plan.settings.seed, plan.settings.batch_size
    decoder = plan.decoder(plan.drafter)
    sides = {"drafter": engine_side(decoder), **others}
    keys = [f"{index}:{question.question_id}" for index, question in enumerate(questions)]
    left = [index for index, key in enumerate(keys) if key not in partial.records]
    if left:  # warm up
        prompt = render(plan.target.tokenizer, questions[left[0]].turns[:1], [])
        for side in sides.values():
            side([prompt], [min(WARM_UP_TOKENS, token_limit(plan.target, len(prompt), WARM_UP_TOKENS))], seed)
    with Progress("answering", len(questions), "prompts") as meter:
        meter.start_at(len(questions) - len(left))
        for begin in range(0, len(left), size):
            batch = {index: questions[index] for index in left[begin : begin + size]}
            for index, records in answer(plan, batch, sides).items():
                partial.add_question(keys[index], records)
                meter.advance(note=f"{summarize(records)['tokens_per_second']:.1f} tokens/s")
    if left:
        print(decoder.memory[1])
    return [record for key in keys for record in partial.records[key]]


def answer(plan: EvalPlan, batch: dict[int, Question], sides: dict[str, Side]) -> dict[int, list[Record]]:
    """Answers a batch of questions turn by turn; later turns follow the answers of the drafter's side.

    The order of the sides rotates with the question and the turn. A later turn that does not fit into the target's
    context ends its question.

    Args:
        batch: questions by their index in the suite.
        sides: `drafter`, ours, and the baselines.

    Returns:
        Records by question index.
    """
    target, settings = plan.target, plan.settings
    kept = pruned_vocabulary(plan.drafter, target.vocab_size)
    records: dict[int, list[Record]] = {index: [] for index in batch}
    answers: dict[int, list[str]] = {index: [] for index in batch}
    names, first = list(sides), min(batch)
    for turn in range(max(len(question.turns) for question in batch.values())):
        prompts: dict[int, list[int]] = {}
        limits: dict[int, int] = {}
        for index, question in batch.items():
            if turn < len(question.turns) and len(answers[index]) == turn:
                prompt = render(target.tokenizer, question.turns[: turn + 1], answers[index])
                with contextlib.suppress(UserError):
                    limits[index] = token_limit(target, len(prompt), settings.max_new_tokens)
                    prompts[index] = prompt
        if not prompts:
            break
        start = (first // settings.batch_size + turn) % len(sides)
        wanted = [batch[index].category not in plan.off for index in prompts]
        results, memory = {}, 0
        for name in names[start:] + names[:start]:
            ours = name == "drafter"
            if ours:
                reset_peak(target.device)
            speculate = (wanted,) if ours and plan.off else ()
            results[name] = sides[name](
                list(prompts.values()), list(limits.values()), settings.seed + first, *speculate
            )
            if ours:
                memory = peak_memory(target.device)
        for row, index in enumerate(prompts):
            tokens = {name: results[name][row][0] for name in names}
            same = {name: tokens[name] == tokens["drafter"] for name in names[1:]} if settings.sampling.greedy else {}
            differing = [name for name, equal in same.items() if not equal]
            decode = target.tokenizer.decode
            texts = {name: decode(tokens[name], skip_special_tokens=True) for name in ("drafter", *differing)}
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
                    **({"covered": covered(kept, tokens["drafter"])} if kept is not None else {}),
                    **({} if wanted[row] else {"speculation": False}),
                }
            )
            answers[index].append(texts["drafter"])
    return records


def pruned_vocabulary(drafter: Drafter | None, vocab_size: int) -> Tensor | None:
    """[d] int64 target ids of a pruned drafter vocabulary; None if every token can be drafted."""
    kept = parts_of(drafter)[0].vocabulary if drafter is not None else None
    return None if kept is None or len(kept) == vocab_size else kept


def covered(kept: Tensor, tokens: list[int]) -> float:
    """Share of tokens that a vocabulary contains."""
    return round(float(torch.isin(torch.tensor(tokens, device=kept.device), kept).float().mean()), 4) if tokens else 1.0
