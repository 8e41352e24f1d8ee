"""`drafttrain completion`: a script that completes the command line in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from drafttrain.cli import COMMANDS, command_parser
from drafttrain.errors import UserError
from drafttrain.values import File, Name, Place, rule

_PATHS = {rule(Name), rule(Place), rule(File)}


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises UserError: the package that writes the script is missing."""
    try:
        import shtab
    except ImportError as error:
        raise UserError("completion needs the package shtab; run: python -m pip install shtab") from error
    parser = command_parser(tuple(COMMANDS))
    for action in values_of(parser):
        if getattr(action.type, "rule", "") in _PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    print(shtab.complete(parser, args.shell))
    return 0


def values_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The flags and arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        for command in (action.choices or {}).values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from values_of(command)
