"""Evaluation of a drafter: answers a suite with it and with the baselines, writes results.json."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.combined import parts_of
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.kinds import split_name
from drafttrain.drafters.registry import (
    decoding_settings,
    default_tree,
    kind_of,
    load_drafter,
)
from drafttrain.environment import describe_environment, describe_run
from drafttrain.errors import UserError
from drafttrain.evaluation.baselines import BASELINES, HF_SPECULATIVE, NGRAM, NGRAM_TREE
from drafttrain.evaluation.diagnose import diagnose
from drafttrain.evaluation.metrics import (
    by_category,
    fingerprint,
    folder_state,
    open_log,
    partial_file,
    saved_records,
    summarize,
    training_record,
)
from drafttrain.evaluation.results_schema import PromptRecord, Sides
from drafttrain.evaluation.sides import (
    Side,
    SideAnswer,
    SideRequest,
    by_turns,
    engine_side,
    hf_sides,
    prompt_tokens,
)
from drafttrain.evaluation.suites import Question, Suite, take_evenly
from drafttrain.files import Json, JsonlLog, write_json
from drafttrain.inference import Decoder, SamplingParams, token_limit
from drafttrain.outcome import command_line
from drafttrain.progress import Progress
from drafttrain.target import Target
from drafttrain.target.sight import ImagePrompt

WARM_UP_TOKENS = 12
# (target, drafter, sampling, texts of the suite, which must not be searched with) -> the fastest
# tree, and a table of candidates
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
        UserError: values that do not go together, found before any model is loaded.
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
    baselines: tuple[str, ...] = (*BASELINES, NGRAM)
    assistant: str = ""
    trust_remote_code: bool = False
    chat_template_kwargs: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch_size > 1 and set(self.baselines) & set(HF_SPECULATIVE):
            raise UserError(
                f"batch-size={self.batch_size}: transformers speculates on single prompts only; use 1"
            )
        if self.tree is not None and self.tree != "auto":
            TreeSpec.parse(self.tree).check(self.sampling)


@dataclass
class EvalPlan:
    """A loaded target and drafter with the settings that they are measured with.

    Attributes:
        off: categories that are decoded without drafts.
    """

    target: Target
    drafter: Drafter | None
    spec: TreeSpec
    settings: EvalSettings
    off: tuple[str, ...] = ()

    def decoder(self, drafter: Drafter | None, spec: TreeSpec | None = None) -> Decoder:
        """The engine with a drafter, or with None for plain decoding; by default in the plan's tree."""
        if spec is None:
            spec = self.spec
        return Decoder(
            self.target,
            drafter,
            spec=spec,
            sampling=self.settings.sampling,
            max_rows=self.settings.batch_size,
            # Sampled answers differ by side, so that only the drafter's own side could go on.
            keep=self.settings.sampling.greedy,
        )

    def ngram_side(self) -> Side:
        """N-grams alone, which draft in every category."""
        ngrams = load_drafter(NGRAM, self.target)
        side = engine_side(self.decoder(ngrams, TreeSpec.parse(NGRAM_TREE)))
        return lambda request: side(request._replace(speculate=None))


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
    if any(question.images for question in questions):
        check_sight(settings)
    check_lengths(target, questions, settings.max_new_tokens)
    head = describe(settings, target.pack(), drafter, suite)
    off: tuple[str, ...] = ()
    if settings.tree is None:  # a tree named by the user applies to all categories
        off = tuple(decoding_settings(settings.drafter).get("off", ()))

    # Everything that a saved record depends on. N-grams alone are not part of it, so that runs
    # which began before they were measured go on.
    files = [folder_state(target.path), folder_state(split_name(settings.drafter)[0])]
    choices = [
        [name for name in settings.baselines if name != NGRAM],
        settings.assistant,
        settings.tree,
        settings.calibrate,
        settings.limit,
        off,
    ]
    key = fingerprint({"settings": head, "files": files, "choices": choices})
    with contextlib.closing(open_log(settings.output, key)) as saved:
        spec, tree_search = choose_tree(settings, target, drafter, questions, saved, search)
        head["decoding"]["tree"] = {"spec": str(spec), **dataclasses.asdict(spec)}
        plan = EvalPlan(target, drafter, spec, settings, off)
        others: dict[str, Side] = {}
        if "autoregressive" in settings.baselines:
            others["autoregressive"] = engine_side(plan.decoder(None))
        # Beside a trained drafter only: what did its training add?
        if NGRAM in settings.baselines and drafter is not None and parts_of(drafter)[0].trainable:
            if _lacks_ngrams(saved):
                print(
                    "n-grams alone are left out, because the interrupted run did not measure them; "
                    f"to measure them delete {partial_file(settings.output)}"
                )
            else:
                others[NGRAM] = plan.ngram_side()
                head["decoding"]["ngram_tree"] = NGRAM_TREE
        theirs = [name for name in settings.baselines if name.startswith("hf_")]
        if theirs:
            others |= hf_sides(
                target,
                settings.sampling,
                theirs,
                settings.assistant,
                settings.trust_remote_code,
            )
        implementation = {"target": target.implementation}
        fit: Json = {}
        if drafter is not None:
            first = parts_of(drafter)[0]
            implementation["drafter"] = first.implementation(spec)
            fit = first.fit()
        for name, runs in implementation.items():
            print(f"{name}: {runs}")
        records = measure(plan, questions, others, saved)

        results = {
            **describe_run(),
            **head,
            **fit,
            "implementation": implementation,
            "command": command_line(),
            "tree_search": tree_search,
            "overall": summarize(records),
            "categories": by_category(records),
            "prompts": records,
        }
        results["diagnosis"] = diagnose(results, training_record(settings.drafter))
        write_json(settings.output, results)
        saved.remove()
    return results


