"""Texts of several lines that commands print: Jinja templates beside the code that has their values.

Filters write a value as another program reads it: `json`, `yaml`, `shell` (a word), `words`, `flags`.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


@functools.cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not before a --help

    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "flags": _flag_lines,
        "json": json.dumps,
        "shell": shlex.quote,
        "words": shlex.join,
        "yaml": _yaml_value,
    }
    return made


def fill_template(template: str, **values: object) -> str:
    """The text of a template, without a line break at its end.

    Args:
        template: its file in the package, such as `export/templates/vllm.jinja`.
    """
    return _templates().get_template(template).render(values).rstrip("\n")


def _flag_lines(settings: Mapping[str, object]) -> str:
    """Settings as flags, the first on the command's line, then two a line."""
    flags = []
    for flag, value in settings.items():
        word = f"--{flag}"
        if value != "":  # a flag alone
            word += f" {shlex.quote(str(value))}"
        flags.append(word)
    lines = [flags[0]]
    for first in range(1, len(flags), 2):
        lines.append(" ".join(flags[first : first + 2]))
    return " \\\n  ".join(lines)


def _yaml_value(value: object) -> object:
    """A value on one line of YAML; names that may hold anything are quoted."""
    if isinstance(value, str) and not re.fullmatch(r"[\w./-]+", value):
        return json.dumps(value)
    return value
