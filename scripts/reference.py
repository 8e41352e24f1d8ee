"""Writes docs/reference/config.md and cli.md: every key of a recipe and every flag, from the tables that check them.

python scripts/reference.py            # a test compares the files with `pages()`
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from drafttrain.command import (  # noqa: E402
    AnyNumber,
    Word,
    cli_parameters,
    helps_of,
    is_word,
    item_of,
    required,
    spelled,
)
from drafttrain.command import kinds_of as signature_kinds  # noqa: E402
from drafttrain.commands import COMMANDS, function_of, summary_of  # noqa: E402
from drafttrain.config import TrainConfig, TrainerKeys  # noqa: E402
from drafttrain.drafters.registry import kind_class, kinds  # noqa: E402
from drafttrain.drafters.shipping import format_lines, shipped_kinds, shipping  # noqa: E402
from drafttrain.training.on_policy import OnPolicyOptions  # noqa: E402
from drafttrain.values import is_marked, kinds_of, rule, table  # noqa: E402

WRITTEN = "Written by `python scripts/reference.py` from the tables that check the values; do not edit it by hand."
CONFIG = f"""# Config

Every key of a recipe with its values, default and meaning. {WRITTEN}

A value of another type, out of its range or not finite is an error of one line that names key, value and rule, before a model
loads. In a recipe and in overrides a number may be written as `3e-4`; a whole number may be written as `2.0`. Recipes are YAML
of text, numbers, `true`, `false`, `null`, lists and mappings; a key that occurs twice is an error. [Train a
drafter](../how-to/train.md) shows a recipe. The key `plan` of shipped recipes holds figures of `drafttrain plan`; training does
not read it.

Losses have at most 16 terms, weights from 1e-06 to 1e+06 and temperatures from 0.01 to 100 ([losses](losses.md)); sizes of trees:
[trees](trees.md).
"""
DRAFTER = """## Keys of drafter

Options of each kind; [kinds](kinds.md) explains them. Where the default says *the target's*, the value follows the
target's config.
"""
CLI = f"""# Command line

Every flag with its values, default and meaning. {WRITTEN}

`drafttrain` alone prints the pipeline, `drafttrain COMMAND --help` a command's flags with an example. The Python API takes
the same values as the flags. A wrong value is an error of one line, and the command ends with
status 2; Ctrl-C ends with 130, SIGTERM with 143. Every command also takes `--quiet`, and `--json` where it has a result
([how](../how-to/cli.md)).
"""


def cell(value: object) -> str:
    text = "" if value is None else str(value)
    text = " ".join(text.split()).replace("|", "\\|")
    parts = text.split("`")
    parts[::2] = [part.replace("*", "\\*") for part in parts[::2]]  # outside of code, * is emphasis
    return "`".join(parts)


def rows(heading: tuple[str, ...], lines: Iterator[tuple[object, ...]]) -> str:
    every = [heading, ("---",) * len(heading), *lines]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in every) + "\n"


def keys(settings: type, prefix: str = "") -> Iterator[tuple[object, ...]]:
    for name, wanted, default, meaning in table(settings):
        shown = (
            str(default).lower()
            if isinstance(default, bool)
            else ""
            if default in ("", {})
            else default
        )
        yield f"`{prefix}{name}`", wanted, shown, meaning


def meanings(config: type) -> dict[str, str]:
    """The meaning of each field, from the `Attributes:` of the docstrings of a config class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if not base.__module__.startswith("drafttrain."):
            continue
        text = " ".join(inspect.cleandoc(base.__doc__ or "").partition("Attributes:")[2].split())
        parts = re.split(
            r"(?:^|(?<=[.;)])) ?((?:\w+, )*\w+): ", text
        )  # "names: meaning. names: meaning."
        for names, meaning in zip(parts[1::2], parts[2::2], strict=True):
            found |= dict.fromkeys(names.split(", "), meaning.strip().rstrip(";."))
    return found


def following(config: type) -> set[str]:
    """The fields whose default is the target's."""
    shapes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 1e4,
    }
    target = MagicMock(hidden_size=64, config=SimpleNamespace(**shapes), layers=[SimpleNamespace()])
    return {*config.shapes(target, {}), config.width_field}  # type: ignore[attr-defined]


def options(kind: str) -> Iterator[tuple[object, ...]]:
    config = kind_class(kind).config_class  # type: ignore[attr-defined]
    said = meanings(config)
    from_target = following(config)
    for name, wanted in kinds_of(config).items():
        if name not in ("vocab_size", "loss", "target", "target_layer"):
            inherited = name in from_target or name == "rope_theta"  # which rope_parameters hold
            default = "the target's" if inherited else getattr(config, name, "")
            default = (
                str(default).lower()
                if isinstance(default, bool)
                else ""
                if default in ((), {})
                else default
            )
            yield f"`drafter.{name}`", rule(wanted), default, said.get(name, "")


def flags(command: str) -> Iterator[tuple[object, ...]]:
    function = function_of(command)
    for one in cli_parameters(function):
        kind = signature_kinds(function)[one.name]
        name = one.name
        if not is_word(one) and not is_marked(required(kind), Word):
            name = f"--{spelled(one.name)}"
        wanted = rule(item_of(kind))
        if wanted == rule(bool):
            wanted = ""
        default = one.default
        if is_marked(kind, AnyNumber) or default is None or default is False:
            default = ""
        elif default is one.empty:
            default = "required"
        elif isinstance(default, tuple):
            default = ",".join(map(str, default))
        elif default == sys.executable:
            default = "this interpreter"
        yield (
            f"`{name}`",
            wanted,
            default if isinstance(default, str) else str(default).lower(),
            helps_of(function)[one.name],
        )


FOUR = ("", "value", "default", "meaning")


def config_page() -> str:
    parts = [CONFIG, "## Recipe keys\n", rows(FOUR, keys(TrainConfig))]
    parts += ["## Keys of on_policy\n", rows(FOUR, keys(OnPolicyOptions, "on_policy."))]
    more = (
        "Every other field of transformers `TrainingArguments` that training reads is a key too; its declared type is checked. "
        "A field that only transformers' own `Trainer` reads is refused."
    )
    parts += [f"## Keys of the trainer\n\n{more}\n", rows(FOUR, keys(TrainerKeys)), DRAFTER]
    for kind in kinds():
        if getattr(kind_class(kind), "config_class", None) is not None:
            parts += [f"### {kind}\n", rows(FOUR, options(kind))]
    return "\n".join(parts)


def cli_page() -> str:
    parts = [CLI]
    for command in COMMANDS:
        parts += [f"## drafttrain {command}\n\n{summary_of(command)}\n", rows(FOUR, flags(command))]
    formats = [
        (f"`{kind}`", *line.split(maxsplit=0))
        for kind in shipped_kinds()
        for line in format_lines(kind)
    ]
    parts += [
        "## Formats of export\n",
        rows(("kind", "formats: what is written (engines)"), iter(formats)),
    ]
    read = [(f"`{kind}`", shipping(kind).reads) for kind in shipped_kinds() if shipping(kind).reads]
    parts += ["## Forms that import reads\n", rows(("kind", "form"), iter(read))]
    return "\n".join(parts)


def pages() -> dict[str, str]:
    """The content of each generated page, by its name in docs/reference/."""
    return {"config.md": config_page(), "cli.md": cli_page()}


if __name__ == "__main__":
    for name, text in pages().items():
        (ROOT / "docs" / "reference" / name).write_text(text, encoding="utf-8")
