"""The commands: one file each, with one function that is the command line and the Python call."""

from __future__ import annotations

import importlib
from collections.abc import Callable

# Command -> module and function. The others still have an argparse parser.
SIGNATURES = {
    "fetch": "fetch:fetch",
    "prompts": "prompts:prompts",
    "generate": "generate:generate",
    "features": "features:features",
    "serve-target": "serve_target:serve_target",
    "recipes": "recipes:recipes",
    "plan": "plan:plan",
    "adapt": "adapt:adapt",
    "ngram-store": "count_ngrams:count_ngrams",
    "eval": "eval:evaluate",
    "tune": "tune:tune",
    "sweep": "sweep:sweep",
    "diagnose": "diagnose:diagnose",
    "estimate": "estimate:estimate",
    "report": "report:report",
    "trace": "trace:trace",
    "bench-server": "bench_server:bench_server",
    "chat": "chat:chat",
    "export": "export:export",
    "import": "import_:import_drafter",
    "verify": "verify:verify",
    "push": "push:push",
    "push-data": "push_data:push_data",
}


def function_of(command: str) -> Callable[..., object]:
    """The function of a command."""
    module, _, name = SIGNATURES[command].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
