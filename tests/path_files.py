"""The files of the package that run in a call, and those that docs/architecture.md lists for it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import drafttrain
from tests.files import ROOT

PACKAGE = Path(drafttrain.__file__).parent


def files_run(call: Callable[[], object]) -> list[str]:
    """Files below drafttrain/ whose functions run in a call, in the order of their first one."""
    seen: dict[str, None] = {}

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            seen.setdefault(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(seen)


def listed_files(heading: str) -> list[str]:
    """The fenced list under a heading; a line is a path and what the file does."""
    _, _, section = (ROOT / "docs" / "architecture.md").read_text().partition(f"## {heading}\n")
    return re.findall(r"^(\S+\.py)", section.split("```")[1], flags=re.MULTILINE)
