"""The console that tables are printed on."""

from __future__ import annotations

from rich.console import Console


def wide_console() -> Console:
    """The terminal; files and pipes, which have no width, get at least 140 columns."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)
    return console
