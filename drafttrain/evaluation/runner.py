"""Evaluation of a drafter: answers a suite with it and with the baselines in rotating order, and
writes results.json.

The sides of the comparison are our engine with the drafter, our engine without it, and
transformers' own generate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GenerationConfig

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.combined import parts_of
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.kinds import split_name
from drafttrain.drafters.registry import decoding_settings, default_tree, kind_of
from drafttrain.environment import describe_environment, describe_run, peak_memory, reset_peak
from drafttrain.errors import UserError
from drafttrain.evaluation.baselines import BASELINES, HF_SPECULATIVE
from drafttrain.evaluation.diagnose import diagnose
from drafttrain.evaluation.metrics import (
    PartialResults,
    Record,
    by_category,
    fingerprint,
    folder_state,
    side_record,
    summarize,
    training_record,
)
from drafttrain.evaluation.suites import Question, Suite, take_evenly
from drafttrain.files import Json, write_json
from drafttrain.inference import Decoder, SamplingParams, token_limit
from drafttrain.outcome import command_line
from drafttrain.progress import Progress
from drafttrain.target import Target, resolve_target

WARM_UP_TOKENS = 12
# (token ids of the prompts, max new tokens of each, seed) -> per prompt: new tokens, and the record
# of the generation
Side = Callable[..., list[tuple[list[int], Record]]]
# (target, drafter, sampling, texts of the suite that must not be searched with) -> the fastest
# tree, a table of candidates
TreeSearch = Callable[
    [Target, Drafter, SamplingParams, Collection[str]], tuple[TreeSpec, list[Json]]
]


@dataclass(frozen=True)
class EvalSettings:
    """The options of `drafttrain eval`.

    Attributes:
        target, drafter: as the user names them. output: the results file.
        tree: a tree's text form, `auto` to search for the fastest, or None for the drafter's
            default, else `auto`.
        calibrate: file with prompts for `auto`. limit: questions at most.
        assistant: draft model of the baseline hf_assisted. chat_template_kwargs: those of the
            suite, to be recorded.

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
    chat_template_kwargs: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch-size={self.batch_size} must be at least 1")
        if self.batch_size > 1 and set(self.baselines) & set(HF_SPECULATIVE):
            raise UserError(
                f"batch-size={self.batch_size}: transformers speculates on single prompts only; use 1"
            )
        if self.tree not in (None, "auto"):
            TreeSpec.parse(self.tree or "").check(self.sampling)


@dataclass
class EvalPlan:
    """A loaded target and drafter with the settings that they are measured with. off: categories
    decoded without drafts.
    """

    target: Target
    drafter: Drafter | None
    spec: TreeSpec
    settings: EvalSettings
    off: tuple[str, ...] = ()

    def decoder(self, drafter: Drafter | None) -> Decoder:
        """The engine with a drafter, or with None for plain decoding."""
        sampling = self.settings.sampling
        rows = self.settings.batch_size
        return Decoder(self.target, drafter, spec=self.spec, sampling=sampling, max_rows=rows)


def evaluate(
    settings: EvalSettings,
    target: Target,
    drafter: Drafter | None,
    suite: Suite,
    search: TreeSearch,
) -> Json:
    """Measures a drafter, writes the results file and returns its content.

    Args:
        target, drafter: the models that the settings name.
        search: finds the tree if `settings.tree` asks for it.

    Raises:
        UserError: prompts that do not fit, or an output that cannot be written.
    """
    questions = take_evenly(suite.questions, settings.limit)
    check_lengths(target, questions, settings.max_new_tokens)
    head = describe(settings, target.pack(), suite)
    # A tree named by the user applies to all categories.
    if settings.tree is None:
        off = tuple(decoding_settings(settings.drafter).get("off", ()))
    else:
        off = ()
    state = [folder_state(target.path), folder_state(split_name(settings.drafter)[0])]
    choices = [
        list(settings.baselines),
        settings.assistant,
        settings.tree,
        settings.calibrate,
        settings.limit,
        off,
    ]
    key = fingerprint({"settings": head, "files": state, "choices": choices})
    with contextlib.closing(PartialResults(settings.output, key)) as saved:
        results = compare_sides(settings, target, drafter, questions, head, off, saved, search)
        write_json(settings.output, results)
        saved.remove()
    return results


