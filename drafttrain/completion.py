"""`drafttrain completion`: a script that completes the command line in a shell."""

from __future__ import annotations

import argparse
import itertools

from drafttrain.cli import COMMANDS, command_parser
from drafttrain.errors import UserError
from drafttrain.values import File, Name, Place, rule

_PATHS = {rule(Name), rule(Place), rule(File)}


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises UserError: the package that writes the script is missing."""
    try:
        import shtab
    except ImportError as error:
        raise UserError(
            "completion needs the package shtab; run: python -m pip install shtab"
        ) from error
    parser = command_parser(tuple(COMMANDS))
    commands = next(
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    for action in itertools.chain.from_iterable(
        command._actions for command in commands.choices.values()
    ):
        if getattr(action.type, "rule", "") in _PATHS:
            action.complete = shtab.FILE  # where shtab looks for it
    print(shtab.complete(parser, args.shell))
    return 0
