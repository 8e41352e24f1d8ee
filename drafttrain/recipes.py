"""`drafttrain recipes`: lists the recipes that come with drafttrain, prints one, or copies it to
edit.

configs/TARGET/KIND.yaml     the recipe TARGET/KIND; its head has the commands, and a line `# Plan: ...` per set of GPUs
configs/TARGET/target.json   the target's config.json values that decide shapes; init.json: those of a draft model's start
configs/accelerate, configs/deepspeed    launch settings; their paths hold from the folder that contains configs/
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import textwrap
from pathlib import Path

from drafttrain.environment import shipped_folder
from drafttrain.errors import UserError, shown
from drafttrain.files import read_text, write_text
from drafttrain.outcome import conclude, next_command

_LAUNCH = ("accelerate", "deepspeed")  # folders of launch settings
_FIX = "install drafttrain again"
_FOOT = """
GB of each GPU that trains, and hours to write the answers and to train on them:
the first plan in the recipe's head, a count and a roofline for H100s.
vLLM: further GPUs, on which vLLM runs the target."""


def recipe_names() -> list[str]:
    """Names of the recipes that come with drafttrain, TARGET/KIND, sorted."""
    folder = shipped_folder("configs")
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml"))
    return sorted(path.as_posix() for path in paths if path.parts[0] not in _LAUNCH)


def recipe_path(name: str, key: str = "recipe") -> Path:
    """The file of a recipe: `name` itself if it is a file, else the recipe of that name that comes
    with drafttrain.

    Raises:
        UserError: neither; names the nearest recipes, or all of a target.
    """
    if (own := Path(name).expanduser()).is_file():
        return own
    names = recipe_names()
    if name in names:
        return shipped_folder("configs") / f"{name}.yaml"
    close = [one for one in names if one.startswith(f"{name.rstrip('/')}/")]
    if not close and "/" in name:
        folder, _, kind = name.rpartition("/")
        targets = difflib.get_close_matches(
            folder.lower(),
            {one.partition("/")[0] for one in names},
            n=1,
            cutoff=0.7,
        )
        nearest = [f"{target}/{kind}" for target in targets if f"{target}/{kind}" in names]
        close = nearest or [one for one in names if one.partition("/")[0] in targets]
    close = close or [one for one, target, _ in table() if target.lower() == name.lower()]
    close = close or difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.6)
    hint = "; drafttrain recipes lists those that come with it"
    if close:
        hint = f"; did you mean {' or '.join(close)}?"
    raise UserError(f"{key}={shown(name)}: no such file, and no recipe of that name{hint}")


def table() -> list[tuple[str, str, str]]:
    """(recipe, target, GPUs and hours from the first plan in its head, else its first words) of all
    recipes.
    """
    rows = []
    for name in recipe_names():
        text = read_text(shipped_folder("configs") / f"{name}.yaml", "recipe", _FIX)
        target = re.search(r"^target: *(\S+)", text, re.MULTILINE)
        plan = re.search(r"^# Plan: (.*)", text, re.MULTILINE)
        words = re.search(r"^# (.*?)(?:[.:,;]\s|$)", text, re.MULTILINE)
        data = re.search(r"^# Data: ([\d,]+ answers)", text, re.MULTILINE)
        if plan and data:
            about = f"{data[1]}; {plan[1]}"
        elif words:
            about = words[1]
        else:
            about = ""
        rows.append((name, target[1] if target else "any", about))
    return rows


def _line(name: str, about: str) -> list[str]:
    """A recipe's cells of the list: its first plan's figures, else its first words."""
    plan = re.match(
        r"([\d,]+) answers; (.*?): (\d+) GB per (training )?GPU.*disk (.*?); (.*)", about
    )
    if not plan:
        return [name, textwrap.shorten(about, 46, placeholder=" ...")]
    answers, gpus, memory, vllm, disk, times = plan.groups()
    hours = sum(float(number) for number in re.findall(r"([\d.]+) h", times))
    return [name, gpus + ", vLLM" * bool(vllm), memory, disk, answers, f"{hours:.{hours < 10:d}f}"]


def copy_recipe(name: str, folder: Path) -> list[Path]:
    """Writes a recipe, its JSON files and all launch settings below `folder`/configs, where the
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
    if source.parent != shipped:
        beside = sorted(source.parent.glob("*.json"))
    else:
        beside = []
    launch = sorted(
        path for kind in _LAUNCH for path in (shipped / kind).iterdir() if path.is_file()
    )
    texts = {
        folder / "configs" / path.relative_to(shipped): read_text(path, "recipe", _FIX)
        for path in [source, *beside, *launch]
    }
    for path, text in texts.items():
        if path.exists() and not (
            path.is_file() and read_text(path, "copy", "choose another folder") == text
        ):
            raise UserError(
                f"copy={shown(str(folder))}: {path} is there with another content; choose another folder, or move it away"
            )
    written = [path for path in texts if not path.exists()]
    for path in written:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, texts[path])
    return written


def run(args: argparse.Namespace) -> int:
    """The command."""
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
        rows = table()
        lines = [
            ["recipe", "GPUs", "GB", "disk", "answers", "hours"],
            *(_line(name, plan) for name, _, plan in rows),
        ]
        widths = [
            max(len(line[column]) for line in lines if len(line) == len(lines[0]))
            for column in range(6)
        ]
        widths[0] = max(len(line[0]) for line in lines)
        for line in lines:
            figures = [
                f"{cell:>{width}}" for cell, width in zip(line[2:], widths[2:], strict=False)
            ]
            print(
                "  ".join([f"{line[0]:{widths[0]}}", f"{line[1]:{widths[1]}}", *figures]).rstrip()
            )
        print(_FOOT)
        keys = ("recipe", "target", "plan")
        conclude(
            {"recipes": [dict(zip(keys, row, strict=True)) for row in rows]},
            then=next_command("recipes", "NAME"),
        )
    return 0
