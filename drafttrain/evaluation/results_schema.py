"""What results.json, a sweep's summary.json and training.json hold, as far as anything reads it.

Other keys are kept.

`drafttrain eval`, `sweep` and `train` write these files; `report`, `diagnose`, `estimate`, `push`
and resumed runs read them. Fields that earlier versions did not write are NotRequired.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from typing_extensions import NotRequired, TypedDict

from drafttrain.evaluation.suites import Category
from drafttrain.files import Json

# Beyond these no measurement lies, and charts and sums overflow.
Amount = Annotated[
    float,
    Field(
        ge=0,
        le=1e12,
        allow_inf_nan=False,
    ),
]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Depth = Annotated[int, Field(ge=0, le=100_000)]
Span = Annotated[list[Amount], Field(min_length=2, max_length=2)]
Round = Annotated[list[Count], Field(min_length=3, max_length=3)]  # accepted, offered, count


def _offered(rounds: list[list[int]]) -> list[list[int]]:
    for accepted, offered, _ in rounds:
        if not accepted <= offered <= 100_000:
            raise ValueError("a round must not accept more tokens than it offered")
    return rounds


class PlainSide(TypedDict):
    """A prompt's answer by another engine."""

    tokens: Count
    seconds: Amount  # wall-clock, prefill included; prompts of a batch have equal shares


class EngineSide(PlainSide):
    """A prompt's answer by our engine. A round is one target pass after the prefill."""

    latency: Amount  # seconds until the prompt's last token
    ttft: Amount  # seconds until its first
    passes: Count  # number of rounds
    draft_seconds: Amount
    target_seconds: Amount
    # [accepted, offered, count]; the prefill's own token belongs to no round
    rounds: Annotated[list[Round], AfterValidator(_offered)]


class Sides(TypedDict):
    """A prompt's answers."""

    drafter: EngineSide
    autoregressive: NotRequired[EngineSide]
    ngram: NotRequired[EngineSide]  # n-grams alone
    hf_generate: NotRequired[PlainSide]
    hf_prompt_lookup: NotRequired[PlainSide]
    hf_assisted: NotRequired[PlainSide]


class PromptRecord(TypedDict):
    """A prompt, one turn of a question, as every side answered it."""

    question_id: str
    turn: Count
    category: Category
    prompt_tokens: Count
    sides: Sides
    # by baseline, whether its tokens are the drafter's; empty when sampled
    identical: dict[str, bool]
    # text of the drafter's side and of each that differs; absent if none does
    outputs: NotRequired[dict[str, str]]
    # peak bytes in use while the drafter's side answered (in a batch: of the whole batch)
    memory: NotRequired[Count | None]
    batch: NotRequired[Count]  # index of the batch's first question; absent for single prompts
    # share of the answer's tokens that the drafter can propose; absent if it knows every token
    covered: NotRequired[Share]
    speculation: NotRequired[bool]  # False if decoding.json switches the category off


class PartialLine(TypedDict, total=False):
    """A line of FILE.partial.jsonl: the result of the tree search, or a question's records."""

    tree: str
    tree_search: list[Json] | None
    question: str
    records: list[PromptRecord]


class ByDepth(TypedDict):
    """Acceptance by depth."""

    conditional: list[Share]
    joint: list[Share]


def _even(shares: ByDepth) -> ByDepth:
    if len(shares["conditional"]) != len(shares["joint"]):
        raise ValueError("conditional and joint must have the same number of depths")
    return shares


class Percentiles(TypedDict):
    """In milliseconds."""

    p50: Amount
    p95: Amount
    p99: Amount


class BaselineFigures(TypedDict):
    """Figures of a baseline."""

    tokens_per_second: Amount
    ttft_ms: NotRequired[Percentiles]
    tpot_ms: NotRequired[Percentiles]


class Intervals(TypedDict):
    """95 % intervals."""

    accepted_length: Span | None
    speedup: dict[str, Span | None]
    decoding_speedup: NotRequired[dict[str, Span | None]]


