"""Names of the drafter kinds, from their folders; loads no model code."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path

from drafttrain import drafters
from drafttrain.errors import UserError


def kind_folders(file: str) -> dict[str, Path]:
    """The kinds that have a file, by name: folders in this package and in $DRAFTTRAIN_KINDS.

    Raises:
        UserError: a name that exists twice.
    """
    found = [
        path.parent
        for folder in drafters.__path__
        for path in sorted(Path(folder).glob(f"*/{file}"))
    ]
    twice = [name for name, times in Counter(folder.name for folder in found).items() if times > 1]
    if twice:
        raise UserError(f"DRAFTTRAIN_KINDS: kind {twice[0]!r} exists twice; rename its folder")
    return {folder.name: folder for folder in sorted(found, key=lambda folder: folder.name)}


def kinds() -> list[str]:
    """Every kind's name."""
    return list(kind_folders("model.py"))


def untrained_kinds() -> list[str]:
    """The names of all kinds without weights: their packages say UNTRAINED, so that --help needs no
    model code.
    """
    return [
        kind
        for kind in kinds()
        if getattr(importlib.import_module(f"{__package__}.{kind}"), "UNTRAINED", False)
    ]


def names_help() -> str:
    """The names of drafters, for the help of commands."""
    kinds = ", ".join(untrained_kinds())
    return f"a drafter's folder or Hub id, also with :OPTION=VALUE, KIND or KIND:OPTIONS ({kinds}), or FOLDER+KIND"


def split_name(name: str) -> tuple[str, dict[str, str]]:
    """(NAME, options) of a drafter's name NAME[:OPTION=VALUE,...][+KIND]; a path that exists is no
    option.
    """
    first, _, side = name.rpartition("+")
    if first and side.partition(":")[0] in untrained_kinds():
        return split_name(first)
    found = re.fullmatch(r"(.+?):(\w+=[^:/]*)", name)
    if found is None or Path(name).expanduser().exists():
        return name, {}
    parts = (part.partition("=") for part in found[2].split(","))
    return found[1], {key: value for key, _, value in parts}
