"""How large the package is, how densely it is written, and where a reader has most to unpack.

    python -m tests.density [FOLDER] [--worst 20]

Size is counted in nodes of the syntax tree, which no formatting, packing or renaming changes. Density is nodes per line of
code (docstrings, comments and blank lines left out), and constructs that a reader must unpack per 1,000 lines.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDE = 110  # columns
LONG = 60  # lines of a function
MANY = 8  # parameters of a function

Function = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Nodes that are a construct to unpack wherever they stand.
CONSTRUCTS = {
    ast.IfExp: "conditional expressions",
    ast.ListComp: "comprehensions",
    ast.SetComp: "comprehensions",
    ast.DictComp: "comprehensions",
    ast.GeneratorExp: "comprehensions",
    ast.Starred: "starred",
    ast.NamedExpr: "assignments in expressions",
}
# Where a condition such as `a or b` is a value, not a test.
VALUE_PLACES = (
    ast.Assign,
    ast.Return,
    ast.keyword,
    ast.Call,
    ast.Subscript,
    ast.BinOp,
    ast.Dict,
    ast.List,
    ast.Tuple,
    ast.FormattedValue,
)
# Comments, and strings, in which a `#` begins none. Python's tokenizer finds the same, in six times the time.
COMMENT_OR_STRING = re.compile(
    r"""#[^\n]*|\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""",
    re.DOTALL,
)
BLANK_LINE = re.compile(r"^\s*$", re.MULTILINE)


@dataclass
class Figures:
    """What was counted in a folder.

    Attributes:
        nodes: of the syntax trees. lines: of the files. code: lines with code. wide: lines over WIDE columns.
        comments: of any kind. constructs: how often each stands in the folder.
        lengths: lines of each function, by place. many: places of functions with over MANY parameters.
        to_unpack: constructs in each function, by place.
    """

    nodes: int = 0
    lines: int = 0
    code: int = 0
    wide: int = 0
    comments: int = 0
    constructs: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, int] = field(default_factory=dict)
    many: list[str] = field(default_factory=list)
    to_unpack: Counter[str] = field(default_factory=Counter)

    def per_line(self) -> float:
        """Nodes per line of code."""
        return self.nodes / self.code

    def per_thousand(self, construct: str) -> float:
        """How often a construct stands in 1,000 lines."""
        return 1000 * self.constructs[construct] / self.lines

    def comments_per_hundred(self) -> float:
        return 100 * self.comments / self.lines

    def wide_share(self) -> float:
        return self.wide / self.lines

    def long_share(self) -> float:
        """The share of functions with over LONG lines."""
        return sum(length > LONG for length in self.lengths.values()) / len(self.lengths)


def construct_of(node: ast.AST, parent: ast.AST | None) -> str:
    """The construct that a reader must unpack at a node; empty for any other."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        return "parallel assignments" if len(node.value.elts) > 1 else ""
    if isinstance(node, ast.BoolOp) and isinstance(parent, VALUE_PLACES):
        plain = all(isinstance(value, ast.Compare | ast.UnaryOp) for value in node.values)
        return "" if plain else "booleans as values"
    return CONSTRUCTS.get(type(node), "")


def code_lines(text: str, found: Figures) -> set[int]:
    """Adds a file's comments; returns the lines with code or a docstring."""

    def kept(match: re.Match[str]) -> str:
        if match[0].startswith("#"):
            found.comments += 1
            return ""
        return BLANK_LINE.sub("-", match[0])  # a line of a string

    bare = COMMENT_OR_STRING.sub(kept, text)
    return {number for number, line in enumerate(bare.split("\n"), 1) if line.strip()}


@functools.cache
def parsed(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, the module first; several tests look at them."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def docstring_lines(node: ast.Module | ast.ClassDef | Function) -> range:
    """The lines of a module's, class's or function's docstring; empty where there is none."""
    if ast.get_docstring(node, clean=False) is None:
        return range(0)
    docstring = node.body[0]
    return range(docstring.lineno, (docstring.end_lineno or 0) + 1)


def count_nodes(tree: ast.AST, file: str, lines: set[int], found: Figures) -> None:
    """Adds a file's nodes, constructs and functions, in one walk; takes the docstrings' lines away."""
    # Nodes to visit: with their parent, and the places of the functions around them.
    waiting: list[tuple[ast.AST, ast.AST | None, tuple[str, ...]]] = [(tree, None, ())]
    while waiting:
        node, parent, around = waiting.pop()
        found.nodes += 1
        if isinstance(node, DOCUMENTED):
            lines.difference_update(docstring_lines(node))
        construct = construct_of(node, parent)
        if construct:
            found.constructs[construct] += 1
            found.to_unpack.update(around)
        if isinstance(node, Function):
            place = f"{file}:{node.lineno} {node.name}"
            around = (*around, place)
            found.lengths[place] = (node.end_lineno or node.lineno) - node.lineno + 1
            # A command's signature has a parameter for each flag.
            parameters = len(node.args.args) + len(node.args.kwonlyargs)
            if parameters > MANY and "commands" not in Path(file).parts:
                found.many.append(place)
        waiting += [(child, node, around) for child in ast.iter_child_nodes(node)]


def measure(folder: Path) -> Figures:
    """The figures of all Python files below a folder."""
    found = Figures()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.lines += text.count("\n")
        found.wide += sum(len(line) > WIDE for line in text.splitlines())
        lines = code_lines(text, found)
        count_nodes(ast.parse(text), str(path.relative_to(folder)), lines, found)
        found.code += len(lines)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "drafttrain")
    parser.add_argument("--worst", type=int, default=20)
    given = parser.parse_args()
    found = measure(given.folder)
    print(
        f"{found.nodes:,} nodes, {found.lines:,} lines, {found.per_line():.1f} nodes per line of code"
    )
    for construct in found.constructs:
        print(f"{found.per_thousand(construct):5.1f} {construct} per 1,000 lines")
    print(f"{100 * found.wide_share():5.1f} % of lines over {WIDE} columns")
    print(f"{found.comments_per_hundred():5.1f} comments per 100 lines")
    print(
        f"{100 * found.long_share():5.1f} % of functions over {LONG} lines; longest {max(found.lengths.values())}"
    )
    print(f"{len(found.many):5} functions with over {MANY} parameters")
    for place, count in found.to_unpack.most_common(given.worst):
        print(f"{count:5} constructs in {found.lengths[place]} lines: {place}")


if __name__ == "__main__":
    main()
