"""Self-contained HTML pages."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from drafttrain.environment import __version__


@cache
def _environment() -> Environment:
    loader = PackageLoader("drafttrain.reports", "templates")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)


def render_page(template: str, **content: object) -> str:
    """Renders a page of templates/ with everything inside it, so that it opens without a network."""
    return _environment().get_template(template).render(version=__version__, **content)