def compare_sides(
    settings: EvalSettings,
    target: Target,
    drafter: Drafter | None,
    questions: Sequence[Question],
    head: Json,
    off: tuple[str, ...],
    saved: PartialResults,
    search: TreeSearch,
) -> Json:
    """Chooses the tree, answers what is not saved yet by every side, and returns the content of the
    results file.
    """
    baselines = list(settings.baselines)
    spec, tree_search = choose_tree(settings, target, drafter, questions, saved, search)
    head["decoding"]["tree"] = {"spec": str(spec), **dataclasses.asdict(spec)}
    plan = EvalPlan(target, drafter, spec, settings, off)
    others: dict[str, Side] = {}
    if "autoregressive" in baselines:
        others["autoregressive"] = engine_side(plan.decoder(None))
    theirs = [name for name in baselines if name.startswith("hf_")]
    if theirs:
        others |= hf_sides(
            target,
            settings.sampling,
            theirs,
            settings.assistant,
            settings.trust_remote_code,
        )
    records = measure(plan, questions, others, saved)
    results = {
        **describe_run(),
        **head,
        **(parts_of(drafter)[0].fit() if drafter is not None else {}),
        "command": command_line(),
        "tree_search": tree_search,
        "overall": summarize(records),
        "categories": by_category(records),
        "prompts": records,
    }
    results["diagnosis"] = diagnose(results, training_record(settings.drafter))
    return results


def check_lengths(target: Target, questions: Sequence[Question], max_new_tokens: int) -> None:
    """Raises UserError for the first question whose first turn does not fit into the target's
    context.
    """
    for question in questions:
        try:
            token_limit(target, len(question.prompt(target.tokenizer)), max_new_tokens)
        except UserError as error:
            raise UserError(f"question {question.question_id!r}: {error}") from error


