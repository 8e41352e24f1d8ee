"""docs/developer/add-a-target-family.md: its code runs, the tests that it names exist; docs/targets.md: its table of families."""

from __future__ import annotations

import re

import pytest

from scripts import target_table
from tests.files import ROOT
from tests.inference import fakes

PAGE = ROOT / "docs" / "developer" / "add-a-target-family.md"


def test_the_code_of_the_page_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert capsys.readouterr().out.split("\n")[:2] == [
        "torch.Size([1, 9, 64])",
        "torch.Size([1, 9, 60])",
    ]
    assert names["target"].config.model_type == "olmo2"


def test_the_names_on_the_page_exist():
    text = PAGE.read_text()
    assert fakes.FAMILIES and fakes.OWN
    assert "`FAMILIES`" in text and "`OWN`" in text
    tests = (ROOT / "tests" / "inference" / "test_families.py").read_text()
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name


def test_the_table_marks_the_families_that_are_compared():
    _, found, text = target_table.PAGE.read_text().partition(target_table.BEGIN)
    bold = set(re.findall(r"\*\*([\w-]+)\*\*", text.partition(target_table.END)[0]))
    compared = {each["model_type"] for each in (*fakes.FAMILIES.values(), *fakes.OWN.values())}
    assert found and bold == compared, "run python scripts/target_table.py"


@pytest.mark.slow
def test_the_table_of_families_is_up_to_date():
    assert target_table.table() in target_table.PAGE.read_text(), (
        "run python scripts/target_table.py"
    )
