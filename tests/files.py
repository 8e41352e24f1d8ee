"""Places of files, and JSON files that tests read and write."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1].resolve()
FIXTURES = ROOT / "tests" / "fixtures"


def large_recipes() -> list[str]:
    """Names of the shipped recipes whose target is described beside them."""
    names = []
    for described in sorted((ROOT / "configs").glob("*/target.json")):
        names += [
            f"{described.parent.name}/{path.stem}" for path in described.parent.glob("*.yaml")
        ]
    return sorted(names)


def load_json(path: Path) -> Any:
    return json.loads(path.read_text())


def dump_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def load_jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def dump_jsonl(path: Path, rows: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
