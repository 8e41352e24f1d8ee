"""`drafttrain prompts`: collects prompts, filters them, and reports how many were dropped for which
reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from rich.table import Table
from typing_extensions import TypedDict

from drafttrain.data.failures import BadReply
from drafttrain.data.filters import Filter, PromptLimits, stable_id
from drafttrain.data.row_file import RowFile, line_starts
from drafttrain.data.row_formats import Prompt, parse_row, prompt_texts, row_id
from drafttrain.environment import suites_folder
from drafttrain.errors import UserError, shown
from drafttrain.files import (
    Json,
    JsonlLog,
    differences,
    read_json,
    read_jsonl,
    reading,
    write_json,
    write_jsonl,
)
from drafttrain.flags import load_target, load_tokenizer
from drafttrain.folders import inputs_of, output_file
from drafttrain.outcome import conclude, next_command
from drafttrain.progress import Progress, plain_console

if TYPE_CHECKING:
    from drafttrain.data.magpie import PromptWriter
    from drafttrain.inference.responses import Finished
    from drafttrain.ops.sampling import SamplingParams
    from drafttrain.target import Target


_SUMMARY_FIX = "delete it and give --overwrite, or give another --output"
_READ_AHEAD = 10_000  # rows of a streamed data set that are shuffled together


class PromptSummary(TypedDict):
    """FILE.summary.json."""

    settings: Json


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
    """A line of FILE.partial: the answer to a numbered request, as a prompt or the reason to drop
    it.
    """

    number: Annotated[int, Field(ge=0)]
    result: ChatPrompt | TextPrompt | str


def dataset_rows(
    name: str,
    subset: str | None,
    split: str,
    columns: dict[str, str],
    seed: int,
) -> Iterator[Json]:
    """Streams rows of a data set in seeded random order, with the mapped columns under our names.

    Raises UserError: no such data set, subset or split, or a mapped column that it does not have.
    """
    from datasets import load_dataset

    fix = f"give magpie, file, a reachable Hub id or a local folder, with a --subset and a --split of it ({subset}, {split})"
    with reading(name, "source", fix):
        rows = iter(
            load_dataset(name, subset, split=split, streaming=True).shuffle(
                seed=seed,
                buffer_size=_READ_AHEAD,
            )
        )
    while True:
        with reading(name, "source", fix):
            row = next(rows, None)
        if row is None:
            return
        missing = [theirs for theirs in columns.values() if theirs not in row]
        if missing:
            raise UserError(
                f"columns: {name} has no column {missing[0]!r}; it has {', '.join(row)}"
            )
        yield {ours: row[theirs] for ours, theirs in columns.items()} if columns else row


def parse_columns(text: str) -> dict[str, str]:
    """Reads `messages=conversations,system=system_prompt`: our name = the data set's. Raises
    UserError: another form.
    """
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not (ours.strip() and theirs.strip()) for ours, _, theirs in pairs):
        raise UserError(
            f"columns={text!r} must read OURS=THEIRS,..., for example messages=conversations"
        )
    return {ours.strip(): theirs.strip() for ours, _, theirs in pairs}


def evaluation_texts(files: Iterable[Path], own_suites: bool) -> Iterator[str]:
    """The prompts of evaluation files, and of drafttrain's own suites if `own_suites`.

    Raises UserError: a file that cannot be read, or holds no prompt in a known format.
    """
    for path in [*files, *(sorted(suites_folder().glob("*.jsonl")) if own_suites else ())]:
        prompts = [prompt for _, row in read_jsonl(path) if (prompt := parse_row(row))]
        if not prompts:
            raise UserError(
                f"exclude={path}: no row in a known format (see drafttrain prompts --help)"
            )
        for prompt in prompts:
            yield from prompt_texts(prompt)


def collect(
    rows: Iterable[Json],
    keep: Filter,
    count: int | None,
    source: str,
    total: int = 0,
) -> Iterator[Json]:
    """Prompts of existing rows, until there are `count`; a row's own id stays. total: number of
    rows; 0 if it is not known.

    Raises UserError: an id that is no text or number, or that two prompts have.
    """
    kept = 0
    ids = set[str]()
    with Progress("prompts", count, "prompts") as progress:
        for read, row in enumerate(rows, 1):
            prompt = parse_row(row)
            if prompt is None:
                keep.dropped["unknown format"] += 1
            elif keep.keeps(prompt):
                kept += 1
                given = row.get("id")
                if given in (None, ""):
                    key = stable_id(prompt)
                else:
                    key = row_id(given, f"source={source}")
                if key in ids:
                    raise UserError(
                        f"source={source}: id={shown(key)} occurs twice; make ids unique, or drop them"
                    )
                ids.add(key)
                yield {"id": key, **prompt, "source": source}
            progress.advance(
                kept - progress.done,
                f"{read} rows read",
                read / total if total else 0.0,
            )
            if kept == count:
                break


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
        log: gets every result, and holds those of an earlier run, which `keep` counts too.

    Returns:
        The kept prompts as JSON, which takes a fifth of the objects' memory. Their order is random,
        by the seed: in order of
        completion, short ones would come first.
    """
    kept: list[bytes] = []

    def take(result: Prompt | str) -> None:
        if isinstance(result, str):  # the reason to drop it
            keep.dropped[result] += 1
        elif keep.keeps(result):
            kept.append(
                json.dumps({"id": stable_id(result), **result, "source": "magpie"}).encode()
            )

    for row in log.rows:
        take(row["result"])
    start = max((row["number"] + 1 for row in log.rows), default=0)
    log.rows.clear()  # the file holds them
    if minutes:
        until = time.monotonic() + 60 * minutes
    else:
        until = float("inf")
    with Progress("prompts written by the target", count, "prompts") as progress:
        progress.start_at(len(kept))
        if len(kept) < count:
            for finished in answers(start):
                result = writer.prompt(finished)
                before = len(kept)
                log.add({"number": int(finished.key), "result": result})
                log.rows.clear()
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


