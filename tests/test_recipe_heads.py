"""Plans of shipped recipes are those that `drafttrain plan` computes; scripts/recipe_heads.py writes them."""

from __future__ import annotations

import re

import pytest
import yaml

from drafttrain.recipes import figures, shipped_recipes
from scripts import recipe_heads
from tests.files import ROOT, large_recipes

PAGE = (ROOT / "docs" / "how-to" / "recipes.md").read_text()
KINDS = re.compile(r"^### (\w+)\n(.*?)(?=^##)", re.MULTILINE | re.DOTALL)
# A row of a kind's table whose recipes all hold one value.
ROW = re.compile(r"^\| `([\w.]+)` \| `([^`]+)`", re.MULTILINE)
COMPARED = [
    (kind, key, yaml.safe_load(value))
    for kind, table in KINDS.findall(PAGE)
    for key, value in ROW.findall(table)
]
FILLED = re.compile(
    r"\d+ GB per (training GPU \(vLLM has its own\)|GPU), disk [\d.]+ [GT]B; answers [\d.]+ h, "
    r"(states [\d.]+ h, )?training [\d.]+ h"
)
PLANNED = {one.name: one.plan for one in shipped_recipes() if one.plan is not None}
TEXTS = {name: (ROOT / "configs" / f"{name}.yaml").read_text() for name in PLANNED}
VALUES = {name: yaml.load(text, yaml.CSafeLoader) for name, text in TEXTS.items()}
FIGURE = re.compile(r"#.*\d ?(GB|TB|GPUs?|hours?|h|days?)\b")


def test_every_plan_is_filled_and_fits():
    assert len(PLANNED) >= 30 and list(PLANNED) == large_recipes()
    for name, plan in PLANNED.items():
        for run in plan["runs"]:
            assert FILLED.fullmatch(figures(run, plan["states"])), name
            assert run["memory_gb"] <= run["gpu_memory"], name


def test_only_the_key_plan_has_figures_of_plans():
    """Memory, disk, time and numbers of GPUs, which `drafttrain plan` computes."""
    found = [line for text in TEXTS.values() for line in text.splitlines() if FIGURE.search(line)]
    assert found == []
    assert FIGURE.search("# 66 GB of weights") and FIGURE.search("seed: 0   # trains 3.5 hours")


def test_recipes_hold_the_values_that_their_page_compares():
    assert {kind for kind, _, _ in COMPARED} == {"dspark", "dflash2", "peagle", "eagle3"}
    assert len(COMPARED) > 30
    for kind, key, value in COMPARED:
        outer, _, inner = key.rpartition(".")
        for name, recipe in VALUES.items():
            held = recipe.get(outer) if outer else recipe
            assert not name.endswith(f"/{kind}") or held.get(inner) == value, (name, key)


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_has_a_run_for_each_training_command(name):
    """In the order of the head, with the command's overrides and DeepSpeed file."""
    head = TEXTS[name].partition("\nkind: ")[0]
    joined = re.sub(r" \\\n# +", " ", head)
    commands = re.findall(r"^#   .*accelerate launch (.*)$", joined, re.MULTILINE)
    plan = PLANNED[name]
    for command, run in zip(commands, plan["runs"], strict=True):
        words = command.partition("drafttrain.train ")[2].split()[1:]
        assert " ".join(words) == run.get("overrides", "")
        zero = re.search(r"--deepspeed_config_file (\S+)", command)
        assert (zero[1] if zero else None) == run.get("deepspeed")
    assert ("drafttrain features" in head) == (plan["states"] == "stored")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama-3.1-8b/eagle3", "qwen3-235b-a22b/eagle3", "llama-3.3-70b/draft_model"]
)
def test_a_plan_agrees_with_the_command(name):
    plan = PLANNED[name]
    written = plan["runs"][0]
    now = recipe_heads.with_figures(written, recipe_heads.planned(name, written, plan))
    for figure in ("memory_gb", "disk_gb", "hours"):
        assert now[figure] == pytest.approx(written[figure], rel=0.1), "run scripts/recipe_heads.py"
