"""What commands show: tables on a console, and self-contained HTML pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console, RenderableType
from rich.table import Column, Table

from drafttrain.environment import __version__
from drafttrain.progress import plain_console


def wide_console() -> Console:
    """The terminal; files and pipes, which have no width, get at least 140 columns."""
    console = plain_console()
    if not console.is_terminal:
        console.width = max(console.width, 140)
    return console


def table_of(
    headings: Sequence[str], rows: Iterable[Sequence[RenderableType]], title: str = "", right: bool = False
) -> Table:
    """A table with its title at the left. right: align all columns but the first right and never wrap them."""
    columns = [Column(heading, justify="right", no_wrap=True) if right else heading for heading in headings[1:]]
    table = Table(
        headings[0], *columns, title=title or None, title_justify="left", title_style="bold" if right else None
    )
    for row in rows:
        table.add_row(*row)
    return table


def render_page(template: str, **content: object) -> str:
    """Renders a page of templates/ with everything inside it, so that it opens without a network."""
    loader = PackageLoader("drafttrain.reports", "templates")
    pages = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return pages.get_template(template).render(version=__version__, **content)
