"""The size and density of the code base, as numbers that a change may not make worse.

`python tests/test_structure.py [FOLDER]` prints the figures of a checkout.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.density import measure, parsed
from tests.files import ROOT

# Size and density of the package, by the arithmetic of tests/density.py. Size falls when mechanisms go, not by packing.
MOST_NODES = 440_700
MOST_TEST_NODES = 408_400
MOST_PER_LINE = 8.55  # nodes per line of code
MOST_PER_THOUSAND = {  # lines
    "conditional expressions": 10,
    "parallel assignments": 4,
    "comprehensions": 20,
    "booleans as values": 4,
    "starred": 5,
    "assignments in expressions": 1,
}
LEAST_COMMENTS = 5.0  # per 100 lines
MOST_WITH_MANY_PARAMETERS = 12
MOST_ANY = 250  # annotations that say Any: JSON and what libraries leave untyped
# Module names that may occur once per drafter kind, and the marker of a package.
SHARED_NAMES = {"model", "export", "config", "__init__"}


def python_files(root: Path = ROOT) -> list[Path]:
    return sorted((root / "drafttrain").rglob("*.py"))


def annotations(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            yield from (
                argument.annotation
                for argument in every
                if argument is not None and argument.annotation
            )
            if node.returns is not None:
                yield node.returns
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation


def any_count(root: Path = ROOT) -> int:
    """How often an annotation says Any."""
    trees = (parsed(path) for path in python_files(root))
    parts = (part for tree in trees for note in annotations(tree) for part in ast.walk(note))
    return sum(isinstance(part, ast.Name) and part.id == "Any" for part in parts)


def duplicate_classes(root: Path = ROOT) -> list[str]:
    names: Counter[str] = Counter()
    for path in python_files(root):
        names.update(node.name for node in parsed(path) if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in names.items() if count > 1)


def duplicate_modules(root: Path = ROOT) -> list[str]:
    # A file in commands/ has its command's name, as the module that does its work may have.
    files = [path for path in python_files(root) if path.parent.name != "commands"]
    names = Counter(path.stem for path in files)
    return sorted(name for name, count in names.items() if count > 1 and name not in SHARED_NAMES)


# Readers that belong to libraries' own layouts, or to messages between our own processes.
UNCHECKED_JSON = {"weights.py", "registry.py", "model.py", "engine_runs.py"}


def unchecked_json(root: Path = ROOT) -> list[str]:
    """Places that parse a file's JSON without the checks of files.py: json.load, or json.loads of a read_text()."""
    found = []
    for path in python_files(root):
        if "json.load" not in path.read_text():
            continue
        for node in parsed(path):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and "json" in ast.dump(node.func)
            ):
                continue
            reads = any(
                isinstance(part, ast.Attribute) and part.attr == "read_text"
                for part in ast.walk(node)
            )
            if node.func.attr == "loads" and reads and path.name not in UNCHECKED_JSON:
                found.append(f"{path.relative_to(root)}:{node.lineno}")
    return found


# An import that may name a test module; most files have none, and need not be parsed.
NAMES_A_TEST_MODULE = re.compile(r"from [\w.]*\btest_\w+ import|import \(?[^)]*?\btest_\w+")


def imports_of_tests() -> Iterator[str]:
    """Imports of a test module: by another test module, a helper or a script."""
    folders = (ROOT / "tests", ROOT / "scripts", ROOT / "eval")
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    for path in files:
        if not NAMES_A_TEST_MODULE.search(path.read_text()):
            continue
        for node in parsed(path):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                parts = name.split(".")
                module = ROOT.joinpath(*parts).with_suffix(".py")
                if parts[-1].startswith("test_") and module.is_file():
                    yield f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"


def test_no_module_imports_from_a_test_module():
    """What tests share stands in conftest.py or in a helper module."""
    assert list(imports_of_tests()) == []


def test_json_files_are_read_with_checks():
    assert unchecked_json() == []


def test_consoles_show_users_text_as_it_is():
    made = [path.name for path in python_files() if re.search(r"\bConsole\(", path.read_text())]
    assert made == ["progress.py"]


@pytest.fixture(scope="module")
def package():
    return measure(ROOT / "drafttrain")


@pytest.mark.thorough
@pytest.mark.parametrize("construct", MOST_PER_THOUSAND)
def test_a_statement_does_one_thing(package, construct):
    found = package.per_thousand(construct)
    worst = package.to_unpack.most_common(5)
    assert found <= MOST_PER_THOUSAND[construct], worst


@pytest.mark.thorough
def test_lines_breathe(package):
    assert package.nodes <= MOST_NODES
    assert package.per_line() <= MOST_PER_LINE
    assert package.wide_share() <= 0.01
    assert package.comments_per_hundred() >= LEAST_COMMENTS


@pytest.mark.thorough
def test_functions_stay_short(package):
    assert max(package.lengths.values()) <= 120
    assert package.long_share() <= 0.03
    assert len(package.many) <= MOST_WITH_MANY_PARAMETERS, package.many


@pytest.mark.thorough
def test_tests_breathe():
    tests = measure(ROOT / "tests")
    assert tests.nodes <= MOST_TEST_NODES
    assert tests.per_line() <= 9.05
    assert tests.per_thousand("parallel assignments") <= 6


@pytest.mark.thorough
def test_types_are_written_out():
    assert any_count() <= MOST_ANY


@pytest.mark.thorough
def test_a_name_means_one_thing():
    assert duplicate_classes() == []
    assert duplicate_modules() == []


def test_the_core_can_be_read():
    """docs/architecture.md names the core's files in reading order."""
    section = (
        (ROOT / "docs" / "architecture.md")
        .read_text()
        .partition("## Reading order of the core\n")[2]
    )
    block = section.split("```text\n")[1].partition("```")[0]
    files = [ROOT / "drafttrain" / line.split()[0] for line in block.splitlines() if line.strip()]
    assert len(files) >= 15
    assert all(path.is_file() for path in files)


if __name__ == "__main__":
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    print(f"Any in annotations: {any_count(root)}")
    print(f"class names used twice: {', '.join(duplicate_classes(root)) or 'none'}")
    print(f"module names used twice: {', '.join(duplicate_modules(root)) or 'none'}")
