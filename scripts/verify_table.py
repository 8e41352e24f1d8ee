"""Gathers what `drafttrain verify` wrote into eval/results/verify_matrix.json and its table into docs/serving.md.

python scripts/verify_table.py OUTPUT_DIR/*.json    # of scripts/verify_engines_cpu.sh; without files: the table only

Kinds that no file has keep their earlier run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MATRIX = ROOT / "eval" / "results" / "verify_matrix.json"
PAGE = ROOT / "docs" / "serving.md"
BEGIN = "<!-- verify_table.py: begin -->\n"
END = "<!-- verify_table.py: end -->\n"
DROPPED = ("tokens", "files", "common_prefix")  # of an engine or our decoder


def gathered(files: list[str]) -> dict:
    """The runs without their tokens, by drafter."""
    runs = []
    for file in files:
        found = json.loads(Path(file).read_text())
        runs.append(
            {
                key: value
                for key, value in found.items()
                if key not in ("ours", "vllm", "llama_cpp", *DROPPED)
            }
        )
        runs[-1].pop("transformers", None)
    return {"runs": runs}


def measured(run: dict) -> set[tuple[bool, str]]:
    """Whether the drafters of a run are trained ones, and their kinds."""
    return {("drafter" in run, row["kind"]) for row in run["rows"]}


def updated(earlier: dict, new: dict) -> dict:
    """All runs: the new ones, and earlier ones of other drafters."""
    done = set().union(*map(measured, new["runs"]))
    kept = [run for run in earlier["runs"] if not measured(run) <= done]
    return {"runs": kept + new["runs"]}


def cell(row: dict) -> str:
    verdict = row["verdict"]
    if row["prompts"]:
        ours = "-" if row["ours"] is None else f"{row['ours']:.3f}"
        figures = f"{row['accepted_length']:.3f} ({ours}), {row['same_text']} of {row['prompts']}"
        return figures if verdict == "same" else f"**{figures}: {verdict.partition(': ')[2]}**"
    if verdict.startswith("not run"):
        return "by its rules"
    return "no" if verdict.startswith("unsupported") else "**fails**"


def table(matrix: dict) -> str:
    """Kind by engine, for tiny drafters and for trained heads; the heading names the releases that ran."""
    parts = []
    dates: dict[tuple[str, str], str] = {}  # of the last run, by size and kind
    for run in sorted(matrix["runs"], key=lambda run: "drafter" in run):  # tiny ones first
        size = "tiny" if "drafter" not in run else "trained"
        for row in run["rows"]:
            parts.append((size, row))
            dates[size, row["kind"]] = run["date"][:10]
    releases: dict[str, str] = {}
    for _, row in parts:
        if row["prompts"] or row["engine"] not in releases:
            releases[row["engine"]] = row["release"]
    headings = [f"{engine} {release}" for engine, release in releases.items()]
    lines = [f"| | run on | {' | '.join(headings)} |"]
    lines.append(f"| --- | --- {'| --- ' * len(releases)}|")
    for size in ("tiny", "trained"):
        rows = [row for kind, row in parts if kind == size]
        for kind in sorted({row["kind"] for row in rows}):
            cells = {row["engine"]: cell(row) for row in rows if row["kind"] == kind}
            results = " | ".join(cells.get(engine, "-") for engine in releases)
            lines.append(f"| `{kind}`, {size} | {dates[size, kind]} | {results} |")
    return "\n".join(lines) + "\n"


def page(matrix: dict) -> str:
    """docs/serving.md with the table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table(matrix) + END + rest.partition(END)[2]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="written by drafttrain verify --engine all")
    if files := parser.parse_args().files:
        matrix = updated(json.loads(MATRIX.read_text()), gathered(files))
        MATRIX.write_text(json.dumps(matrix, indent=1) + "\n")
    PAGE.write_text(page(json.loads(MATRIX.read_text())))
    print(f"wrote {PAGE}")
