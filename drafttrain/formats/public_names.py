"""Names as others may see them: no local paths in what is exported, published or measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar, cast

from drafttrain.files import write_json
from drafttrain.target.fetch import MODELS

T = TypeVar("T")


def public_name(name: str) -> str:
    """A model's name outside this machine: the Hub id of a short name, a Hub id unchanged, the last
    part of a path.
    """
    if name in MODELS:
        return MODELS[name].repo
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return name
    return Path(name).name


def shorten(value: T) -> T:
    """Reduces local paths to their last part, in a string or in every string of a JSON value.

    A path begins like one, has more than one slash, or exists on this disk; a Hub id and a URL are
    no paths.
    """
    made: object = value
    if isinstance(value, dict):
        made = {key: shorten(item) for key, item in value.items()}
    elif isinstance(value, list):
        made = [shorten(item) for item in value]
    elif isinstance(value, str):
        made = _shorten_text(value)
    return cast(T, made)


def _shorten_text(text: str) -> str:
    if "/" not in text or "://" in text or any(c.isspace() for c in text):
        return text
    # KEY=PATH+KIND, as in command lines and drafters' names
    head, equals, tail = text.rpartition("=")
    name, plus, kind = tail.partition("+")
    path = Path(name).expanduser()
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists():
        name = path.name
    return head + equals + name + plus + kind


def write_clean_json(path: Path, content: dict[str, object]) -> None:
    """Writes JSON without local paths; raises UserError if the file cannot be written."""
    write_json(path, shorten(content))
