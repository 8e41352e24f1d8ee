"""Ten families of chat templates: what is stored is what was served, and the mask is what the target generated."""

from __future__ import annotations

import re

import pytest

from tests.data.templates.conversations import CASES
from tests.data.templates.families import FAMILIES
from tests.data.templates.table import HEADER, PATHS, cells, row
from tests.files import ROOT

PAGE = ROOT / "docs" / "data.md"
ONE_CALL = {  # the template writes one call a turn, so a second one has no place in a later prompt
    "engine": (1, "template_refuses_answer"),
    "ids": (1, "template_refuses_answer"),
    "text": (0, "tool calls: the chat template does not write the tool calls"),
    "existing": (0, "message 1: the chat template refuses .*one tool call per turn"),
}
NO_TOOLS = dict.fromkeys(PATHS, (0, "the chat template does not read `tools`"))
# Family and conversation -> path -> answers that can be stored, and why no more. Of everything else all of it is.
PARTLY = {
    ("Llama 3", "parallel calls"): ONE_CALL,
    ("gpt-oss", "parallel calls"): {
        "engine": (
            1,
            "other_tool_calls",
        ),  # the target writes one call, the recorded results answer two
        "ids": (1, "other_tool_calls"),
        "text": (0, "tool calls: the chat template does not write the tool calls"),
        "existing": (0, "message 1: the chat template refuses .*content or thinking, not both"),
    },
    **{("Gemma", case.name): NO_TOOLS for case in CASES if case.tools},
}


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_rows_are_what_was_served(family):
    found = cells(family)
    for case, paths in found.items():
        for path, cell in paths.items():
            where = f"{family.name}, {case}, {path}"
            assert not cell.wrong, where
            answers, reason = PARTLY.get((family.name, case), {}).get(path, (cell.turns, "^$"))
            assert cell.stored == answers and re.search(reason, cell.refused), (where, cell)
            assert cell.generated > 0 or not answers, where
    assert row(family.name, found) in PAGE.read_text().splitlines()


def test_the_page_shows_every_family_once():
    lines = PAGE.read_text().splitlines()
    begin = lines.index(HEADER[0])
    assert lines[begin + 1] == HEADER[1]
    names = [line.split("|")[1].strip() for line in lines[begin + 2 :] if line.startswith("|")]
    assert names[: len(FAMILIES)] == [family.name for family in FAMILIES] and len(FAMILIES) == 10