def _lacks_ngrams(saved: JsonlLog) -> bool:
    """Whether an interrupted run has answered prompts without n-grams alone."""
    for records in saved_records(saved).values():
        if any(NGRAM not in record["sides"] for record in records):
            return True
    return False


def check_sight(settings: EvalSettings) -> None:
    """Raises UserError: transformers does not answer prompts with images under these settings."""
    speculative = [name for name in settings.baselines if name in HF_SPECULATIVE]
    if speculative:
        raise UserError(
            f"baselines={','.join(speculative)}: not measured on suites with images; leave them out"
        )
    if settings.batch_size > 1 and "hf_generate" in settings.baselines:
        raise UserError(
            f"batch-size={settings.batch_size}: hf_generate reads single prompts with images only; use 1, or "
            "--baselines autoregressive"
        )


def check_lengths(target: Target, questions: Sequence[Question], max_new_tokens: int) -> None:
    """Raises UserError for the first question that does not fit into the target's context."""
    for question in questions:
        try:
            token_limit(target, len(question.prompt_for(target)), max_new_tokens)
        except UserError as error:
            raise UserError(f"question {question.question_id!r}: {error}") from error


def describe(
    settings: EvalSettings,
    target: Target,
    drafter: Drafter | None,
    suite: Suite,
) -> Json:
    """The head of results.json: what is measured, on which machine, with which settings."""
    if drafter is not None and not drafter.name:  # made in this process
        kind = drafter.kind
    else:
        folder, plus, side = settings.drafter.partition("+")
        kind = kind_of(folder) + plus + side
    decoding = {
        **target.generation.rules.recorded(settings.sampling),
        "max_new_tokens": settings.max_new_tokens,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
    }
    if settings.chat_template_kwargs:
        decoding["chat_template_kwargs"] = settings.chat_template_kwargs
    head = {
        **describe_environment(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "compute_dtype": str(target.product_dtype).removeprefix("torch."),
        "target": settings.target,
        "drafter": settings.drafter,
        "kind": kind,
        "suite": suite.name,
        "suite_digest": suite.digest,
    }
    if suite.license:
        head["suite_licence"] = suite.license
    head["decoding"] = decoding
    return head


def choose_tree(
    settings: EvalSettings,
    target: Target,
    drafter: Drafter | None,
    questions: Sequence[Question],
    saved: JsonlLog,
    search: TreeSearch,
) -> tuple[TreeSpec, list[Json] | None]:
    """The tree that the user or decoding.json names, or the result of a search with its table."""
    if drafter is None:
        return TreeSpec.parse("none"), None
    wanted = settings.tree
    if wanted is None:
        wanted = default_tree(settings.drafter)
    if wanted not in (None, "auto"):
        return TreeSpec.parse(wanted), None
    for row in saved.rows:
        if row.keys() >= {"tree", "tree_search"}:  # an interrupted run has searched
            return TreeSpec.parse(row["tree"]), row["tree_search"]
    texts = set[str]()  # of the suite
    for question in questions:
        texts.update(question.turns)
    spec, table = search(target, drafter, settings.sampling, texts)
    saved.add({"tree": str(spec), "tree_search": table})
    return spec, table


def measure(
    plan: EvalPlan,
    questions: Sequence[Question],
    others: dict[str, Side],
    saved: JsonlLog,
) -> list[PromptRecord]:
    """Answers every question by every side; returns one record per turn, in the suite's order."""
    size = plan.settings.batch_size
    decoder = plan.decoder(plan.drafter)
    sides = {"drafter": engine_side(decoder, watch_memory=True), **others}
    keys = [f"{index}:{question.question_id}" for index, question in enumerate(questions)]
    done = saved_records(saved)
    left = [index for index, key in enumerate(keys) if key not in done]
    if left:  # warm up: kernels are compiled and graphs captured before anything is timed
        prompt = questions[left[0]].prompt_for(plan.target)
        limit = min(WARM_UP_TOKENS, token_limit(plan.target, len(prompt), WARM_UP_TOKENS))
        for side in sides.values():
            side(SideRequest([prompt], [limit], plan.settings.seed))

    with Progress("answering", len(questions), "prompts") as meter:
        meter.start_at(len(questions) - len(left))
        for begin in range(0, len(left), size):
            batch = {index: questions[index] for index in left[begin : begin + size]}
            for index, records in answer(plan, batch, sides).items():
                saved.add({"question": keys[index], "records": records})
                done[keys[index]] = records
                meter.advance(note=f"{summarize(records)['tokens_per_second']:.1f} tokens/s")
    if left:
        print(decoder.memory[1])

    # Finished ones of an interrupted run among them, in the suite's order.
    made = []
    for key in keys:
        made += done[key]
    return made


def answer(
    plan: EvalPlan,
    batch: dict[int, Question],
    sides: dict[str, Side],
) -> dict[int, list[PromptRecord]]:
    """Answers a batch of questions turn by turn; later turns follow the drafter's answers.

    The order of the sides rotates with the question and the turn. A later turn that does not fit
    into the target's context ends its question.

    Args:
        batch: questions by their index in the suite, as the returned records. sides: `drafter`,
            ours, and the baselines.
    """
    target = plan.target
    settings = plan.settings
    # The batch's first question stands for it: in seeds, and in the order of the sides.
    first = min(batch)
    records: dict[int, list[PromptRecord]] = {index: [] for index in batch}
    texts: dict[int, list[str]] = {index: [] for index in batch}  # the drafter's answers so far
    for turn in range(max(len(question.turns) for question in batch.values())):
        # Questions that have this turn, and room for it.
        prompts: dict[int, list[int] | ImagePrompt] = {}
        limits: dict[int, int] = {}  # most new tokens
        for index, question in batch.items():
            if turn < len(question.turns) and len(texts[index]) == turn:
                prompt = question.prompt_for(target, texts[index])
                with contextlib.suppress(UserError):
                    limits[index] = token_limit(target, len(prompt), settings.max_new_tokens)
                    prompts[index] = prompt
        if not prompts:
            break

        speculate = [batch[index].category not in plan.off for index in prompts]
        request = SideRequest(
            list(prompts.values()),
            list(limits.values()),
            settings.seed + first,
            speculate if plan.off else None,
        )
        answers = dict(by_turns(sides, request, first // settings.batch_size + turn))
        for row, index in enumerate(prompts):
            own = {name: answers[name][row] for name in sides}
            record, text = compare_answers(plan, batch[index], turn, prompts[index], own)
            if settings.batch_size > 1:
                record["batch"] = first
            if not speculate[row]:
                record["speculation"] = False
            records[index].append(record)
            texts[index].append(text)
    return records


def compare_answers(
    plan: EvalPlan,
    question: Question,
    turn: int,
    prompt: list[int] | ImagePrompt,
    answers: Mapping[str, SideAnswer],
) -> tuple[PromptRecord, str]:
    """The record of a prompt, and the text of the drafter's answer. answers: by side."""
    tokens = answers["drafter"].tokens
    figures = {name: each.figures for name, each in answers.items()}
    record = PromptRecord(
        question_id=question.question_id,
        turn=turn,
        category=question.category,
        prompt_tokens=len(prompt),
        sides=cast("Sides", figures),
        identical={},
        memory=answers["drafter"].memory,
    )

    def text_of(name: str) -> str:
        return plan.target.tokenizer.decode(answers[name].tokens, skip_special_tokens=True)

    texts = {"drafter": text_of("drafter")}  # of the drafter's side, and of those that differ
    if plan.settings.sampling.greedy:
        for name in answers:
            if name != "drafter":
                record["identical"][name] = answers[name].tokens == tokens
        for name, same in record["identical"].items():
            if not same:
                texts[name] = text_of(name)
    if len(texts) > 1:
        record["outputs"] = texts

    if plan.drafter is not None:
        main = parts_of(plan.drafter)[0]
        kept = main.vocabulary  # [d] int64, None for all
        if kept is not None and len(kept) < plan.target.vocab_size:
            joined = prompt_tokens(prompt) if main.joins_tokens else []
            record["covered"] = covered(tokens, kept.tolist(), joined)
    return record, texts["drafter"]


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
