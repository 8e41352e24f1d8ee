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
    """The terminal, or as wide as COLUMNS says; files and pipes without it get 140 columns."""
    console = plain_console()
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = 140
    return console


class FoldingTable(Table):
    """A table that shows all of its columns, on a narrow console in parts.

    Each part begins with the first column.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = self.title
        for columns in self._parts(console, options):
            part = copy.copy(self)
            part.columns = [replace(column, _index=index) for index, column in enumerate(columns)]
            part.title = title
            title = None  # of the first part alone
            yield from Table.__rich_console__(part, console, options)

    def _parts(self, console: Console, options: ConsoleOptions) -> Iterator[list[Column]]:
        wide = options.update_width(MOST_WIDTH)
        needed = []  # width of each column with padding and a line
        for column in self.columns:
            size = self._measure_column(console, wide, column)
            needed.append(1 + (size.maximum if column.no_wrap else size.minimum))

        part = [self.columns[0]]
        width = needed[0] + 1
        for column, more in zip(self.columns[1:], needed[1:], strict=True):
            if len(part) > 1 and width + more > options.max_width:
                yield part
                part = [self.columns[0]]
                width = needed[0] + 1
            part.append(column)
            width += more
        yield part


def table_of(
    headings: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    title: str = "",
    right: bool = False,
) -> Table:
    """A table with its title at the left.

    Args:
        right: align all columns but the first right and never wrap them; the title is bold.
    """
    table = FoldingTable(title=title or None, title_justify="left")
    table.add_column(headings[0])
    for heading in headings[1:]:
        if right:
            table.add_column(heading, justify="right", no_wrap=True)
        else:
            table.add_column(heading)
    if right:
        table.title_style = "bold"
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
