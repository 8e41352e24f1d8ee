"""Runs a notebook's cells in one plain Python process: `python scripts/run_notebook.py docs/tutorials/tour.ipynb --write`.

--write stores what the cells print and return, shortened, in the notebook. `name=value` arguments replace the values of names
that the first code cell assigns, so that a test runs the same cells with a tiny target.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
from pathlib import Path

# of a cell's stored output
MOST_LINES = 14
MOST_WIDTH = 160


def run_cell(source: str, names: dict[str, object]) -> str:
    """Runs a cell; returns what it printed, and the repr of a last expression as notebooks show it."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
            if value is not None:
                print(repr(value))
    return text.getvalue()


def shorten(text: str) -> str:
    """The first and last lines of an output, each cut to MOST_WIDTH."""
    lines = [
        line if len(line) <= MOST_WIDTH else f"{line[: MOST_WIDTH - 3]}..."
        for line in text.splitlines()
    ]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES // 2], "...", *lines[-MOST_LINES // 2 :]]
    return "\n".join(lines)


def run(path: Path, replaced: dict[str, object], write: bool = False) -> dict[str, object]:
    """Runs the code cells of a notebook in order; returns their names. replaced: values for names of the first code cell."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, object] = {"__name__": "notebook"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        text = shorten(run_cell("".join(cell["source"]), names))
        if number == 1:
            if unknown := replaced.keys() - names.keys():
                raise SystemExit(
                    f"{path}: the first code cell assigns no {', '.join(sorted(unknown))}"
                )
            names |= replaced
        output = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell |= {"execution_count": number, "outputs": [output] if text else []}
    if write:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return names


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("replaced", nargs="*", metavar="name=value")
    given = parser.parse_args()
    run(given.notebook, dict(word.split("=", 1) for word in given.replaced), given.write)