def describe(settings: EvalSettings, target: Target, suite: Suite) -> Json:
    """The head of results.json: what is measured, on which machine, with which settings."""
    folder, plus, side = settings.drafter.partition("+")
    return {
        **describe_environment(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "compute_dtype": str(target.product_dtype).removeprefix("torch."),
        "target": settings.target,
        "drafter": settings.drafter,
        "kind": kind_of(folder) + plus + side,
        "suite": suite.name,
        "suite_digest": suite.digest,
        **({"suite_licence": suite.license} if suite.license else {}),
        "decoding": {
            **target.generation.rules.recorded(settings.sampling),
            "max_new_tokens": settings.max_new_tokens,
            "batch_size": settings.batch_size,
            "seed": settings.seed,
            **(
                {"chat_template_kwargs": settings.chat_template_kwargs}
                if settings.chat_template_kwargs
                else {}
            ),
        },
    }


def choose_tree(
    settings: EvalSettings,
    target: Target,
    drafter: Drafter | None,
    questions: Sequence[Question],
    saved: PartialResults,
    search: TreeSearch,
) -> tuple[TreeSpec, list[Json] | None]:
    """Returns the tree that the user or decoding.json names, or the result of a search with its
    table of candidates.
    """
    if drafter is None:
        return TreeSpec.parse("none"), None
    wanted = settings.tree or default_tree(settings.drafter) or "auto"
    if wanted != "auto":
        return TreeSpec.parse(wanted), None
    if saved.tree is None:
        spec, table = search(
            target,
            drafter,
            settings.sampling,
            {turn for each in questions for turn in each.turns},
        )
        saved.add_tree(str(spec), table)
    assert saved.tree is not None
    return TreeSpec.parse(saved.tree["tree"]), saved.tree["tree_search"]


def measure(
    plan: EvalPlan,
    questions: Sequence[Question],
    others: dict[str, Side],
    saved: PartialResults,
) -> list[Record]:
    """Answers every question by every side; returns one record per turn, in the suite's order."""
    seed = plan.settings.seed
    size = plan.settings.batch_size
    decoder = plan.decoder(plan.drafter)
    sides = {"drafter": engine_side(decoder), **others}
    keys = [f"{index}:{question.question_id}" for index, question in enumerate(questions)]
    left = [index for index, key in enumerate(keys) if key not in saved.records]
    if left:  # warm up
        prompt = questions[left[0]].prompt(plan.target.tokenizer)
        for side in sides.values():
            side(
                [prompt],
                [min(WARM_UP_TOKENS, token_limit(plan.target, len(prompt), WARM_UP_TOKENS))],
                seed,
            )
    with Progress("answering", len(questions), "prompts") as meter:
        meter.start_at(len(questions) - len(left))
        for begin in range(0, len(left), size):
            batch = {index: questions[index] for index in left[begin : begin + size]}
            for index, records in answer(plan, batch, sides).items():
                saved.add_question(keys[index], records)
                meter.advance(note=f"{summarize(records)['tokens_per_second']:.1f} tokens/s")
    if left:
        print(decoder.memory[1])
    return [record for key in keys for record in saved.records[key]]


def answer(
    plan: EvalPlan,
    batch: dict[int, Question],
    sides: dict[str, Side],
) -> dict[int, list[Record]]:
    """Answers a batch of questions turn by turn; later turns follow the answers of the drafter's
    side.

    The order of the sides rotates with the question and the turn. A later turn that does not fit
    into the target's context ends its question.

    Args:
        batch: questions by their index in the suite, as the returned records. sides: `drafter`,
            ours, and the baselines.
    """
    target = plan.target
    settings = plan.settings
    if plan.drafter is not None:
        main = parts_of(plan.drafter)[0]
    else:
        main = None
    kept = main.vocabulary if main is not None else None  # [d] int64, None if all
    if kept is not None and len(kept) == target.vocab_size:
        kept = None
    records: dict[int, list[Record]] = {index: [] for index in batch}
    answers: dict[int, list[str]] = {index: [] for index in batch}
    names = list(sides)
    first = min(batch)
    for turn in range(max(len(question.turns) for question in batch.values())):
        prompts: dict[int, list[int]] = {}
        limits: dict[int, int] = {}
        for index, question in batch.items():
            if turn < len(question.turns) and len(answers[index]) == turn:
                prompt = question.prompt(target.tokenizer, answers[index])
                with contextlib.suppress(UserError):
                    limits[index] = token_limit(target, len(prompt), settings.max_new_tokens)
                    prompts[index] = prompt
        if not prompts:
            break
        start = (first // settings.batch_size + turn) % len(sides)
        wanted = [batch[index].category not in plan.off for index in prompts]
        request = list(prompts.values()), list(limits.values()), settings.seed + first
        results = {}
        memory = 0
        for name in names[start:] + names[:start]:
            if name != "drafter":
                results[name] = sides[name](*request)
                continue
            reset_peak(target.device)
            results[name] = sides[name](*request, *([wanted] if plan.off else []))
            memory = peak_memory(target.device)
        for row, index in enumerate(prompts):
            tokens = {name: results[name][row][0] for name in names}
            if settings.sampling.greedy:
                same = {name: tokens[name] == tokens["drafter"] for name in names[1:]}
            else:
                same = {}
            differing = [name for name, equal in same.items() if not equal]
            decode = target.tokenizer.decode
            texts = {
                name: decode(tokens[name], skip_special_tokens=True)
                for name in ("drafter", *differing)
            }
            record = {
                "question_id": batch[index].question_id,
                "turn": turn,
                "category": batch[index].category,
                "prompt_tokens": len(prompts[index]),
                "sides": {name: results[name][row][1] for name in names},
                "identical": same,
                **({"outputs": texts} if differing else {}),
                "memory": memory,
                **({"batch": first} if settings.batch_size > 1 else {}),
            }
            if kept is not None:
                if main is not None and main.joins_tokens:
                    text = prompts[index]
                else:
                    text = []
                record["covered"] = covered(tokens["drafter"], kept.tolist(), text)
            records[index].append(record if wanted[row] else {**record, "speculation": False})
            answers[index].append(texts["drafter"])
    return records


def covered(answer: list[int], kept: list[int], prompt: list[int]) -> float:
    """Share of an answer's tokens that the drafter can propose: kept ones, and with a prompt those
    that occurred before.
    """
    known = {*kept, *prompt}
    joins = bool(prompt)
    hits = 0
    for token in answer:
        hits += token in known
        if joins:
            known.add(token)
    if answer:
        return round(hits / len(answer), 4)
    return 1.0


# -- sides -----------------------------------------------------------------------------------------


def engine_side(decoder: Decoder) -> Side:
    """Our engine; a decoder without a drafter decodes plainly by the same code. All prompts of a
    call form one batch.

    The side takes a fourth argument: whether to speculate, per prompt.
    """

    def run(
        prompts: Sequence[list[int]],
        limits: Sequence[int],
        seed: int,
        speculate: Sequence[bool] | None = None,
    ) -> list[tuple[list[int], Record]]:
        start = time.perf_counter()
        generations = decoder.generate(
            prompts,
            max_new_tokens=max(limits),
            seed=seed,
            speculate=speculate,
        )
        seconds = time.perf_counter() - start - decoder.capture_seconds
        if len(prompts) > 1:
            share = seconds / len(prompts)
        else:
            share = None
        return [(generation.tokens, side_record(generation, share)) for generation in generations]

    return run


def hf_sides(
    target: Target,
    sampling: SamplingParams,
    names: Sequence[str],
    assistant: str = "",
    trust_remote_code: bool = False,
) -> dict[str, Side]:
    """transformers' generate, plain and with its own speculative decoding, on one shared model.

    Loads a second copy of the target in its dtype, with the attention that transformers chooses for
    the family (sdpa, or eager where sdpa cannot express it). Replaces the model's generation
    settings by what ours applies, so that all sides choose tokens and end by the same rules.

    Args:
        names: of hf_generate, hf_prompt_lookup (10 tokens from the prompt) and hf_assisted.
        assistant: the draft model of hf_assisted; empty for the target's own first third of layers.
    """

    def load(path: str) -> Any:  # transformers' stubs know no `generate` on its models
        options = {
            "dtype": target.dtype,
            "trust_remote_code": trust_remote_code,
            "use_safetensors": True,
        }
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, **options)
        return loaded.to(target.device).eval()

    if not target.path:
        fix = "give its folder as target, or baselines='autoregressive'"
        raise UserError(
            f"baselines={','.join(names)} load target {target.name!r} again, but it has no files; {fix}"
        )
    model = load(target.path)
    end = target.eos_ids or None
    if target.tokenizer is not None:
        pad = target.tokenizer.pad_token_id
    else:
        pad = None
    if pad is None and end:
        pad = end[0]
    rules = target.generation.rules_for(sampling)
    model.generation_config = GenerationConfig(**rules.settings, eos_token_id=end, pad_token_id=pad)
    choice: dict[str, object] = {"do_sample": not sampling.greedy}
    if not sampling.greedy:
        choice |= {**dataclasses.asdict(sampling), "min_p": sampling.min_p or None}
        choice["repetition_penalty"] = rules.repetition_penalty
    methods: dict[str, dict[str, object]] = {
        "hf_generate": {},
        "hf_prompt_lookup": {"prompt_lookup_num_tokens": 10},
        "hf_assisted": {"assistant_early_exit": max(1, target.num_layers // 3)},
    }
    if assistant and "hf_assisted" in names:
        methods["hf_assisted"] = {"assistant_model": load(resolve_target(assistant))}

    def padded(rows: list[list[int]], value: int) -> Tensor:  # [b, s]
        tensors = [torch.tensor(row, device=target.device) for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side="left")

    def run(
        method: dict[str, object],
        prompts: list[list[int]],
        limits: Sequence[int],
        seed: int,
    ) -> list[tuple[list[int], Record]]:
        torch.manual_seed(seed)
        start = time.perf_counter()
        ids = padded(prompts, pad or 0)
        mask = padded([[1] * len(prompt) for prompt in prompts], 0)
        options = {"max_new_tokens": max(limits), "use_cache": True, **choice, **method}
        out = model.generate(ids, attention_mask=mask, **options)  # [b, s + new]
        rows = [
            row[:limit] for row, limit in zip(out[:, ids.shape[1] :].tolist(), limits, strict=True)
        ]
        share = round((time.perf_counter() - start) / len(prompts), 6)
        # generate pads a row after its end until the last row ends.
        ends = [
            next((i + 1 for i, token in enumerate(row) if token in target.eos_ids), len(row))
            for row in rows
        ]
        return [
            (row[:end], {"tokens": end, "seconds": share})
            for row, end in zip(rows, ends, strict=True)
        ]

    return {name: partial(run, methods[name]) for name in names}
