"""docs/developer/add-a-target-family.md: its code runs, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.inference import fakes, test_families

PAGE = Path(__file__).resolve().parents[2] / "docs" / "developer" / "add-a-target-family.md"


def test_the_code_of_the_page_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert capsys.readouterr().out.split("\n")[:2] == ["torch.Size([1, 9, 64])", "torch.Size([1, 9, 60])"]
    assert names["target"].config.model_type == "olmo2"


def test_the_names_on_the_page_exist():
    text = PAGE.read_text()
    assert fakes.FAMILIES and test_families.REFUSED
    assert "`FAMILIES`" in text and "`REFUSED`" in text
    for name in re.findall(r"`(test_\w+)`", text):
        assert hasattr(test_families, name), name
