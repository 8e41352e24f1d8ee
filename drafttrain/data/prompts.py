"""`drafttrain prompts`: collects prompts, drops what should not be trained on, and says what was dropped and why."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from drafttrain.data.filters import Filter, Limits, stable_id
from drafttrain.data.formats import Prompt, parse_row, prompt_texts
from drafttrain.errors import UserError
from drafttrain.files import read_jsonl, suites_folder, write_json, write_jsonl
from drafttrain.progress import Progress

HELP = """Collect prompts for the target to answer, one JSON object per line: {"id", "messages" or "text", "source"}.

  drafttrain prompts --source magpie --target smollm2-135m --count 2000 --output prompts.jsonl
  drafttrain prompts --source file --input chats.jsonl --output prompts.jsonl
  drafttrain prompts --source HuggingFaceH4/ultrachat_200k --split train_sft --count 50000 --output prompts.jsonl

magpie   the target writes the user turns itself, from its chat template's opening (no template: free-running text)
file     JSONL: FastChat turns, ShareGPT conversations, OpenAI messages, prompt or instruction (+ input), plain text
ID       a data set of the Hub, or a local folder of one; --columns tells where its columns differ from the above

Prompts are shuffled by --seed, filtered by length, freed of duplicates, and dropped when they share --ngram words in a
row with a file of --exclude or with the evaluation suites that come with drafttrain. magpie goes on where it was
interrupted; a finished file is left alone."""

_READ_AHEAD = 10_000  # rows of a streamed data set that are shuffled at a time


# -- sources --------------------------------------------------------------------------------------------------------


def file_rows(path: Path, seed: int) -> list[dict[str, Any]]:
    """All rows of a JSONL file in seeded random order."""
    rows = [row for _, row in read_jsonl(path)]
    random.Random(seed).shuffle(rows)
    return rows


def dataset_rows(
    name: str, subset: str | None, split: str, columns: dict[str, str], seed: int
) -> Iterator[dict[str, Any]]:
    """Rows of a data set in seeded random order, streamed, with the mapped columns under our names.

    Raises:
        UserError: no such data set, subset or split, or a mapped column that it does not have.
    """
    from datasets import load_dataset

    try:
        stream = load_dataset(name, subset, split=split, streaming=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"source={name!r} (subset {subset}, split {split}) cannot be loaded: {reason}; give magpie, file, a "
            "reachable Hub id, or a local folder, and a --split that exists"
        ) from error
    for row in stream.shuffle(seed=seed, buffer_size=_READ_AHEAD):
        missing = [theirs for theirs in columns.values() if theirs not in row]
        if missing:
            raise UserError(f"columns: {name} has no column {missing[0]!r}; it has {', '.join(row)}")
        yield {ours: row[theirs] for ours, theirs in columns.items()} if columns else row


def parse_columns(text: str) -> dict[str, str]:
    """Reads `messages=conversations,system=system_prompt`: our name = the data set's.

    Raises:
        UserError: another form.
    """
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not (ours.strip() and theirs.strip()) for ours, _, theirs in pairs):
        raise UserError(f"columns={text!r} must read OURS=THEIRS,..., for example messages=conversations")
    return {ours.strip(): theirs.strip() for ours, _, theirs in pairs}


def evaluation_texts(files: Iterable[Path], own_suites: bool) -> Iterator[str]:
    """What the evaluation files ask; our own suites included unless told otherwise.

    Raises:
        UserError: a file that cannot be read, or holds no prompt in a known format.
    """
    paths = list(files) + (sorted(suites_folder().glob("*.jsonl")) if own_suites else [])
    for path in paths:
        prompts = [prompt for _, row in read_jsonl(path) if (prompt := parse_row(row))]
        if not prompts:
            raise UserError(f"exclude={path}: no row in a known format (see drafttrain prompts --help)")
        for prompt in prompts:
            yield from prompt_texts(prompt)


# -- collecting -----------------------------------------------------------------------------------------------------


def collect(rows: Iterable[dict[str, Any]], keep: Filter, count: int | None, source: str) -> list[dict[str, Any]]:
    """Prompts of existing rows, until there are `count`."""
    kept: list[dict[str, Any]] = []
    with Progress("prompts", count, "prompts") as progress:
        for row in rows:
            prompt = parse_row(row)
            if prompt is None:
                keep.dropped["unknown format"] += 1
            elif keep.keeps(prompt):
                kept.append({"id": stable_id(prompt), **prompt, "source": source})
                progress.advance()
                if len(kept) == count:
                    break
    return kept


class Partial:
    """The growing file of a magpie run: its settings, then what became of each request, a line each.

    A line that was being written when the run was killed is dropped.

    Raises:
        UserError: begun with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        self.lines: list[dict[str, Any]] = []
        whole = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                self.lines.append(json.loads(line))
        if self.lines and self.lines[0] != settings:
            raise UserError(
                f"{path} was begun with {_difference(self.lines[0], settings)}; use those, or give --overwrite"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab")
        self.file.truncate(whole)
        if not self.lines:
            self.add(settings)

    @property
    def results(self) -> list[dict[str, Any]]:
        return self.lines[1:]

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self.file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def write_prompts(
    writer: Any,
    engine: Any,
    sampling: Any,
    partial: Partial,
    keep: Filter,
    count: int,
    minutes: float | None,
    seed: int,
) -> list[dict[str, Any]]:
    """Lets the target write prompts until `count` are kept or time is up.

    Args:
        writer: a magpie.Writer; engine, sampling: see data/slots.py.
        partial: takes every result, and holds those of an earlier run.
        keep: counts what is dropped, earlier results included.

    Returns:
        The kept prompts in seeded random order: in order of completion the short ones would come first.
    """
    kept: list[dict[str, Any]] = []
    start = 0

    def take(number: int, result: Prompt | str) -> None:
        if isinstance(result, str):
            keep.dropped[result] += 1
        elif keep.keeps(result):
            kept.append({"id": stable_id(result), **result, "source": "magpie"})

    for line in partial.results:
        take(line["number"], line["result"])
        start = max(start, line["number"] + 1)
    until = time.monotonic() + 60 * minutes if minutes else float("inf")
    with Progress("prompts written by the target", count, "prompts") as progress:
        progress.start_at(len(kept))
        if len(kept) < count:
            for finished in engine.run(writer.requests(start), sampling, seed):
                result = writer.prompt(finished)
                number, before = int(finished.key), len(kept)
                partial.add({"number": number, "result": result})
                take(number, result)
                progress.advance(len(kept) - before)
                if len(kept) >= count or time.monotonic() > until:
                    break
    partial.close()
    random.Random(seed).shuffle(kept)
    return kept[:count]


def magpie_prompts(
    args: argparse.Namespace, keep: Filter, target: Any, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Sets the engine up and runs it."""
    from drafttrain.data.magpie import Writer, load_openings
    from drafttrain.inference.responses import ResponseEngine
    from drafttrain.ops.sampling import SamplingParams

    sampling = SamplingParams(args.temperature, 0, args.top_p)
    writer = Writer(target, load_openings(args.openings), args.opening_share, args.max_prompt_tokens, args.seed)
    partial = Partial(_partial_path(args.output), settings)
    engine = ResponseEngine(target, slots=args.slots, max_length=writer.max_length)
    return write_prompts(writer, engine, sampling, partial, keep, args.count, args.max_minutes, args.seed)


# -- command --------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--source", required=True, help="magpie, file, or a data set id")
    add("--output", required=True, type=Path, help="JSONL file to write; FILE.summary.json beside it holds the counts")
    add("--count", type=int, help="prompts wanted (default: 1000 for magpie, else all there are)")
    add("--input", type=Path, help="for file: the JSONL file")
    add("--subset", help="for a data set: its configuration")
    add("--split", default="train", help="for a data set (default: train)")
    add(
        "--columns",
        default="",
        help="for a data set: our names = its names, as in messages=conversations,system=preamble",
    )
    add("--target", help="for magpie: who writes; also counts tokens for --min-tokens and --max-tokens")
    add("--dtype", default="auto", help="for magpie: float32, bfloat16 or auto")
    add("--device", default="auto", help="for magpie: cpu, cuda or auto")
    add("--trust-remote-code", action="store_true", help="run model code that comes with the target")
    add("--temperature", type=float, default=0.8, help="for magpie; large models stay sensible at 1.0 (default: 0.8)")
    add("--top-p", type=float, default=1.0, help="for magpie; below 1 is slow on a CPU (default: 1.0)")
    add("--openings", default="builtin", help="for magpie: builtin, none, or a file with one beginning per line")
    add("--opening-share", type=float, default=0.5, help="share of prompts that get an opening (default: 0.5)")
    add("--max-prompt-tokens", type=int, default=256, help="for magpie: longer prompts are dropped (default: 256)")
    add("--slots", type=int, default=128, help="for magpie: sequences that run at a time (default: 128)")
    add("--max-minutes", type=float, help="for magpie: stop after this time with what there is")
    add("--min-chars", type=int, default=10, help="(default: 10)")
    add("--max-chars", type=int, default=8000, help="0: no limit (default: 8000)")
    add("--min-tokens", type=int, default=0, help="needs --target")
    add("--max-tokens", type=int, default=0, help="needs --target")
    add("--exclude", nargs="+", type=Path, default=[], metavar="FILE", help="evaluation files to keep clear of")
    add(
        "--exclude-suites",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep clear of drafttrain's own suites",
    )
    add("--ngram", type=int, default=8, help="shared words in a row that count as overlap (default: 8)")
    add("--seed", type=int, default=0)
    add("--overwrite", action="store_true", help="begin afresh, whatever is there")


def run(args: argparse.Namespace) -> int:
    args.count = 1000 if args.count is None and args.source == "magpie" else args.count
    _check(args)
    settings = _settings(args)
    partial, summary = _partial_path(args.output), args.output.with_name(args.output.name + ".summary.json")
    if args.overwrite:
        for path in (args.output, summary, partial):
            path.unlink(missing_ok=True)
    if args.output.exists():
        before = json.loads(summary.read_text())["settings"] if summary.exists() else {}
        if before != settings:
            what = _difference(before, settings) if before else "settings that are not known any more"
            raise UserError(f"{args.output} was made with {what}; give --overwrite, or another --output")
        print(f"{args.output} is there already, made with the same settings; left as it is")
        return 0
    keep, target = _filter(args)
    if args.source == "magpie":
        lasting = {key: value for key, value in settings.items() if key != "count"}
        rows = magpie_prompts(args, keep, target, lasting)
    elif args.source == "file":
        rows = collect(file_rows(args.input, args.seed), keep, args.count, args.input.name)
    else:
        columns = parse_columns(args.columns)
        found = dataset_rows(args.source, args.subset, args.split, columns, args.seed)
        rows = collect(found, keep, args.count, args.source)
    if not rows:
        reasons = (
            ", ".join(f"{reason} {count}" for reason, count in keep.dropped.most_common()) or "the source is empty"
        )
        raise UserError(f"source={args.source}: no prompt is left ({reasons}); check the format and the limits")
    counts = {"read": len(rows) + sum(keep.dropped.values()), "kept": len(rows), "dropped": dict(keep.dropped)}
    write_json(summary, {"settings": settings, **counts})
    write_jsonl(args.output, rows)
    partial.unlink(missing_ok=True)
    _print_summary(args.output, len(rows), keep.dropped)
    return 0


def _check(args: argparse.Namespace) -> None:
    rules = [
        (
            args.source == "magpie" and not args.target,
            "source=magpie needs --target: the model that writes the prompts",
        ),
        (args.source == "file" and not args.input, "source=file needs --input FILE.jsonl"),
        (
            (args.min_tokens or args.max_tokens) and not args.target,
            "min_tokens and max_tokens need --target, whose tokenizer counts them; or use --min-chars and --max-chars",
        ),
        (args.count is not None and args.count < 1, f"count={args.count} must be at least 1"),
        (args.ngram < 1, f"ngram={args.ngram} must be at least 1 word"),
        (not 0 <= args.opening_share <= 1, f"opening_share={args.opening_share} must be between 0 and 1"),
        (args.slots < 1, f"slots={args.slots} must be at least 1"),
        (args.max_prompt_tokens < 8, f"max_prompt_tokens={args.max_prompt_tokens} must be at least 8"),
        (0 < args.max_chars < args.min_chars, f"max_chars={args.max_chars} is below min_chars={args.min_chars}"),
    ]
    for broken, message in rules:
        if broken:
            raise UserError(message)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What decides the result; not where it goes, nor how fast it is made."""
    names = "source count input subset split columns target temperature top_p openings opening_share max_prompt_tokens "
    names += "min_chars max_chars min_tokens max_tokens exclude exclude_suites ngram seed"
    return json.loads(json.dumps({name: getattr(args, name) for name in names.split()}, default=str))


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    return ", ".join(f"{key}={before.get(key)!r}" for key in {**before, **now} if before.get(key) != now.get(key))


def _filter(args: argparse.Namespace) -> tuple[Filter, Any]:
    """The filter, and the target where magpie needs one (else its tokenizer is enough)."""
    limits = Limits(args.min_chars, args.max_chars, args.min_tokens, args.max_tokens)
    texts = list(evaluation_texts(args.exclude, args.exclude_suites))
    if not args.target:
        return Filter(limits, texts, args.ngram), None
    if args.source != "magpie":
        return Filter(limits, texts, args.ngram, _load_tokenizer(args.target, args.trust_remote_code)), None
    from drafttrain.target import Target

    target = Target.load(args.target, args.dtype, args.device, args.trust_remote_code)
    return Filter(limits, texts, args.ngram, target.tokenizer), target


def _load_tokenizer(target: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    from drafttrain.target import resolve_target

    try:
        return AutoTokenizer.from_pretrained(resolve_target(target), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"target={target!r} has no tokenizer that loads ({reason}); give a folder or Hub id") from error


def _partial_path(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def _print_summary(output: Path, kept: int, dropped: Counter[str]) -> None:
    table = Table("", "prompts")
    table.columns[1].justify = "right"
    table.add_row("read", str(kept + sum(dropped.values())))
    for reason, count in dropped.most_common():
        table.add_row(f"dropped: {reason}", str(count), style="dim")
    table.add_row("kept", str(kept), style="bold")
    Console(file=sys.stdout).print(table)
    print(output)
