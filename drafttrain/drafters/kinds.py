"""Names of the drafter kinds, from their folders; loads no model code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from drafttrain import drafters
from drafttrain.errors import UserError


def kind_folders(file: str) -> dict[str, Path]:
    """The kinds that have a file, by name: folders in this package and in $DRAFTTRAIN_KINDS.

    Raises:
        UserError: a name that exists twice.
    """
    found: dict[str, Path] = {}
    for place in drafters.__path__:
        for path in sorted(Path(place).glob(f"*/{file}")):
            folder = path.parent
            if folder.name in found:
                raise UserError(
                    f"DRAFTTRAIN_KINDS: kind {folder.name!r} exists twice; rename its folder"
                )
            found[folder.name] = folder
    return dict(sorted(found.items()))


def kinds() -> list[str]:
    """Every kind's name."""
    return list(kind_folders("model.py"))


def untrained_kinds() -> list[str]:
    """The names of all kinds without weights.

    Their packages say UNTRAINED, so that --help needs no model code.
    """
    untrained = []
    for kind in kinds():
        package = importlib.import_module(f"{__package__}.{kind}")
        if getattr(package, "UNTRAINED", False):
            untrained.append(kind)
    return untrained


def baseline_kind() -> tuple[str, str]:
    """The kind that trained drafters are measured against, and the tree in which it drafts."""
    for kind in untrained_kinds():
        package = importlib.import_module(f"{__package__}.{kind}")
        tree = getattr(package, "BASELINE_TREE", "")
        if tree:
            return kind, tree
    raise AssertionError("a kind without weights has a BASELINE_TREE")


def split_name(name: str) -> tuple[str, dict[str, str]]:
    """Splits a drafter's name NAME[:OPTION=VALUE,...][+KIND] into NAME and its options.

    A path that exists has no options.
    """
    first, _, side = name.rpartition("+")
    if first and side.partition(":")[0] in untrained_kinds():
        return split_name(first)
    found = re.fullmatch(r"(.+?):(\w+=[^:/]*)", name)
    if found is None or Path(name).expanduser().exists():
        return name, {}
    options = {}
    for part in found[2].split(","):
        key, _, value = part.partition("=")
        options[key] = value
    return found[1], options
