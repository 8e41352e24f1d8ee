"""Self-contained HTML pages: templates, the style they share, and writing them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from drafttrain.environment import __version__
from drafttrain.errors import UserError


@cache
def _environment() -> Environment:
    loader = PackageLoader("drafttrain.reports", "templates")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)


def render_page(template: str, **content: Any) -> str:
    """A page of templates/, with everything it needs inside: it opens without a network."""
    return _environment().get_template(template).render(version=__version__, **content)


def write_page(path: Path, page: str) -> None:
    """Raises UserError where the place cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"output={str(path)!r} cannot be written ({error.strerror}); choose another place") from error