def magpie_prompts(
    args: argparse.Namespace,
    keep: Filter,
    target: Target,
    log: Path,
    settings: Json,
) -> Iterator[Json]:
    """Runs the target, here or on servers, as the writer of prompts; `log` holds the results until
    all are written.
    """
    from drafttrain.data.magpie import PromptWriter, load_openings
    from drafttrain.inference.responses import ResponseEngine
    from drafttrain.ops.sampling import SamplingParams

    sampling = SamplingParams(args.temperature, 0, args.top_p)
    writer = PromptWriter(
        target,
        load_openings(args.openings),
        args.opening_share,
        args.max_prompt_tokens,
        args.seed,
    )
    if args.url:
        engine = None
    else:
        engine = ResponseEngine(target, slots=args.slots, max_length=writer.max_length)

    def answers(start: int) -> Iterator[Finished]:
        if engine is None:
            return served_answers(args, target, writer, sampling, start, keep.dropped)
        return engine.run(writer.requests(start), sampling, args.seed)

    with contextlib.closing(JsonlLog(log, settings, WrittenPrompt, args.overwrite)) as results:
        kept = write_prompts(
            writer,
            answers,
            results,
            keep,
            args.count,
            args.max_minutes,
            args.seed,
        )
    return map(json.loads, kept)


def served_answers(
    args: argparse.Namespace,
    target: Target,
    writer: PromptWriter,
    sampling: SamplingParams,
    start: int,
    dropped: Counter[str],
) -> Iterator[Finished]:
    """Answers of the servers of --url to the writer's requests from number `start` on. dropped:
    counts failed requests.

    Raises UserError: a server that does not exchange token ids, so that it cannot continue an open
    turn.
    """
    from drafttrain.data.backends import OpenAIBackend, ResponseSettings
    from drafttrain.data.conversation import ChatRenderer, Conversation
    from drafttrain.inference.responses import Finished

    renderer = ChatRenderer(target)
    renderer.stop_ids = set(writer.stop_ids)
    settings = ResponseSettings(renderer, sampling, writer.max_tokens, writer.max_length, args.seed)
    backend = OpenAIBackend(args.url, "", settings, args.slots)
    if not backend.by_ids:
        raise UserError(
            f"url={', '.join(args.url)}: source=magpie needs servers that exchange token ids, such as vLLM; see the line above"
        )
    limits = dict[str, int]()  # tokens of the answers in flight

    def conversations() -> Iterator[Conversation]:
        for request in writer.requests(start):
            limits[request.key] = request.max_new_tokens
            yield Conversation(request.key, "magpie", tokens=list(request.prompt_ids))

    for it, problem in backend.run(conversations(), lambda: False):
        limit = limits.pop(it.id)
        if isinstance(problem, BadReply):
            dropped[f"failed request: {problem.reason}"] += 1
            continue
        begin = it.spans[0][0]
        yield Finished(it.id, it.tokens[begin : begin + limit], it.finish[0], it.tokens)


