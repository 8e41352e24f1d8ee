"""Fills the figures in the key `plan` of recipes from `drafttrain plan`.

    python scripts/recipe_heads.py             all recipes that have the key
    python scripts/recipe_heads.py NAME ...    some of them

Each run names GPUs, and the overrides and ZeRO stage of its training command; its figures are those of a plan with as many
answers as the key says. The script fails if a plan does not fit.
"""

from __future__ import annotations

import sys

import yaml

from drafttrain.plain_yaml import read_yaml
from drafttrain.recipes import (
    PlannedRun,
    RecipePlan,
    figures,
    plan_of,
    recipe_path,
    shipped_recipes,
)
from drafttrain.tuning.plan import Job, Plan, plan

TOKENS = 1024  # of a conversation on average
PARTS = {"generate": "answers", "features": "states", "train": "training"}


def planned(name: str, planned_run: PlannedRun, whole: RecipePlan) -> Plan:
    """The plan of one of a recipe's runs."""
    job = Job(
        gpus=planned_run["gpus"],
        device="h100",
        gpu_memory=planned_run["gpu_memory"],
        conversations=whole["answers"],
        tokens=TOKENS,
        states=whole["states"],  # type: ignore[arg-type]
        deepspeed=planned_run.get("deepspeed", ""),
    )
    words = planned_run.get("overrides", "").split()
    return plan(str(recipe_path(name)), words, job, largest=False)


def with_figures(run: PlannedRun, found: Plan) -> PlannedRun:
    """The run with a plan's figures, rounded as they are shown."""
    hours = {}
    for part, label in PARTS.items():
        if part in found.hours:
            hours[label] = round(found.hours[part], 1 if found.hours[part] < 10 else None)
    filled = run.copy()
    filled["memory_gb"] = round(found.memory_gb["total"])
    filled["disk_gb"] = round(found.disk_gb["total"])
    filled["hours"] = hours
    return filled


def text_of(content: RecipePlan) -> str:
    """The key as YAML, with the hours of a run in one line."""
    lines = [
        "plan:",
        f"  answers: {content['answers']}",
        f"  states: {content['states']}",
        "  runs:",
    ]
    for run in content["runs"]:
        text = yaml.safe_dump(dict(run), default_flow_style=None, width=1000, sort_keys=False)
        first, *others = text.splitlines()
        lines.append(f"  - {first}")
        for line in others:
            lines.append(f"    {line}")
    return "\n".join(lines) + "\n"


def fill(name: str) -> list[str]:
    """Fills a recipe's plan; returns its runs in words, those that do not fit as such."""
    path = recipe_path(name)
    text = path.read_text()
    content = plan_of(read_yaml(text, name), name)
    assert content is not None, f"{name} has no key plan"
    shown = []
    runs = []
    for run in content["runs"]:
        found = planned(name, run, content)
        filled = with_figures(run, found)
        runs.append(filled)
        fits = "" if found.fits else "does not fit: "
        where = f"{run['gpus']} x {run['gpu_memory']:g} GB"
        shown.append(f"{where}: {fits}{figures(filled, content['states'])}")
    content["runs"] = runs
    before = text[: text.index("\nplan:\n") + 1]  # the key is the last of a recipe
    path.write_text(before + text_of(content))
    return shown


if __name__ == "__main__":
    too_large = []
    for each in sys.argv[1:] or [one.name for one in shipped_recipes() if one.plan]:
        lines = fill(each)
        print(each, *lines, sep="\n  ", flush=True)
        too_large += [f"{each}: {line}" for line in lines if "does not fit" in line]
    if too_large:
        sys.exit("\n".join(too_large))
