"""Sources of prompts by name: a file, a data set, a package, and prompts that the target writes itself.

A source is a function of a `Request` that yields prompts, as lines of the output:

    {"id", "messages" or "text", "tools"?, "chat_template_kwargs"?, "source"}

docs/developer/add-a-source-of-prompts.md adds one to `SOURCES` step by step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from typing_extensions import TypedDict

from drafttrain.data.failures import BadReply
from drafttrain.data.filters import Filter, stable_id
from drafttrain.data.image_parts import images_in, read_images, sources_in, with_names
from drafttrain.data.row_file import RowFile, check_row_file, line_starts
from drafttrain.data.row_formats import Prompt, parse_row, row_id
from drafttrain.errors import UserError, shown
from drafttrain.files import Json, JsonlLog, hub_problem, reading
from drafttrain.flags import load_target
from drafttrain.images import BadPicture, Picture, PictureStore
from drafttrain.progress import Progress

if TYPE_CHECKING:
    from drafttrain.data.magpie import PromptWriter
    from drafttrain.inference.responses import Finished
    from drafttrain.ops.sampling import SamplingParams
    from drafttrain.target import Target

_READ_AHEAD = 10_000  # rows of a streamed data set that are shuffled together
_SERVED = 128  # prompts that a server writes at a time


@dataclass(frozen=True)
class Request:
    """What the command asks of a source.

    Attributes:
        args: the command's flags.
        keep: decides which prompts are kept, and counts the others by reason.
        partial: a file for results of an interrupted run; deleted when the output is complete.
        settings: the flags that determine the prompts, except for their number.
        given: reads the images of rows. kept: takes those of kept prompts, beside the output.
    """

    args: argparse.Namespace
    keep: Filter
    partial: Path
    settings: Json
    given: PictureStore
    kept: PictureStore


@dataclass(frozen=True)
class Source:
    """A source of prompts.

    Attributes:
        prompts: checks the flags that it needs, then yields at most `args.count` kept prompts.
            Raises UserError.
        default_count: number of prompts without --count; None for all that there are.
    """

    prompts: Callable[[Request], Iterator[Json]]
    default_count: int | None = None


class PromptMessage(TypedDict):
    """A turn."""

    role: str
    content: str


class ChatPrompt(TypedDict):
    """A prompt of turns."""

    messages: Annotated[list[PromptMessage], Field(min_length=1)]


class TextPrompt(TypedDict):
    """A beginning to continue."""

    text: str


class WrittenPrompt(TypedDict):
    """A line of FILE.partial: the answer to a numbered request.

    It is a prompt, or the reason to drop it.
    """

    number: Annotated[int, Field(ge=0)]
    result: ChatPrompt | TextPrompt | str


def collect(
    rows: Iterable[Json],
    request: Request,
    source: str,
    total: int = 0,
) -> Iterator[Json]:
    """Yields the kept prompts of rows in any format of row_formats.py, at most `args.count`.

    A row with an image that cannot be used is dropped, and counted by the reason.

    Args:
        rows: a row's own "id" stays.
        source: name of the source, which every prompt carries.
        total: number of rows; 0 if unknown.

    Raises:
        UserError: an id that is neither text nor a number, or that two prompts have.
    """
    keep = request.keep
    count = request.args.count
    kept = 0
    ids = set[str]()
    with Progress("prompts", count, "prompts") as progress:
        for read, row in enumerate(rows, 1):
            prompt = None
            pictures: list[Picture] = []
            reason = "unknown format"
            unread = f"row {read} has {', '.join(map(str, row)) or 'no keys':.200}"
            try:
                prompt = parse_row(row)
                if prompt is not None and sources_in(prompt.get("messages", ())):
                    messages = read_images(prompt["messages"], request.given.read)
                    pictures = images_in(messages)
                    prompt = {**prompt, "messages": with_names(messages)}
            except BadPicture as bad:
                prompt = None
                reason = bad.reason
                unread = f"row {read}: {bad}"
            if prompt is None:
                keep.dropped[reason] += 1
                if not keep.unread:
                    keep.unread = unread
            elif keep.keeps(prompt):
                kept += 1
                for picture in pictures:
                    request.kept.add(picture)
                key = stable_id(prompt)
                if row.get("id") not in (None, ""):
                    key = row_id(row["id"], f"source={source}")
                if key in ids:
                    raise UserError(
                        f"source={source}: id={shown(key)} occurs twice; make ids unique, or drop them"
                    )
                ids.add(key)
                yield {"id": key, **prompt, "source": source}

            # Where rows are counted, reading them is the progress: few of them may be kept.
            share = 0.0
            if total:
                share = read / total
            progress.advance(kept - progress.done, f"{read} rows read", share)
            if kept == count:
                break


# -- files and data sets ---------------------------------------------------------------------------


def file_prompts(request: Request) -> Iterator[Json]:
    """Prompts of the JSONL file --input, in random order."""
    args = request.args
    if not args.input:
        raise UserError("source=file needs --input FILE.jsonl")
    check_row_file(args.input, "input", "give its folder as the data set: --source DIR")
    rows = RowFile(args.input, lambda row, _: row, line_starts(args.input))
    shuffled = rows.shuffled(args.seed)
    return collect(shuffled, request, args.input.name, len(rows))


def data_set_prompts(request: Request) -> Iterator[Json]:
    """Prompts of a data set of the Hub or in a local folder, whose id is the source's name."""
    args = request.args
    columns = parse_columns(args.columns)
    rows = data_set_rows(args, columns)
    return collect(rows, request, args.source)


