"""Result files: reading them, and the partial file that lets an interrupted evaluation continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from drafttrain.errors import UserError
from drafttrain.evaluation.metrics import Record
from drafttrain.files import Json, JsonlLog, read_jsonl


def fingerprint(settings: Mapping[str, object]) -> str:
    """Hashes everything that a record depends on."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def folder_state(name: str) -> list[tuple[str, int, int]]:
    """Name, size and modification time of a model folder's files; tells a retrained model from the earlier one."""
    folder = Path(name).expanduser()
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def training_record(drafter: str) -> Json:
    """The training.json in a drafter's folder; empty without one."""
    path = Path(drafter.partition("+")[0]).expanduser() / "training.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def is_sweep(content: object) -> bool:
    """Whether the content of a JSON file has the form of a sweep's summary."""
    return isinstance(content, dict) and isinstance(content.get("cells"), list) and bool(content["cells"])


def load_results(name: str) -> Json:
    """Reads a results file, or the summary of a sweep.

    Raises:
        UserError: a file that is missing, is not JSON, or was not written by drafttrain eval.
    """
    try:
        results = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"results={name!r} cannot be read ({error}); give a file that drafttrain eval wrote") from error
    if is_sweep(results) or (isinstance(results, dict) and {"overall", "categories", "decoding"} <= results.keys()):
        return results
    raise UserError(f"results={name!r} is not a results file (no overall figures); give one that drafttrain eval wrote")


class PartialResults:
    """`<output>.partial.jsonl`: a first line with the hash of the settings, then one line per finished question.

    A file of other settings is replaced.

    Attributes:
        tree: the result of the tree search, {"tree", "tree_search"}; None before the search.
        records: the records of finished questions, by question key.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, output: Path, key: str):
        path, settings = output.with_name(output.name + ".partial.jsonl"), {"settings": key}
        try:
            if path.is_file() and next((row for _, row in read_jsonl(path, growing=True)), None) != settings:
                path.unlink()
            self._log = JsonlLog(path, settings)
        except OSError as error:
            raise UserError(
                f"output={str(output)!r} cannot be written ({error.strerror}); choose another place"
            ) from error
        self.tree: Json | None = next((row for row in self._log.rows if "tree" in row), None)
        self.records = {row["question"]: row["records"] for row in self._log.rows if "question" in row}

    def add_tree(self, tree: str, tree_search: list[Json]) -> None:
        """Stores the result of the tree search."""
        self.tree = {"tree": tree, "tree_search": tree_search}
        self._log.add(self.tree)

    def add_question(self, question: str, records: list[Record]) -> None:
        """Stores the records of a finished question."""
        self.records[question] = records
        self._log.add({"question": question, "records": records})

    def remove(self) -> None:
        """Deletes the file, after the results are complete."""
        self._log.close()
        self._log.path.unlink(missing_ok=True)
