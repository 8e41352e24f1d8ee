"""Prints the counts that a run with $FUZZ_COUNTS collected: borders x kinds of fault, `cases (refused)` in each field.

FUZZ_COUNTS=/tmp/counts.jsonl bash scripts/test.sh tests/fuzz && python -m tests.fuzz.table /tmp/counts.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path


def table(rows: list[list[str]]) -> str:
    """A Markdown table of rows [border, fault, outcome]."""
    cases, refused = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for border, fault, outcome in rows:
        cases[border, fault] += 1
        refused[border, fault] += outcome == "refused"
    borders, faults = sorted({border for border, _ in cases}), sorted({fault for _, fault in cases})
    lines = ["| border | " + " | ".join(faults) + " | all |", "| --- " * (len(faults) + 2) + "|"]
    for border in borders:
        cells = [f"{cases[border, f]} ({refused[border, f]})" if cases[border, f] else "" for f in faults]
        total = sum(count for (b, _), count in cases.items() if b == border)
        lines.append(f"| {border} | " + " | ".join(cells) + f" | {total} |")
    return "\n".join(lines) + f"\n\n{sum(cases.values())} cases, {sum(refused.values())} refused in one line"


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