def data_set_rows(args: argparse.Namespace, columns: dict[str, str]) -> Iterator[Json]:
    """Streams rows of a data set in seeded random order.

    Args:
        columns: our name -> the data set's; {} keeps all columns as they are.

    Raises:
        UserError: no such data set, subset or split, or a mapped column that it does not have.
    """
    from datasets import load_dataset

    name = args.source
    wanted = f"with a --subset and a --split of it ({args.subset}, {args.split})"
    fix = f"give magpie, file, a reachable Hub id or a local folder, {wanted}"
    # Where the Hub does not answer, its clients read their cache at once.
    if not Path(name).exists():
        hub_problem()
    with reading(name, "source", fix):
        # Streamed: a few prompts do not need all of a large data set.
        stream = load_dataset(name, args.subset, split=args.split, streaming=True).decode(False)
        rows = iter(stream.shuffle(seed=args.seed, buffer_size=_READ_AHEAD))
    while True:
        # Every row is read within it: a library may fail at any of them.
        with reading(name, "source", fix):
            row = next(rows, None)
        if row is None:
            return
        if not columns:
            yield row
            continue

        mapped = {}
        for ours, theirs in columns.items():
            if theirs not in row:
                raise UserError(
                    f"columns: {name} has no column {theirs!r}; it has {', '.join(row)}"
                )
            mapped[ours] = row[theirs]
        yield mapped


def parse_columns(text: str) -> dict[str, str]:
    """Reads `messages=conversations,system=system_prompt` as {our name: the data set's}.

    Raises UserError: another form.
    """
    columns = {}
    for part in text.split(","):
        if not part.strip():
            continue
        ours, _, theirs = part.partition("=")
        if not ours.strip() or not theirs.strip():
            raise UserError(
                f"columns={text!r} must read OURS=THEIRS,..., for example messages=conversations"
            )
        columns[ours.strip()] = theirs.strip()
    return columns


# -- easy-vqa: questions about drawn shapes ---------------------------------------------------------


def easy_vqa_prompts(request: Request) -> Iterator[Json]:
    """The questions of easy-vqa's training split, in random order, with its answers.

    The split `test` is the suite easy_vqa of `drafttrain eval`.
    """
    args = request.args
    if args.split != "train":
        raise UserError(
            f"split={args.split!r}: prompts of easy-vqa come from train; test is the suite easy_vqa"
        )
    rows = easy_vqa_rows("train")
    random.Random(args.seed).shuffle(rows)
    return collect(rows, request, args.source, len(rows))


def easy_vqa_rows(split: str) -> list[Json]:
    """The rows of the package easy-vqa: 64 x 64 pictures of a shape, with questions of one word's
    answer.

    Args:
        split: train (4,000 pictures, 38,575 questions) or test (1,000 and 9,673).

    Raises UserError: it is not installed.
    """
    try:
        package = importlib.import_module("easy_vqa")
    except ImportError as error:
        raise UserError(
            "easy-vqa needs the package easy-vqa (5,000 images, 23 MB): pip install easy-vqa"
        ) from error
    paths = getattr(package, f"get_{split}_image_paths")()
    rows = []
    for number, (question, answer, image) in enumerate(
        zip(*getattr(package, f"get_{split}_questions")(), strict=True)
    ):
        row = {"question": question, "answer": answer, "image": paths[image]}
        rows.append({"id": f"easy-vqa-{split}-{number}", **row})
    return rows


# -- magpie: the target writes the prompts ---------------------------------------------------------


def magpie_prompts(request: Request) -> Iterator[Json]:
    """Prompts that the target writes, here or on servers; see data/magpie.py."""
    from drafttrain.data.magpie import PromptWriter, load_openings
    from drafttrain.inference.responses import ResponseEngine, choose_slots
    from drafttrain.ops.sampling import SamplingParams
    from drafttrain.target import load_shell

    args = request.args
    if not args.target:
        raise UserError("source=magpie needs --target, the model that writes prompts")
    target: Target
    if args.url:
        target = load_shell(args.target, trust_remote_code=args.trust_remote_code)
    else:
        target = load_target(args)
    sampling = SamplingParams(args.temperature, 0, args.top_p)
    openings = load_openings(args.openings)
    writer = PromptWriter(
        target,
        openings,
        args.opening_share,
        args.max_prompt_tokens,
        args.seed,
    )

    answers: Callable[[int], Iterator[Finished]]
    if args.url:
        answers = partial(served_answers, request, target, writer, sampling)
    else:
        slots = args.slots
        if slots == "auto":
            slots = choose_slots(target, writer.max_length)
        engine = ResponseEngine(target, slots=slots, max_length=writer.max_length)

        def answers(start: int) -> Iterator[Finished]:
            return engine.run(writer.requests(start), sampling, args.seed)

    results = JsonlLog(request.partial, request.settings, WrittenPrompt, args.overwrite)
    with contextlib.closing(results) as log:
        kept = write_prompts(
            writer,
            answers,
            log,
            request.keep,
            args.count,
            args.max_minutes,
            args.seed,
        )
    return map(json.loads, kept)


