"""Prints the counts that a run with $FUZZ_COUNTS collected: borders x kinds of fault, `cases (refused)` in each field.

FUZZ_COUNTS=/tmp/counts.jsonl bash scripts/test.sh tests/fuzz && python -m tests.fuzz.table /tmp/counts.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

_CLASSES = {  # faults by what is wrong
    "damaged bytes": (
        "cut off",
        "bits flipped",
        "bytes inserted",
        "zeros",
        "empty",
        "twice",
        "another file",
    ),
    "encoding": ("UTF-16", "latin-1", "byte order mark", "line separators", "deep nesting"),
    "another type": ("another type",),
    "out of range": ("out of range", "not finite"),
    "odd text": ("odd text",),
    "missing": ("missing key",),
}


def table(rows: list[list[str]]) -> str:
    """A Markdown table of rows [border, fault, outcome]: borders x classes of faults, `cases (refused)` in each field."""
    classes = {fault: name for name, faults in _CLASSES.items() for fault in faults}
    cases = Counter[tuple[str, str]]()
    refused = Counter[tuple[str, str]]()
    for border, fault, outcome in rows:
        cell = (
            border.partition(":")[0] if border.startswith(("kernels", "search")) else border,
            classes.get(fault, "other"),
        )
        cases[cell] += 1
        refused[cell] += outcome == "refused"
    columns = [*_CLASSES, "other"]
    lines = ["| border | " + " | ".join(columns) + " | all |", "| --- " * (len(columns) + 2) + "|"]
    for border in sorted({border for border, _ in cases}):
        cells = [
            f"{cases[border, f]} ({refused[border, f]})" if cases[border, f] else ""
            for f in columns
        ]
        total = sum(count for (b, _), count in cases.items() if b == border)
        lines.append(f"| {border} | " + " | ".join(cells) + f" | {total} |")
    return (
        "\n".join(lines)
        + f"\n\n{sum(cases.values())} cases, {sum(refused.values())} refused in one line"
    )


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
