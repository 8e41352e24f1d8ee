"""Writes docs/reference.md: every key of a recipe and every flag, from the tables that check them.

python scripts/reference.py            # a test compares the file with `page()`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from drafttrain.cli import COMMANDS, flags_module  # noqa: E402
from drafttrain.config import TrainConfig, TrainerKeys  # noqa: E402
from drafttrain.drafters.registry import kind_class, kinds  # noqa: E402
from drafttrain.drafters.shipping import format_lines, shipped_kinds, shipping  # noqa: E402
from drafttrain.training.on_policy import OnPolicyOptions  # noqa: E402
from drafttrain.values import kinds_of, rule, table  # noqa: E402

HEAD = """# Reference: recipe keys and flags

Written by `python scripts/reference.py` from the tables that check the values; do not edit it by hand.

A value of another type, out of its range or not finite is an error of one line that names key, value and rule, before a model
loads. In a recipe and in overrides a number may be written as `3e-4`; a whole number may be written as `2.0`. Recipes are YAML
of text, numbers, `true`, `false`, `null`, lists and mappings; a key that occurs twice is an error. The Python API takes the same
values as the flags.

Trees (`--tree`, `decode_tree`) have at most 1024 nodes and 256 depths, and a dynamic tree at most 256 children per node. Losses
have at most 16 terms, weights from 1e-06 to 1e+06 and temperatures from 0.01 to 100.
"""


def cell(value: object) -> str:
    text = "" if value is None or value == argparse.SUPPRESS else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def rows(heading: tuple[str, ...], lines: Iterator[tuple[object, ...]]) -> str:
    every = [heading, ("---",) * len(heading), *lines]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in every) + "\n"


def keys(settings: type, prefix: str = "") -> Iterator[tuple[object, ...]]:
    for name, wanted, default, meaning in table(settings):
        shown = str(default).lower() if isinstance(default, bool) else "" if default in ("", {}) else default
        yield f"`{prefix}{name}`", wanted, shown, meaning


def options(kind: str) -> Iterator[tuple[object, ...]]:
    config = kind_class(kind).config_class()  # type: ignore[attr-defined]
    for name, wanted in kinds_of(type(config)).items():  # type: ignore[arg-type]
        if name not in ("vocab_size", "loss", "target"):
            yield f"`drafter.{name}`", rule(wanted), getattr(type(config), name, "")


def flags(command: str) -> Iterator[tuple[object, ...]]:
    parser = argparse.ArgumentParser(prog=f"drafttrain {command}")
    flags_module(command).add_arguments(parser)
    for action in parser._actions:
        if action.dest == "help":
            continue
        names = f"`{(action.option_strings or [action.metavar or action.dest])[0]}`"
        wanted = getattr(action.type, "rule", "" if action.nargs == 0 else "text")
        if action.choices is not None:
            wanted = f"one of {', '.join(map(str, action.choices))}"
        default = (
            "required" if action.required else "" if action.nargs == 0 or action.default in ([], ()) else action.default
        )
        if default == sys.executable:
            default = "this interpreter"
        yield names, wanted, default, (action.help or "") % {"default": action.default}


def page() -> str:
    """The content of docs/reference.md."""
    four = ("", "value", "default", "meaning")
    parts = [HEAD, "## Recipe keys\n", rows(four, keys(TrainConfig))]
    parts += ["### on_policy\n", rows(four, keys(OnPolicyOptions, "on_policy."))]
    more = "Every other field of transformers `TrainingArguments` is a key too; its declared type is checked."
    parts += [f"### Keys of the trainer\n\n{more}\n", rows(four, keys(TrainerKeys))]
    for kind in kinds():
        if getattr(kind_class(kind), "config_class", None) is not None:
            parts += [f"### drafter: {kind}\n", rows(four[:3], options(kind))]
    for command, (_, summary) in COMMANDS.items():
        parts += [f"## drafttrain {command}\n\n{summary[0].upper()}{summary[1:]}.\n", rows(four, flags(command))]
    formats = [(f"`{kind}`", *line.split(maxsplit=0)) for kind in shipped_kinds() for line in format_lines(kind)]
    parts += ["## Formats of export\n", rows(("kind", "formats: what is written (engines)"), iter(formats))]
    read = [(f"`{kind}`", shipping(kind).reads) for kind in shipped_kinds() if shipping(kind).reads]
    parts += ["## Forms that import reads\n", rows(("kind", "form"), iter(read))]
    return "\n".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "reference.md").write_text(page(), encoding="utf-8")
