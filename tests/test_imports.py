"""Imports point one way, and no module of ours hides a package when a script puts its folder on the path."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drafttrain.drafters.base import kinds

PACKAGE = Path(__file__).resolve().parents[1] / "drafttrain"

# What each room may import besides itself and the modules that belong to nobody (errors, batch, target).
ROOMS = {
    "ops": set(),
    "losses": {"ops"},
    "drafters": {"ops", "losses"},
    "data": {"ops"},
    "training": {"ops", "losses", "drafters", "data"},
    "decode": {"ops", "losses", "drafters", "data"},
    "hub": {"ops", "losses", "drafters", "data", "training", "decode", "evaluation"},
    "evaluation": {"ops", "losses", "drafters", "data", "training", "decode"},
}
COMMON = {"errors", "files", "progress", "environment", "batch", "target", "target_attention", "target_native"}
# Exceptions, each with its reason.
ALLOWED = {
    ("target", "hub.fetch"),  # a short name is looked up in the cache; imported when a target is loaded
    ("target", "ops"),  # packed linear layers
    ("target", "target_native"),
    ("target", "target_attention"),
    ("target_native", "target_attention"),
    ("target_attention", "ops"),
    ("target_attention", "errors"),
    ("target_native", "ops"),
    ("target_native", "batch"),
    ("ops", "files"),  # built kernels are kept in the cache folder
    ("target", "batch"),
    ("target", "errors"),
    ("files", "errors"),
    ("batch", "errors"),
}


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name below drafttrain, and file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name.removesuffix(".__init__").removesuffix("__init__"), path


def imported(path: Path, name: str) -> Iterator[str]:
    """Dotted names below drafttrain that a file imports anywhere, in functions too."""
    package = ["drafttrain", *name.split(".")]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = package[: len(package) - node.level + (path.name == "__init__.py")] if node.level else []
            module = ".".join([*here, *([node.module] if node.module else [])])
            # `from drafttrain.data import store` imports the module store, `from drafttrain.errors import X` does not.
            found = [
                f"{module}.{alias.name}" if is_module(f"{module}.{alias.name}") else module for alias in node.names
            ]
        else:
            continue
        yield from (target.removeprefix("drafttrain.") for target in found if target.startswith("drafttrain."))


def is_module(dotted: str) -> bool:
    path = PACKAGE.parent.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def violations() -> Iterator[str]:
    for name, path in modules():
        room = name.split(".")[0]
        for target in imported(path, name):
            goal = target.split(".")[0]
            if room in ROOMS:
                fine = goal == room or goal in COMMON or goal in ROOMS[room]
            elif room in COMMON:
                fine = (room, target) in ALLOWED or (room, goal) in ALLOWED
            else:  # the entry points (cli, train, config) may use everything
                fine = goal != "cli"
            if not fine:
                yield f"drafttrain.{name} imports drafttrain.{target}"


def test_imports_point_one_way():
    assert list(violations()) == []


def test_every_room_has_its_rule():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= set(ROOMS), f"say in ROOMS what {folders - set(ROOMS)} may import"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from drafttrain.decode.engine import X", ["decode.engine"]),
        ("import drafttrain.decode.engine", ["decode.engine"]),
        ("def f():\n    from drafttrain import target", ["target"]),
        ("from ..errors import UserError", ["errors"]),
        ("from . import slots", ["data.slots"]),
        ("import torch", []),
    ],
)
def test_the_reader_of_imports(tmp_path, source, expected):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(imported(path, "data.module")) == expected


def test_no_module_hides_a_package():
    """`accelerate launch drafttrain/train.py` puts drafttrain/ first on sys.path."""
    ours = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    # Build and test leavings that some wheels install at top level are imported by nobody.
    installed = set(importlib.metadata.packages_distributions()) - {"tests", "test", "examples", "benchmarks", "docs"}
    taken = (set(sys.stdlib_module_names) | installed) - {"drafttrain"}
    assert ours & taken == set()


# Words that are kinds' names and stand for something else there, or that cannot be asked for.
OTHER_WORDS = {
    ("cli", "ngram"),  # the command ngram-store, which writes what a kind reads
    ("data", "ngram"),  # runs of words that texts share
    ("config", "eagle3"),  # what a recipe trains that names no kind
}


def named_kinds() -> Iterator[str]:
    """Strings that name a kind, other than docstrings and a command's HELP (examples), outside the kinds' own files."""
    names = kinds()
    for module, path in modules():
        room, last = module.split(".")[0], module.split(".")[-1]
        if room == "hub" or any(kind in last for kind in names):
            continue
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and any(getattr(goal, "id", "") == "HELP" for goal in node.targets):
                prose |= {id(part) for part in ast.walk(node.value)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                found = set(re.findall(r"[a-z0-9_]+", node.value)) & set(names)
                yield from (f"{module}:{node.lineno} names {kind}" for kind in found if (room, kind) not in OTHER_WORDS)


def test_no_kind_is_named_outside_its_own_files():
    """Adding a kind is adding a file: what others need to know about kinds, they ask them. hub/ has a file per kind."""
    assert list(named_kinds()) == []
