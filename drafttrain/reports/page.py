"""Self-contained HTML pages: rendering templates and writing files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from drafttrain.environment import __version__
from drafttrain.errors import UserError


@cache
def _environment() -> Environment:
    loader = PackageLoader("drafttrain.reports", "templates")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)


def render_page(template: str, **content: object) -> str:
    """Renders a page of templates/ with everything inside it, so that it opens without a network."""
    return _environment().get_template(template).render(version=__version__, **content)


def write_page(path: Path, page: str) -> None:
    """Writes a page. Raises UserError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"output={str(path)!r} cannot be written ({error.strerror}); choose another place") from error