def run(args: argparse.Namespace) -> int:
    if args.count is None and args.source == "magpie":
        args.count = 1000
    _check(args)
    args.output = output_file(args.output, "prompts", inputs_of(args))
    settings = _settings(args)
    partial, summary = (
        args.output.with_name(args.output.name + end) for end in (".partial", ".summary.json")
    )
    output_file(summary, "prompts summary")
    if (replaces := args.output.exists()) and not args.overwrite:
        if summary.exists():
            before = read_json(summary, "summary", _SUMMARY_FIX, PromptSummary)["settings"]
        else:
            before = {}
        if before != settings:
            what = "unknown settings (it is empty)"
            if before:
                what = differences(before, settings)
            raise UserError(
                f"{args.output} was made with {what}; give --overwrite, or another --output"
            )
        print(f"{args.output} is there already, made with the same settings; left as it is")
        conclude({**read_json(summary, "summary", _SUMMARY_FIX)}, then=_then(args))
        return 0
    keep, target = _filter(args)
    if target is not None:
        lasting = {key: value for key, value in settings.items() if key != "count"}
        rows = magpie_prompts(args, keep, target, partial, lasting)
    elif args.source == "file":
        found = RowFile(args.input, lambda row, _: row, line_starts(args.input))
        rows = collect(found.shuffled(args.seed), keep, args.count, args.input.name, len(found))
    else:
        stream = dataset_rows(
            args.source,
            args.subset,
            args.split,
            parse_columns(args.columns),
            args.seed,
        )
        rows = collect(stream, keep, args.count, args.source)
    counts: Json = {}

    def kept_rows() -> Iterator[Json]:
        kept = 0
        for kept, row in enumerate(rows, 1):  # noqa: B007 - counted
            yield row
        if not kept:
            reasons = ", ".join(f"{reason} {count}" for reason, count in keep.dropped.most_common())
            raise UserError(
                f"source={args.source}: no prompt is left ({reasons or 'the source is empty'}); check the format and the limits"
            )
        counts.update(
            {"read": kept + sum(keep.dropped.values()), "kept": kept, "dropped": dict(keep.dropped)}
        )
        # A run that is killed between the two leaves no prompts with the summary of other settings.
        if not replaces:
            write_json(summary, {"settings": settings, **counts})

    write_jsonl(args.output, kept_rows())
    if replaces:
        write_json(summary, {"settings": settings, **counts})
    partial.unlink(missing_ok=True)
    table = Table("", "prompts")
    table.columns[1].justify = "right"
    table.add_row("read", str(counts["read"]))
    for reason, count in keep.dropped.most_common():
        table.add_row(f"dropped: {reason}", str(count), style="dim")
    table.add_row("kept", str(counts["kept"]), style="bold")
    plain_console().print(table)
    conclude(counts, [args.output], _then(args))
    return 0


def _then(args: argparse.Namespace) -> str:
    place = args.output.parent / "data"
    return next_command(
        "generate",
        carry=args,
        target=args.target or "TARGET",
        prompts=args.output,
        output=place,
    )


def _check(args: argparse.Namespace) -> None:
    no_tokenizer = (args.min_tokens or args.max_tokens) and not args.target
    rules = [
        (
            args.source == "magpie" and not args.target,
            "source=magpie needs --target, the model that writes prompts",
        ),
        (
            args.url and args.source != "magpie",
            "url is for source=magpie, whose prompts the target writes; drop --url",
        ),
        (
            args.url and (args.dtype != "auto" or args.device != "auto"),
            "dtype and device are for a target that runs here, and with --url it does not; drop them",
        ),
        (args.source == "file" and not args.input, "source=file needs --input FILE.jsonl"),
        (
            no_tokenizer,
            "min_tokens and max_tokens need --target, whose tokenizer counts; or use --min-chars, --max-chars",
        ),
        (
            args.max_prompt_tokens < 8,
            f"max_prompt_tokens={args.max_prompt_tokens} must be at least 8",
        ),
        (
            0 < args.max_chars < args.min_chars,
            f"max_chars={args.max_chars} is below min_chars={args.min_chars}",
        ),
    ]
    for broken, message in rules:
        if broken:
            raise UserError(message)


def _settings(args: argparse.Namespace) -> Json:
    """The flags that determine the result, without output place and speed."""
    names = "source count input subset split columns target temperature top_p openings opening_share max_prompt_tokens "
    names += "min_chars max_chars min_tokens max_tokens exclude exclude_suites ngram seed"
    return json.loads(
        json.dumps({name: getattr(args, name) for name in names.split()}, default=str)
    )


def _filter(args: argparse.Namespace) -> tuple[Filter, Target | None]:
    """The filter; and the target for magpie. Other sources need its tokenizer only."""
    limits = PromptLimits(args.min_chars, args.max_chars, args.min_tokens, args.max_tokens)
    texts = list(evaluation_texts(args.exclude, args.exclude_suites))
    if args.source == "magpie":
        from drafttrain.target import load_shell

        target = (
            load_shell(args.target, trust_remote_code=args.trust_remote_code)
            if args.url
            else load_target(args)
        )
        return Filter(limits, texts, args.ngram, target.tokenizer), target
    if args.target:
        tokenizer = load_tokenizer(args.target, args.trust_remote_code)
    else:
        tokenizer = None
    return Filter(limits, texts, args.ngram, tokenizer), None
