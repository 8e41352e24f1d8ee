"""Fills the `# Plan: N x G GB: ...` lines in the heads of recipes from `drafttrain plan`.

    python scripts/recipe_heads.py                                    all recipes; python scripts/recipe_heads.py NAME ... some

A line belongs to the command before it: that command's key=value words are planned, on N GPUs of G GB, with the number of answers
that the head's `# Data:` line names. The script fails if a plan does not fit.
"""

from __future__ import annotations

import re
import sys
from unittest import mock

from drafttrain.recipes import recipe_names, recipe_path, target_config
from drafttrain.tuning.plan import Job, Plan, plan
from drafttrain.tuning.plan_memory import Memory

TOKENS = 1024  # of a conversation on average
LINE = re.compile(r"# Plan: (\d+) x (\d+) GB:.*")


def described(found: Plan) -> str:
    """A plan in half a line."""
    gpu = "training GPU (vLLM has its own)" if found.setting["states"] == "vllm" else "GPU"
    parts = {"generate": "answers", "features": "states", "train": "training"}
    hours = ", ".join(
        f"{text} {found.hours[part]:.1f} h"
        if found.hours[part] < 10
        else f"{text} {found.hours[part]:.0f} h"
        for part, text in parts.items()
        if part in found.hours
    )
    disk = found.disk_gb["total"]
    room = f"{disk / 1000:.1f} TB" if disk >= 1000 else f"{disk:.0f} GB"
    return f"{found.memory_gb['total']:.0f} GB per {gpu}, disk {room}; {hours}"


def planned(name: str, only: int | None = None) -> str:
    """A recipe's text with its plan lines filled. only: the number of the line to fill, from 0; the others stay."""
    path = recipe_path(name)
    lines = path.read_text().splitlines()
    text = "\n".join(lines)
    count = re.search(r"^# Data: ([\d,]+)", text, re.MULTILINE)
    assert count is not None, f"{name}: no line '# Data: N answers'"
    states = "stored" if "drafttrain features" in text else ""
    number = -1
    for at, line in enumerate(lines):
        if not (marked := LINE.fullmatch(line)):
            continue
        number += 1
        if only not in (None, number):
            continue
        start = max(
            row for row in range(at) if lines[row].startswith("#   ") and "launch" in lines[row]
        )
        command = " ".join(each.removeprefix("#").strip(" \\") for each in lines[start:at])
        words = re.findall(r"(?<=\s)[a-z_.]+=\S+", command.partition("drafttrain.train")[2])
        zero = re.search(r"--deepspeed_config_file (\S+)", command)
        gpus, memory = map(int, marked.groups())
        job = Job(gpus=gpus, gpu_memory=memory, conversations=int(count[1].replace(",", "")), tokens=TOKENS,
                  states=states, deepspeed=zero[1] if zero else "")  # fmt: skip
        with mock.patch.object(
            Memory, "most", return_value=0
        ):  # the largest batch, which heads do not name, is a search
            found = plan(str(path), words, job)
        fits = "" if found.fits else "does not fit: "
        lines[at] = f"# Plan: {gpus} x {memory} GB: {fits}{described(found)}"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    too_large = []
    for each in sys.argv[1:] or [
        name for name in recipe_names() if target_config(recipe_path(name))
    ]:
        filled = planned(each)
        recipe_path(each).write_text(filled)
        shown = [line for line in filled.splitlines() if LINE.fullmatch(line)]
        print(each, *shown, sep="\n  ", flush=True)
        too_large += [f"{each}: {line}" for line in shown if "does not fit" in line]
    if too_large:
        sys.exit("\n".join(too_large))
