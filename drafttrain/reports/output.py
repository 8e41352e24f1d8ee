"""What commands show: tables on a console, and self-contained HTML pages."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table

from drafttrain.environment import __version__
from drafttrain.progress import plain_console

MOST_WIDTH = 10_000  # columns of text, for measuring


def wide_console() -> Console:
    """The terminal, or as wide as COLUMNS says; files and pipes, which have no width, get 140
    columns.
    """
    console = plain_console()
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = 140
    return console


class FoldingTable(Table):
    """A table that shows all of its columns: where the console is too narrow, in parts that each
    begin with the first column.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, columns in enumerate(self._parts(console, options)):
            part = copy.copy(self)
            part.columns = [replace(column, _index=index) for index, column in enumerate(columns)]
            part.title = None if number else self.title
            yield from Table.__rich_console__(part, console, options)

    def _parts(self, console: Console, options: ConsoleOptions) -> Iterator[list[Column]]:
        wide = options.update_width(MOST_WIDTH)
        # Widths with padding and a line; of a column that does not wrap, of its longest cell.
        sizes = [
            (column.no_wrap, self._measure_column(console, wide, column)) for column in self.columns
        ]
        needed = [1 + (size.maximum if no_wrap else size.minimum) for no_wrap, size in sizes]
        part = [0]
        width = needed[0] + 1
        for index in range(1, len(self.columns)):
            if len(part) > 1 and width + needed[index] > options.max_width:
                yield [self.columns[kept] for kept in part]
                part = [0]
                width = needed[0] + 1
            part.append(index)
            width += needed[index]
        yield [self.columns[kept] for kept in part]


def table_of(
    headings: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    title: str = "",
    right: bool = False,
) -> Table:
    """A table with its title at the left. right: align all columns but the first right and never
    wrap them.
    """
    columns = [
        Column(heading, justify="right", no_wrap=True) if right else heading
        for heading in headings[1:]
    ]
    table = FoldingTable(
        headings[0],
        *columns,
        title=title or None,
        title_justify="left",
        title_style="bold" if right else None,
    )
    for row in rows:
        table.add_row(*row)
    return table


def render_page(template: str, **content: object) -> str:
    """Renders a page of templates/ with everything inside it, so that it opens without a network."""
    loader = PackageLoader("drafttrain.reports", "templates")
    pages = Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return pages.get_template(template).render(version=__version__, **content)
