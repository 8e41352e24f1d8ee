"""Plans in the heads of recipes are those that `drafttrain plan` computes; scripts/recipe_heads.py writes them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from drafttrain.recipes import recipe_names, recipe_path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "recipe_heads.py"
FILLED = re.compile(
    r"# Plan: \d+ x \d+ GB: \d+ GB per (training GPU \(vLLM has its own\)|GPU), disk [\d.]+ [GT]B; answers [\d.]+ h, "
    r"(states [\d.]+ h, )?training [\d.]+ h"
)


def plans(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("# Plan: ")]


def test_every_plan_is_filled_and_fits():
    large = [
        name for name in recipe_names() if recipe_path(name).with_name("target.json").is_file()
    ]
    assert len(large) >= 30
    for name in large:
        found = plans(recipe_path(name).read_text())
        assert found and all(FILLED.fullmatch(line) for line in found), name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama-3.1-8b/eagle3", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("qwen3-235b-a22b/eagle3", "llama-3.3-70b/draft_model")
        ),
    ],
)
def test_a_head_agrees_with_the_plan(name):
    spec = importlib.util.spec_from_file_location("recipe_heads", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written, now = (
        plans(text)[0] for text in (recipe_path(name).read_text(), script.planned(name, only=0))
    )
    said, computed = (
        [float(number) for number in re.findall(r"[\d.]+(?= [GTh])", line)]
        for line in (written, now)
    )
    assert said == pytest.approx(computed, rel=0.1), f"run python scripts/recipe_heads.py {name}"