class Lengths(TypedDict):
    """Tokens of prompts or answers."""

    mean: Amount
    least: Count
    most: Count


class Figures(TypedDict):
    """`evaluation.metrics.summarize`."""

    prompts: Count
    tokens: Count
    target_passes: Count
    accepted_length: Amount
    acceptance_rate: Amount
    acceptance_by_depth: Annotated[ByDepth, AfterValidator(_even)]
    accepted_length_histogram: NotRequired[list[Count]]
    tokens_per_second: Amount
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    draft_fraction: Amount
    mbsu: Amount
    baselines: dict[str, BaselineFigures]
    speedup: dict[str, Amount]
    decoding_speedup: NotRequired[dict[str, Amount]]
    prompt_lengths: NotRequired[Lengths]
    answer_lengths: NotRequired[Lengths]
    speedup_vs_fastest: Amount | None
    identical_outputs: Share | None
    identical_to_hf_generate: Share | None
    confidence: NotRequired[Intervals]


class TreeNote(TypedDict):
    """A `TreeSpec` and its text form."""

    spec: str
    shape: NotRequired[str]
    depth: NotRequired[Depth]
    budget: NotRequired[Depth]
    sampled: NotRequired[bool]


class Decoding(TypedDict):
    """Settings of the measured decoding."""

    temperature: Amount
    tree: NotRequired[TreeNote]
    chat_template_kwargs: NotRequired[Json]


class SweepSettings(TypedDict, total=False):
    """A cell's place on each axis of a sweep."""

    dtype: str
    tree: str | None
    temperature: Amount
    batch_size: Annotated[int, Field(ge=1)]
    context: Count


class SweepNote(TypedDict):
    """What a sweep adds to the results of a cell. key: hash of what they depend on; target_files: of
    a local target's files, which 0.1 did not note.
    """

    cell: SweepSettings
    key: str
    target_files: NotRequired[str]


class Provenance(TypedDict, total=False):
    """What was measured, when, where and how; earlier versions wrote less."""

    kind: str
    device: str
    versions: dict[str, str]
    command: list[str]
    date: str
    commit: str | None
    machine: str


class Results(Provenance):
    """results.json."""

    target: str
    drafter: str
    suite: str
    dtype: str
    decoding: Decoding
    overall: Figures
    categories: dict[Category, Figures]
    prompts: NotRequired[list[PromptRecord]]
    diagnosis: NotRequired[list[Json]]
    sweep: NotRequired[SweepNote]


class SweepFigures(TypedDict, total=False):
    """Figures of a cell in a sweep's summary; older summaries have them under `overall`."""

    prompts: Count
    accepted_length: Amount
    acceptance_rate: Amount
    acceptance_by_depth: ByDepth
    tokens_per_second: Amount
    speedup: dict[str, Amount]
    decoding_speedup: dict[str, Amount]
    speedup_vs_fastest: Amount | None
    confidence: Intervals


class SweepCell(SweepFigures, SweepSettings, total=False):
    """A cell of a sweep's summary; older ones have the settings beside the figures."""

    cell: SweepSettings
    spec: str
    overall: SweepFigures


class SweepSummary(Provenance):
    """A sweep's summary.json. Earlier versions wrote the cells without what they share."""

    target: NotRequired[str]
    drafter: NotRequired[str]
    suite: NotRequired[str]
    cells: Annotated[list[SweepCell], Field(min_length=1)]


class DrafterOptions(TypedDict, total=False):
    """Options of a kind that figures are compared with."""

    ttt_steps: Depth


class TrainedWith(TypedDict, total=False):
    """The recipe of a training run."""

    target: str
    data: str
    max_length: Count
    drafter: DrafterOptions


HeldOut = TypedDict("HeldOut", {"eval_agree@1": NotRequired[Share]})


class LearnedData(TypedDict, total=False):
    """What a training recorded of its data set."""

    chat_template_kwargs: Json


class TrainingRecord(TypedDict, total=False):
    """training.json."""

    config: TrainedWith
    held_out: HeldOut
    data_set: LearnedData
    parameters: Count
