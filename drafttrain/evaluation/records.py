"""Result files: written whole or not at all, and a side file that lets an interrupted run go on."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError
from drafttrain.evaluation.metrics import Record


def fingerprint(settings: dict[str, Any]) -> str:
    """A short hash of everything that a record depends on."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def folder_state(name: str) -> list[tuple[str, int, int]]:
    """Name, size and modification time of a model folder's files: a retrained model is not taken for its past."""
    folder = Path(name).expanduser()
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


class Partial:
    """`<output>.partial.jsonl`: a first line with the settings' hash, then what was finished, a line each.

    Attributes:
        tree: what the tree search found: {"tree", "tree_search"}; None before it ran.
        records: by question id, the finished question's records.
    """

    def __init__(self, output: Path, key: str):
        self.path = output.with_name(output.name + ".partial.jsonl")
        self.tree: dict[str, Any] | None = None
        self.records: dict[str, list[Record]] = {}
        lines = self._lines()
        if lines and lines[0].get("settings") == key:
            for line in lines[1:]:
                if "tree" in line:
                    self.tree = line
                else:
                    self.records[line["question"]] = line["records"]
        # Rewriting drops a torn last line, so that what is appended next starts on a line of its own.
        kept = [{"settings": key}, *([self.tree] if self.tree else [])]
        kept += [{"question": name, "records": records} for name, records in self.records.items()]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_name(self.path.name + ".tmp")
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
            os.replace(temporary, self.path)
        except OSError as error:
            raise UserError(
                f"output={str(output)!r} cannot be written ({error.strerror}); choose another place"
            ) from error

    def _lines(self) -> list[dict[str, Any]]:
        lines = []
        for text in self.path.read_text().splitlines() if self.path.is_file() else []:
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
        return lines

    def add_tree(self, tree: str, tree_search: list[dict[str, Any]]) -> None:
        self.tree = {"tree": tree, "tree_search": tree_search}
        self._append(self.tree)

    def add_question(self, question: str, records: list[Record]) -> None:
        self.records[question] = records
        self._append({"question": question, "records": records})

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
