"""`drafttrain push-data`: a distillation data set on the Hub with a data card."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from drafttrain.data.store import load_records, read_meta
from drafttrain.errors import UserError
from drafttrain.export.serving_recipes import public_name
from drafttrain.hub.card import front_matter, link, render
from drafttrain.hub.upload import check_private, check_repo, list_files, print_files, shorten, upload, write_clean_json

HELP = """Publish a distillation data set on the Hugging Face Hub with a data card.

  drafttrain push-data --data runs/data --repo user/name-data --prompt-licence "MIT (magpie, written by the target)" \\
      --dry-run --output runs/publish-data

The conversations go up as JSON lines that drafttrain and datasets read; stored target states stay here, they can be computed
again. --dry-run writes the folder and prints what would go up."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", required=True, help="folder written by drafttrain generate")
    add("--repo", required=True, help="user/name or organisation/name")
    add("--prompt-licence", required=True, help="licence of the prompts, in words: where they come from decides it")
    add(
        "--licence", default="", help="of the data set, as the Hub spells it, such as apache-2.0 (default: none stated)"
    )
    add("--private", action="store_true", help="make the repository private, if it is made now")
    add("--dry-run", action="store_true", help="write the folder, print what would go up, and stop")
    add("--output", help="folder to prepare it in (default: a temporary one; needed with --dry-run)")
    add("--tag", default="", help="of the new revision (default: the next of v1, v2, ...)")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    Raises:
        UserError: no data set there, something private in it, or a failed upload.
    """
    check_repo(args.repo)
    if args.dry_run and not args.output:
        raise UserError("dry-run leaves the prepared folder for you to look at; say where: --output DIR")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.output).expanduser() if args.output else Path(scratch) / "repository"
        prepare(args, folder)
        print_files(folder, args.repo, "dataset")
        if args.dry_run:
            print("dry run: nothing was uploaded")
            return 0
        print(upload(folder, args.repo, "dataset", args.private, "Update the data and its card", args.tag))
    return 0


def prepare(args: argparse.Namespace, folder: Path) -> None:
    """Writes what goes up: complete conversations once each, settings without local names, and the card.

    Raises:
        UserError: no data set, the folder holds other things, or something private would go up.
    """
    meta, records = read_meta(args.data), load_records(args.data)
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / "README.md").is_file() or not (folder / "meta.json").is_file():
            raise UserError(f"output={str(folder)!r} holds other files; choose an empty folder")
        shutil.rmtree(folder)
    target = public_name(meta["target"]["name"])
    sources: Counter[str] = Counter()
    counts = {"conversations": 0, "responses": 0, "response_tokens": 0, "truncated": 0}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "part-0000.jsonl").open("w", encoding="utf-8") as file:
            for record in records:
                record["source"] = shorten(record["source"])
                sources[record["source"] or "unnamed"] += 1
                counts["conversations"] += 1
                counts["responses"] += len(record["spans"])
                counts["response_tokens"] += sum(end - start for start, end in record["spans"])
                counts["truncated"] += record["finish"].count("length")
                file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
    except OSError as error:
        raise UserError(f"output={str(folder)!r} cannot be written ({error.strerror}); choose another place") from error
    identity = {**meta["target"], "name": target}
    write_clean_json(folder / "meta.json", {**meta, "target": identity, "features": None, "counts": counts})
    metadata = {
        "license": args.licence,
        "task_categories": ["text-generation"],
        "tags": ["speculative-decoding", "distillation", "drafttrain"],
        "configs": [{"config_name": "default", "data_files": "part-*.jsonl"}],
    }
    card = render(
        "data_card.md.jinja",
        metadata=front_matter(metadata),
        repo=args.repo,
        target=target,
        target_link=link(target),
        identity=identity,
        counts=counts,
        sources=sources.most_common(10),
        sampling=list(meta["sampling"].items()),
        backend=shorten(str(meta.get("backend", "local"))),
        prompt_licence=args.prompt_licence,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    check_private(folder, list_files(folder))
