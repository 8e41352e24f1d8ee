"""`drafttrain recipes`: lists the recipes that come with drafttrain, prints one, or copies it to
edit.

configs/TARGET/KIND.yaml     the recipe TARGET/KIND; its head has the commands, its key `plan` what they take
configs/TARGET/target.json   the target's config.json values that decide shapes; init.json: those of a draft model's start
configs/accelerate, configs/deepspeed    launch settings; their paths hold from the folder that contains configs/
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml
from typing_extensions import NotRequired, TypedDict

from drafttrain.environment import shipped_folder
from drafttrain.errors import UserError, shown
from drafttrain.files import check_json, read_text, write_text
from drafttrain.outcome import conclude, next_command
from drafttrain.plain_yaml import read_yaml

_LAUNCH = ("accelerate", "deepspeed")  # folders of launch settings
_FIX = "install drafttrain again"
# libyaml's loader reads the list ten times faster than `read_yaml`, whose bounds our own files do not need.
_QuickLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_HEADINGS = ["recipe", "GPUs", "GB", "disk", "answers", "hours"]
_FOOT = """
GB of each GPU that trains, and hours to write the answers and to train on them:
the first run of the recipe's plan, a count and a roofline for H100s.
vLLM: further GPUs, on which vLLM runs the target."""


class PlannedRun(TypedDict):
    """What one of a recipe's training commands takes, as `drafttrain plan` computes it."""

    gpus: int  # that train
    gpu_memory: float  # GB of each
    overrides: NotRequired[str]  # key=value words of the command
    deepspeed: NotRequired[str]  # --deepspeed of `drafttrain plan`
    memory_gb: float
    disk_gb: float
    hours: dict[str, float]  # by part: answers, states, training


class RecipePlan(TypedDict):
    """A recipe's key `plan`."""

    answers: int  # of the target, as many as the figures assume
    states: str  # where the target's come from: online, stored or vllm
    runs: list[PlannedRun]


class ShippedRecipe(NamedTuple):
    """A recipe that comes with drafttrain."""

    name: str
    target: str  # "any" where the recipe names none
    plan: RecipePlan | None
    words: str  # the first words of its head

    @property
    def about(self) -> str:
        """The first run of its plan in a line, else its first words."""
        if self.plan is None:
            return self.words
        run = self.plan["runs"][0]
        return (
            f"{self.plan['answers']:,} answers; {_gpus(run)}: {figures(run, self.plan['states'])}"
        )

    def cells(self) -> list[str]:
        """Its line of the list, by column; only name and words without a plan."""
        if self.plan is None:
            return [self.name, textwrap.shorten(self.words, 46, placeholder=" ...")]
        run = self.plan["runs"][0]
        gpus = _gpus(run)
        if self.plan["states"] == "vllm":
            gpus += ", vLLM"
        return [
            self.name,
            gpus,
            f"{run['memory_gb']:.0f}",
            _room(run["disk_gb"]),
            f"{self.plan['answers']:,}",
            _hours(sum(run["hours"].values())),
        ]


def plan_of(recipe: Mapping[str, object], where: str) -> RecipePlan | None:
    """A recipe's key `plan`, None without it.

    Args:
        where: begins the message of an error.

    Raises:
        UserError: a plan of another form.
    """
    plan = recipe.get("plan")
    if plan is None:
        return None
    fix = "python scripts/recipe_heads.py writes the plans of shipped recipes; leave it out of your own"
    check_json(plan, f"{where}: plan", fix, RecipePlan)
    return plan  # type: ignore[return-value]


def figures(run: PlannedRun, states: str) -> str:
    """The figures of a run in half a line."""
    gpu = "GPU"
    if states == "vllm":
        gpu = "training GPU (vLLM has its own)"
    hours = ", ".join(f"{part} {_hours(hours)} h" for part, hours in run["hours"].items())
    return f"{run['memory_gb']:.0f} GB per {gpu}, disk {_room(run['disk_gb'])}; {hours}"


def _gpus(run: PlannedRun) -> str:
    return f"{run['gpus']} x {run['gpu_memory']:g} GB"


def _hours(hours: float) -> str:
    if hours < 10:
        return f"{hours:.1f}"
    return f"{hours:.0f}"


def _room(gigabytes: float) -> str:
    if gigabytes >= 1000:
        return f"{gigabytes / 1000:.1f} TB"
    return f"{gigabytes:.0f} GB"


def recipe_names() -> list[str]:
    """Names of the recipes that come with drafttrain, TARGET/KIND, sorted."""
    folder = shipped_folder("configs")
    names = []
    for path in folder.rglob("*.yaml"):
        inner = path.relative_to(folder)
        if inner.parts[0] not in _LAUNCH:
            names.append(inner.with_suffix("").as_posix())
    return sorted(names)


