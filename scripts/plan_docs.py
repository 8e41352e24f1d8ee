"""Writes what `drafttrain plan` prints below its commands in the docs.

    python scripts/plan_docs.py                                       all pages; python scripts/plan_docs.py PAGE ... some

A block of one `drafttrain plan` command, with the block of text after it, is such a place. Text that begins with the verdict
keeps the lines from there on. Run it in a folder without runs/, where no data set exists yet.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

from drafttrain.cli import main

DOCS = Path(__file__).resolve().parents[1] / "docs"
PLACE = re.compile(
    r"(```bash\n(drafttrain plan [^\n]+)\n```\n\n```text\n)(.*?)(?=```\n)", re.DOTALL
)
VERDICT = re.compile(r"^(fits|does not fit): ", re.MULTILINE)


def printed(command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if main(shlex.split(command)[1:]):
            raise SystemExit(f"error in: {command}")
    return re.sub(r" +$", "", out.getvalue(), flags=re.MULTILINE)


def filled(place: re.Match[str]) -> str:
    text = printed(place[2])
    verdict = VERDICT.search(text)
    short = VERDICT.match(place[3]) and verdict
    return place[1] + (text[verdict.start() :] if short and verdict else text)


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or sorted(DOCS.rglob("*.md")):
        content = path.read_text()
        if PLACE.search(content):
            path.write_text(PLACE.sub(filled, content))
            print(path, flush=True)
