"""Imports point one way, and no module of ours hides a package when a script puts its folder on the path."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drafttrain.drafters.registry import kinds
from tests.density import parsed
from tests.files import ROOT

PACKAGE = ROOT / "drafttrain"

# From bottom to top. A subpackage or top-level module imports from its own and from earlier rows, never from its own row's
# neighbours or from later ones. There are no exceptions; imports inside functions count too.
ORDER = [
    ["credentials", "interrupts"],
    ["errors"],
    ["values", "extras", "plain_yaml", "texts"],
    ["files", "environment", "batch", "progress"],
    ["outcome", "images"],
    ["recipes"],
    ["config", "folders", "sequence_parallel"],
    ["ops", "inside_vllm"],
    ["losses", "target"],
    ["formats"],
    ["drafters"],
    ["flags", "command"],
    ["inference"],
    ["data"],
    ["states"],
    ["evaluation"],
    ["training"],
    ["reports"],
    ["tuning"],
    ["export"],
    ["serving"],
    ["hub"],
    ["train", "watch"],
    ["adapt"],
    ["api"],
    ["trl_callback"],
    ["commands"],
    ["cli"],
    ["__main__"],
]
ROW = {name: row for row, names in enumerate(ORDER) for name in names}


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name below drafttrain, and file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name.removesuffix(".__init__").removesuffix("__init__"), path


def imported(path: Path, name: str) -> Iterator[str]:
    """Dotted names below drafttrain that a file imports anywhere, in functions too."""
    package = ["drafttrain", *name.split(".")]
    for node in parsed(path):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = (
                package[: len(package) - node.level + (path.name == "__init__.py")]
                if node.level
                else []
            )
            module = ".".join([*here, *([node.module] if node.module else [])])
            # `from drafttrain.data import store` imports the module store, `from drafttrain.errors import X` does not.
            found = [
                f"{module}.{alias.name}" if is_module(f"{module}.{alias.name}") else module
                for alias in node.names
            ]
        else:
            continue
        yield from (
            target.removeprefix("drafttrain.")
            for target in found
            if target.startswith("drafttrain.")
        )


@functools.cache
def is_module(dotted: str) -> bool:
    path = PACKAGE.parent.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def violations() -> Iterator[str]:
    for name, path in modules():
        here = name.split(".")[0]
        if not here:  # drafttrain/__init__.py names what it loads on first use
            continue
        for found in imported(path, name):
            there = found.split(".")[0]
            if there != here and ROW[there] >= ROW[here]:
                yield f"drafttrain.{name} imports drafttrain.{found}"


@pytest.mark.thorough
def test_imports_point_one_way():
    assert list(violations()) == []


def test_every_subpackage_has_a_row():
    names = {name.split(".")[0] for name, _ in modules()} - {""}
    assert names == set(ROW), f"give {names ^ set(ROW)} a row in ORDER"


def subpackage_cycles() -> Iterator[str]:
    """Modules that import each other, directly or through others, inside one subpackage or across them."""
    graph = {
        name: {found for found in imported(path, name) if found} for name, path in modules() if name
    }
    for start in graph:
        seen = set()
        todo = list(graph[start])
        while todo:
            name = todo.pop()
            if name == start:
                yield start
                break
            if name not in seen:
                seen.add(name)
                todo += graph.get(name, ())


@pytest.mark.thorough
def test_no_module_imports_itself_through_others():
    assert list(subpackage_cycles()) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from drafttrain.inference.engine import X", ["inference.engine"]),
        ("import drafttrain.inference.engine", ["inference.engine"]),
        ("def f():\n    from drafttrain import target", ["target"]),
        ("from ..errors import UserError", ["errors"]),
        ("from . import store", ["data.store"]),
        ("import torch", []),
    ],
)
def test_the_reader_of_imports(tmp_path, source, expected):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(imported(path, "data.module")) == expected


def test_no_module_hides_a_package():
    """`accelerate launch drafttrain/train.py` puts drafttrain/ first on sys.path."""
    ours = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.name for path in PACKAGE.iterdir() if path.is_dir()
    }
    # Build and test leavings that some wheels install at top level are imported by nobody.
    installed = set(importlib.metadata.packages_distributions()) - {
        "tests",
        "test",
        "examples",
        "benchmarks",
        "docs",
    }
    taken = (set(sys.stdlib_module_names) | installed) - {"drafttrain"}
    assert ours & taken == set()


# Words that are kinds' names and stand for something else there, or that cannot be asked for.
OTHER_WORDS = {
    ("commands", "ngram"),  # the command ngram-store, which writes what a kind reads
    ("folders", "ngram"),
    ("data", "ngram"),  # runs of words that texts share
    ("target", "mtp"),  # the prefix of prediction modules in published targets
    ("inside_vllm", "eagle3"),  # a method of vLLM's
    ("config", "eagle3"),  # what a recipe trains that names no kind
}


def named_kinds() -> Iterator[str]:
    """Strings that name a kind, other than docstrings (examples), outside the kinds' own files."""
    names = kinds()
    for module, path in modules():
        here = module.split(".")[0]
        if here == "drafters" and any(kind in module for kind in names):
            continue
        nodes = parsed(path)
        prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in prose
            ):
                found = set(re.findall(r"[a-z0-9_]+", node.value)) & set(names)
                yield from (
                    f"{module}:{node.lineno} names {kind}"
                    for kind in found
                    if (here, kind) not in OTHER_WORDS
                )


@pytest.mark.thorough
def test_no_kind_is_named_outside_its_own_files():
    """Adding a kind is adding a file: what others need to know about kinds, they ask them. A kind is a folder."""
    assert list(named_kinds()) == []
