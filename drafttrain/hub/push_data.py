"""`drafttrain push-data`: publishes a distillation data set on the Hub with a data card."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from drafttrain.data.record_cache import StoredIds
from drafttrain.data.store import load_records, read_meta
from drafttrain.files import writing
from drafttrain.formats.public_names import public_name, shorten, write_clean_json
from drafttrain.hub.upload import publish, write_card
from drafttrain.images import PictureStore


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    return publish(
        args,
        "push-data",
        "dataset",
        "Update the data and its card",
        lambda folder: prepare(args, folder),
    )


def prepare(args: argparse.Namespace, folder: Path) -> None:
    """Writes complete conversations once each, settings without local names, and the card.

    Raises:
        UserError: no data set, or the folder cannot be written.
    """
    meta = read_meta(args.data)
    records = load_records(args.data, images=True)
    target = public_name(meta["target"]["name"])
    sources: Counter[str] = Counter()
    part = folder / "part-0000.jsonl"
    pictures = PictureStore(Path(args.data).expanduser())
    published = PictureStore(folder)
    stored = StoredIds()
    with writing(folder):
        with part.open("w", encoding="utf-8") as file:
            for record in records:
                record["source"] = shorten(record["source"])
                sources[record["source"] or "unnamed"] += 1
                for name in record["images"] or ():
                    published.add(pictures.get(name))
                line = {key: value for key, value in record.items() if value is not None}
                file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
        stored.update([part])
    counts = stored.counts
    identity = {**meta["target"], "name": target}
    write_clean_json(
        folder / "meta.json", {**meta, "target": identity, "features": None, "counts": counts}
    )
    metadata = {
        "license": args.license,
        "task_categories": ["text-generation"],
        "tags": ["speculative-decoding", "distillation", "drafttrain"],
        "configs": [{"config_name": "default", "data_files": "part-*.jsonl"}],
    }
    write_card(
        folder,
        "data_card.md.jinja",
        metadata,
        repo=args.repo,
        target=target,
        identity=identity,
        counts=counts,
        sources=sources.most_common(10),
        sampling=list(meta.get("sampling", {}).items()),
        backend=shorten(str(meta.get("backend", "local"))),
        prompt_license=args.prompt_license,
    )
