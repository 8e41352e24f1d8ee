"""`drafttrain prompts`: collects prompts from a source, filters them, and counts the dropped ones."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.table import Table
from typing_extensions import TypedDict

from drafttrain.data.filters import EvaluationImage, Filter, PromptLimits
from drafttrain.data.image_parts import sources_in
from drafttrain.data.row_formats import parse_row, prompt_texts
from drafttrain.data.sources import DATA_SET, SOURCES, Request
from drafttrain.environment import suites_folder
from drafttrain.errors import UserError
from drafttrain.files import Json, differences, read_json, read_jsonl, write_json, write_jsonl
from drafttrain.flags import load_tokenizer
from drafttrain.folders import inputs_of, output_file
from drafttrain.images import PictureStore
from drafttrain.outcome import conclude, next_command
from drafttrain.progress import plain_console

_SUMMARY_FIX = "delete it and give --overwrite, or give another --output"
# The flags that determine the result, without output place and speed.
_SETTINGS = (
    "source",
    "count",
    "input",
    "subset",
    "split",
    "columns",
    "images",
    "target",
    "temperature",
    "top_p",
    "openings",
    "opening_share",
    "max_prompt_tokens",
    "min_chars",
    "max_chars",
    "min_tokens",
    "max_tokens",
    "exclude",
    "exclude_suites",
    "ngram",
    "seed",
)


class PromptSummary(TypedDict):
    """FILE.summary.json."""

    settings: Json


def run(args: argparse.Namespace) -> int:
    """Collects the prompts and prints how many were dropped.

    Raises UserError: flags that contradict each other, a source that cannot be read, no prompt
    left, or an output made with other settings.
    """
    if args.input is not None:
        args.input = Path(args.input)
    if args.images is not None:
        args.images = Path(args.images).expanduser()
    args.exclude = [Path(name) for name in args.exclude]
    source = SOURCES.get(args.source, DATA_SET)
    if args.count is None:
        args.count = source.default_count
    _check(args)
    args.output = output_file(args.output, "prompts", inputs_of(args))
    summary = args.output.with_name(args.output.name + ".summary.json")
    output_file(summary, "prompts summary")
    settings = _settings(args)
    replaces = args.output.exists()
    if replaces and not args.overwrite:
        _check_existing(args.output, summary, settings)
        print(f"{args.output} is there already, made with the same settings; left as it is")
        conclude({**read_json(summary, "summary", _SUMMARY_FIX)}, then=_then(args))
        return 0

    keep = _filter(args)
    partial = args.output.with_name(args.output.name + ".partial")
    # A run with another --count continues the results so far.
    lasting = {key: value for key, value in settings.items() if key != "count"}
    beside = args.input.parent if args.input is not None else Path(args.source)
    given = PictureStore(args.images or beside, args.allow_urls)
    kept = PictureStore(args.output.parent)
    rows = source.prompts(Request(args, keep, partial, lasting, given, kept))
    counts: Json = {}

    def kept_rows() -> Iterator[Json]:
        kept = 0
        for row in rows:
            kept += 1
            yield row
        if not kept:
            raise UserError(
                f"source={args.source}: no prompt is left ({_reasons(keep)}); check the format and the limits"
            )
        counts["read"] = kept + sum(keep.dropped.values())
        counts["kept"] = kept
        counts["dropped"] = dict(keep.dropped.most_common())
        # A run that is killed between the two leaves no prompts with the summary of other settings.
        if not replaces:
            write_json(summary, {"settings": settings, **counts})

    # The rows stream to the output, so their number is known behind the last one only.
    write_jsonl(args.output, kept_rows())
    if replaces:
        write_json(summary, {"settings": settings, **counts})
    partial.unlink(missing_ok=True)
    _print_counts(counts)
    conclude(counts, [args.output], _then(args))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises UserError: flags that contradict each other."""
    if args.url and args.source != "magpie":
        raise UserError("url is for source=magpie, whose prompts the target writes; drop --url")
    if args.url and (args.dtype != "auto" or args.device != "auto"):
        raise UserError(
            "dtype and device are for a target that runs here, and with --url it does not; drop them"
        )
    if (args.min_tokens or args.max_tokens) and not args.target:
        raise UserError(
            "min_tokens and max_tokens need --target, whose tokenizer counts; or use --min-chars, --max-chars"
        )
    if args.max_prompt_tokens < 8:
        raise UserError(f"max_prompt_tokens={args.max_prompt_tokens} must be at least 8")
    if 0 < args.max_chars < args.min_chars:
        raise UserError(f"max_chars={args.max_chars} is below min_chars={args.min_chars}")


def _settings(args: argparse.Namespace) -> Json:
    """The flags that determine the result, as JSON."""
    given = {name: getattr(args, name) for name in _SETTINGS}
    if args.images is None:  # as before there were images
        del given["images"]
    settings: Json = json.loads(json.dumps(given, default=str))
    return settings


def _check_existing(output: Path, summary: Path, settings: Json) -> None:
    """Raises UserError: the output was made with other settings."""
    before: Json = {}
    if summary.exists():
        before = read_json(summary, "summary", _SUMMARY_FIX, PromptSummary)["settings"]
    if before == settings:
        return
    what = "unknown settings (it is empty)"
    if before:
        what = differences(before, settings)
    raise UserError(f"{output} was made with {what}; give --overwrite, or another --output")


def _filter(args: argparse.Namespace) -> Filter:
    limits = PromptLimits(args.min_chars, args.max_chars, args.min_tokens, args.max_tokens)
    texts = list(evaluation_texts(args.exclude, args.exclude_suites))
    tokenizer = None
    if args.target:
        tokenizer = load_tokenizer(args.target, args.trust_remote_code)
    return Filter(limits, texts, args.ngram, tokenizer)


def evaluation_texts(files: Iterable[Path], own_suites: bool) -> Iterator[str]:
    """The prompts of evaluation files, or their images, and drafttrain's own suites if `own_suites`.

    Raises UserError: a file that cannot be read, or holds no prompt in a known format.
    """
    paths = list(files)
    if own_suites:
        paths += sorted(suites_folder().glob("*.jsonl"))
    for path in paths:
        found = False
        for _, row in read_jsonl(path):
            prompt = parse_row(row)
            if prompt is None:
                continue
            found = True
            pictures = sources_in(prompt.get("messages", ()))
            # Questions about images are alike; what must not be learned is the image.
            if not pictures:
                yield from prompt_texts(prompt)
            for source in pictures:
                yield EvaluationImage(PictureStore(path.parent).named(source))
        if not found:
            raise UserError(
                f"exclude={path}: no row in a known format (see drafttrain prompts --help)"
            )


def _reasons(keep: Filter) -> str:
    """The counts of dropped prompts in words."""
    if not keep.dropped:
        return "the source is empty"
    counts = ", ".join(f"{reason} {count}" for reason, count in keep.dropped.most_common())
    if keep.unread:
        return f"{counts}; {keep.unread}"
    return counts


def _print_counts(counts: Json) -> None:
    table = Table("", "prompts")
    table.columns[1].justify = "right"
    table.add_row("read", str(counts["read"]))
    for reason, count in counts["dropped"].items():
        table.add_row(f"dropped: {reason}", str(count), style="dim")
    table.add_row("kept", str(counts["kept"]), style="bold")
    plain_console().print(table)


def _then(args: argparse.Namespace) -> str:
    """The command that follows."""
    return next_command(
        "generate",
        carry=args,
        target=args.target or "TARGET",
        prompts=args.output,
        output=args.output.parent / "data",
    )
