"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console


def wide_console() -> Console:
    """The terminal; in files and pipes, which have no width, wide enough for our tables."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)
    return console