def write_prompts(
    writer: PromptWriter,
    answers: Callable[[int], Iterator[Finished]],
    log: JsonlLog,
    keep: Filter,
    count: int,
    minutes: float | None,
    seed: int,
) -> list[bytes]:
    """Collects prompts that the target writes until `count` are kept or time is up.

    Args:
        writer: turns an answer into a prompt.
        answers: the target's answers to the writer's requests from the given number on.
        log: gets every result. Results of an earlier run in it count too.

    Returns:
        The kept prompts as JSON, which takes a fifth of the objects' memory, in random order by the
        seed: in order of completion, short ones would come first.
    """
    kept: list[bytes] = []

    def take(result: Prompt | str) -> None:
        if isinstance(result, str):  # the reason to drop it
            keep.dropped[result] += 1
        elif keep.keeps(result):
            prompt = {"id": stable_id(result), **result, "source": "magpie"}
            kept.append(json.dumps(prompt).encode())

    start = 0
    for row in log.rows:
        take(row["result"])
        start = max(start, row["number"] + 1)  # go on behind the last answer
    log.rows.clear()  # the file holds them

    until = float("inf")
    if minutes:
        until = time.monotonic() + 60 * minutes
    with Progress("prompts written by the target", count, "prompts") as progress:
        progress.start_at(len(kept))
        if len(kept) < count:
            for finished in answers(start):
                result = writer.prompt(finished)
                log.add({"number": int(finished.key), "result": result})
                log.rows.clear()

                before = len(kept)
                take(result)
                spent = 0.0
                if minutes:
                    spent = 1 - (until - time.monotonic()) / (60 * minutes)
                progress.advance(len(kept) - before, share=min(spent, 1.0))
                if len(kept) >= count or time.monotonic() > until:
                    break
    if minutes and len(kept) < count and time.monotonic() > until:
        print(f"--max-minutes {minutes:g} are over: {len(kept)} of {count} prompts")
    random.Random(seed).shuffle(kept)
    return kept[:count]


def served_answers(
    request: Request,
    target: Target,
    writer: PromptWriter,
    sampling: SamplingParams,
    start: int,
) -> Iterator[Finished]:
    """Answers of the servers of --url to the writer's requests from number `start` on.

    Failed requests are counted as dropped, by reason.

    Raises:
        UserError: a server that does not exchange token ids, so that it cannot continue an open
            turn.
    """
    from drafttrain.data.backends import OpenAIBackend, ResponseSettings
    from drafttrain.data.conversation import ChatRenderer, Conversation
    from drafttrain.inference.responses import Finished, tokens_of

    args = request.args
    renderer = ChatRenderer(target)
    # The turn is the user's, so its end stops the answer.
    renderer.stop_ids = set(writer.stop_ids)
    settings = ResponseSettings(
        renderer,
        sampling,
        writer.max_tokens,
        writer.max_length,
        args.seed,
    )
    slots = args.slots
    if slots == "auto":
        slots = _SERVED
    backend = OpenAIBackend(args.url, "", settings, slots)
    if not backend.by_ids:
        raise UserError(
            f"url={', '.join(args.url)}: source=magpie needs servers that exchange token ids, such as vLLM; see the line above"
        )
    limits = dict[str, int]()  # tokens of the answers in flight

    def conversations() -> Iterator[Conversation]:
        for asked in writer.requests(start):
            limits[asked.key] = asked.max_new_tokens
            yield Conversation(asked.key, "magpie", tokens=tokens_of(asked))

    for it, problem in backend.run(conversations(), lambda: False):
        limit = limits.pop(it.id)
        if isinstance(problem, BadReply):
            request.keep.dropped[f"failed request: {problem.reason}"] += 1
            continue
        begin = it.spans[0][0]
        # Servers may answer beyond the limit of a request.
        yield Finished(it.id, it.tokens[begin : begin + limit], it.finish[0], it.tokens)


DATA_SET = Source(data_set_prompts)  # for every name that SOURCES does not have
SOURCES = {
    "file": Source(file_prompts),
    "easy-vqa": Source(easy_vqa_prompts),
    "magpie": Source(magpie_prompts, default_count=1000),
}