def shipped_recipes() -> list[ShippedRecipe]:
    """All recipes that come with drafttrain."""
    found = []
    for name in recipe_names():
        text = read_text(shipped_folder("configs") / f"{name}.yaml", "recipe", _FIX)
        try:
            keys = yaml.load(text, _QuickLoader)
        except yaml.YAMLError:
            keys = read_yaml(text, f"recipe={shown(name)}")  # its message says what is wrong
        # The first clause of the first comment.
        first = re.match(r"# (.*?)(?:[.:,;]\s|$)", text, re.MULTILINE)
        found.append(
            ShippedRecipe(
                name=name,
                target=keys.get("target", "any"),
                plan=plan_of(keys, f"recipe={shown(name)}"),
                words=first[1] if first else "",
            )
        )
    return found


def recipe_path(name: str, key: str = "recipe") -> Path:
    """The file of a recipe: `name` itself if it is a file, else the shipped recipe of that name.

    Raises:
        UserError: neither; names the nearest recipes, or all of a target.
    """
    own = Path(name).expanduser()
    if own.is_file():
        return own
    names = recipe_names()
    if name in names:
        return shipped_folder("configs") / f"{name}.yaml"
    close = _close_names(name, names)
    hint = "drafttrain recipes lists those that come with it"
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    raise UserError(f"{key}={shown(name)}: no such file, and no recipe of that name; {hint}")


def _close_names(name: str, names: list[str]) -> list[str]:
    """The recipes that a wrong name may mean."""
    # A target's folder alone.
    close = [one for one in names if one.startswith(f"{name.rstrip('/')}/")]

    # A misspelled folder with a kind: that kind of the nearest target, else all of its recipes.
    if not close and "/" in name:
        folder, _, kind = name.rpartition("/")
        folders = {one.partition("/")[0] for one in names}
        nearest = difflib.get_close_matches(folder.lower(), folders, n=1, cutoff=0.7)
        if nearest:
            close = [one for one in names if one.partition("/")[0] == nearest[0]]
            if f"{nearest[0]}/{kind}" in names:
                close = [f"{nearest[0]}/{kind}"]

    # A target's own name, else any name that looks alike.
    if not close:
        close = [one.name for one in shipped_recipes() if one.target.lower() == name.lower()]
    if not close:
        close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.6)
    return close


def copy_recipe(name: str, folder: Path) -> list[Path]:
    """Copies a recipe, its JSON files and all launch settings below `folder`/configs, where the
    commands of its head work.

    Returns:
        The files written, the recipe first; files that are there already with the same content are
        left as they are.

    Raises:
        UserError: a file of another content is in the way.
    """
    source = recipe_path(name)
    shipped = shipped_folder("configs")
    if not source.is_relative_to(shipped):
        raise UserError(
            f"recipe={shown(name)} is a file of your own; --copy is for those that come with drafttrain"
        )
    paths = [source]
    # A recipe outside the folders of targets has no JSON files of its own.
    if source.parent != shipped:
        paths += sorted(source.parent.glob("*.json"))
    for kind in _LAUNCH:
        paths += sorted(path for path in (shipped / kind).iterdir() if path.is_file())

    # Check all before anything is written.
    missing: dict[Path, str] = {}
    for path in paths:
        text = read_text(path, "recipe", _FIX)
        copied = folder / "configs" / path.relative_to(shipped)
        if not copied.exists():
            missing[copied] = text
        elif not copied.is_file() or read_text(copied, "copy", "choose another folder") != text:
            raise UserError(
                f"copy={shown(str(folder))}: {copied} is there with another content; choose another folder, or move it away"
            )
    for copied, text in missing.items():
        copied.parent.mkdir(parents=True, exist_ok=True)
        write_text(copied, text)
    return list(missing)


def run(args: argparse.Namespace) -> int:
    """Copies a recipe, prints one, or lists all."""
    if args.copy:
        if not args.name:
            raise UserError("--copy needs the name of a recipe; drafttrain recipes lists them")
        written = copy_recipe(args.name, Path(args.copy).expanduser())
        if not written:
            print(f"all files are in {args.copy} already")
        then = next_command("train", f"configs/{args.name}.yaml")
        conclude({"recipe": args.name}, written, f"cd {shlex.quote(args.copy)} && {then}")
    elif args.name:
        text = read_text(recipe_path(args.name), "recipe", "check the file")
        print(text, end="")
        conclude({"recipe": args.name, "text": text})
    else:
        recipes = shipped_recipes()
        _print_list(recipes)
        rows = [{"recipe": one.name, "target": one.target, "plan": one.about} for one in recipes]
        conclude({"recipes": rows}, then=next_command("recipes", "NAME"))
    return 0


def _print_list(recipes: list[ShippedRecipe]) -> None:
    lines = [_HEADINGS]
    for one in recipes:
        lines.append(one.cells())
    # Recipes without a plan have two cells, whose words may run on into the other columns.
    full = [line for line in lines if len(line) == len(_HEADINGS)]
    widths = []
    for column in range(len(_HEADINGS)):
        widths.append(max(len(line[column]) for line in full))

    for line in lines:
        texts = [f"{line[0]:{widths[0]}}", f"{line[1]:{widths[1]}}"]
        for cell, width in zip(line[2:], widths[2:], strict=False):
            texts.append(f"{cell:>{width}}")
        print("  ".join(texts).rstrip())
    print(_FOOT)
