"""`drafttrain ngram-store`: builds the file that the drafter `suffix:FILE` reads."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import ChatInputs, render_text, text_ids
from drafttrain.data.row_formats import are_messages, checked_messages
from drafttrain.data.store import load_records, read_meta
from drafttrain.drafters.common.ngram_table import NgramTable
from drafttrain.drafters.suffix.model import SuffixDrafter
from drafttrain.errors import UserError
from drafttrain.files import read_jsonl, reading, replacing, writing
from drafttrain.flags import load_tokenizer
from drafttrain.folders import STORE, inputs_of, output_file
from drafttrain.outcome import conclude, next_command
from drafttrain.target import tokenizer_fingerprint


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises UserError: not exactly one corpus, text without a target, or an unreadable or empty corpus.
    """
    if (args.data is None) == (args.text is None):
        raise UserError("give either --data DIR or --text FILE")
    output = output_file(args.output, STORE, inputs_of(args))
    corpus = args.text if args.data is None else args.data
    if args.data is not None:
        tokenizer = read_meta(args.data)["target"]["tokenizer"]
        documents = responses(args.data, args.max_n)
    elif args.target is None:
        raise UserError(f"text={args.text!r} needs --target, whose tokenizer splits it")
    else:
        reader = load_tokenizer(args.target)
        tokenizer = tokenizer_fingerprint(reader)
        documents = texts(Path(args.text).expanduser(), reader)
    table = NgramTable.build(documents, args.max_n, args.max_entries)
    if not len(table.tokens):
        raise UserError(f"the corpus {corpus!r} has no two tokens in a row; give one with text")
    with writing(output), replacing(output) as part:
        table.save(part, tokenizer)
    size = output.stat().st_size / 1e6
    counts = {
        "contexts": len(table.hashes),
        "continuations": len(table.tokens),
        "megabytes": round(size, 1),
    }
    print(", ".join(f"{value:,} {name}" for name, value in counts.items()))
    target = args.target
    if not target:
        target = read_meta(args.data)["target"]["name"]
    drafter = f"{SuffixDrafter.kind}:{output}"
    conclude(counts, [output], next_command("eval", target=target, drafter=drafter))
    return 0


def responses(directory: str, max_n: int) -> Iterator[list[int]]:
    """The responses of a data set, each with the max_n tokens before it."""
    for record in load_records(directory, images=True):
        for start, end in record["spans"]:
            yield record["tokens"][max(0, start - max_n) : end]


def texts(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Token ids of the documents in a file.

    Raises UserError: it cannot be read, or a row without text or messages.
    """
    if path.suffix == ".jsonl":
        for number, row in read_jsonl(path):
            if row.get("messages") and are_messages(row["messages"]):
                messages = checked_messages(row, f"{path} line {number}")
                text = render_text(tokenizer, messages, inputs=ChatInputs.of(row))
                yield text_ids(tokenizer, text)
            elif isinstance(row.get("text"), str) and not row.get("messages"):
                yield tokenizer(row["text"]).input_ids
            else:
                raise UserError(
                    f"{path} line {number}: no text and no messages; each line needs one of them"
                )
        return
    with (
        reading(path, "text", "give a text file or JSON lines"),
        path.open(encoding="utf-8-sig") as file,
    ):
        for line in file:
            yield tokenizer(line).input_ids
