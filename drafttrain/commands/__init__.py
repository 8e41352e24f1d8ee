"""The commands: one file each, with one function that is the command line and the Python call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts import App

# Command -> the function of its signature in this folder, whose last lines name the module that runs it.
COMMANDS = {
    "fetch": "fetch:fetch",
    "prompts": "prompts:prompts",
    "generate": "generate:generate",
    "features": "features:features",
    "serve-target": "serve_target:serve_target",
    "recipes": "recipes:recipes",
    "plan": "plan:plan",
    "train": "train:train",
    "adapt": "adapt:adapt",
    "swap": "swap:swap",
    "ngram-store": "count_ngrams:count_ngrams",
    "eval": "eval:evaluate",
    "suites": "suites:suites",
    "tune": "tune:tune",
    "sweep": "sweep:sweep",
    "diagnose": "diagnose:diagnose",
    "estimate": "estimate:estimate",
    "report": "report:report",
    "chat": "chat:chat",
    "trace": "trace:trace",
    "bench-server": "bench_server:bench_server",
    "export": "export:export",
    "import": "import_:import_drafter",
    "doctor": "doctor:doctor",
    "verify": "verify:verify",
    "push": "push:push",
    "push-data": "push_data:push_data",
    "completion": "completion:completion",
}
# Commands that run until they are stopped, or print nothing but their result.
WITHOUT_RESULT = {"serve-target", "completion", "chat"}


def function_of(command: str) -> Callable[..., object]:
    """The function of a command."""
    module, _, name = COMMANDS[command].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def summary_of(command: str) -> str:
    """The first line of a command's help."""
    return (function_of(command).__doc__ or "").splitlines()[0]


def switches_of(command: str) -> dict[str, str]:
    """The flags that a command has beside those of its signature, with their help."""
    from drafttrain.command import SWITCHES

    found = {}
    if command != "chat":  # which is nothing but output
        found["quiet"] = SWITCHES["--quiet"]
    if command not in WITHOUT_RESULT:
        found["json"] = SWITCHES["--json"]
    return found


def app_of(*commands: str) -> App:
    """The command line of these commands."""
    from cyclopts import App, Parameter

    from drafttrain.command import add_to

    app = App(
        name="drafttrain",
        version_flags=(),
        help_format="plaintext",
        default_parameter=Parameter(negative=(), allow_repeating=True, json_list=False),
    )
    for command in commands:
        add_to(app, command, function_of(command), switches_of(command))
    return app
