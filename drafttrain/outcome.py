"""How a command ends: what it wrote, the command that follows, and its result as JSON; --quiet and --json."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from drafttrain.credentials import redact
from drafttrain.errors import UserError

# Flags that a following command needs as well; left out where they have their default.
CARRIED = {"dtype": "auto", "device": "auto", "trust_remote_code": False, "chat_template_kwargs": {}}
_ended: list[dict[str, object]] = []  # what the running command said at its end
_errors: list[TextIO] = []  # where errors go while --quiet silences stderr


def next_command(command: str, *words: str, carry: argparse.Namespace | None = None, **flags: object) -> str:
    """A command line to copy.

    Args:
        words: positional arguments. carry: the flags of this command, of which the next takes those of CARRIED.
        flags: --name value; True stands for the flag alone, an empty value leaves it out.
    """
    kept = {name: value for name, value in vars(carry or argparse.Namespace()).items() if name in CARRIED}
    flags |= {name: value for name, value in kept.items() if value != CARRIED[name]}
    line = ["drafttrain", command, *words]
    for name, value in flags.items():
        if value not in (None, False, "", {}, []):
            texts = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else str(value)]
            line += [f"--{name.replace('_', '-')}", *([] if value is True else texts)]
    return shlex.join(line)


def conclude(result: Mapping[str, object], wrote: Sequence[str | Path] = (), then: str = "") -> None:
    """Ends a command's output with a line for each file or folder that it wrote, and one for the next command.

    Args:
        result: what --json prints. then: of `next_command`.
    """
    for path in wrote:
        print(f"wrote {path}")
    if then:
        print(f"next: {then}")
    sys.stdout.flush()
    _ended[:] = [{"wrote": [str(path) for path in wrote], "next": then, "result": result}]


def fault(line: str) -> None:
    """Prints a line that --quiet does not silence: why a command that ran to its end has failed."""
    print(line, file=_errors[-1] if _errors else sys.stderr, flush=True)


@contextlib.contextmanager
def voice(command: str, quiet: bool, as_json: bool) -> Iterator[None]:
    """Runs a command as --quiet and --json ask: quiet shows errors only, as_json one JSON object alone on stdout."""
    _ended.clear()
    if not (quiet or as_json):
        yield
        return
    answer: dict[str, object] = {}
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(open(os.devnull, "w", encoding="utf-8")) if quiet else sys.stderr
        _errors.append(sys.stderr)
        stack.callback(_errors.pop)
        stack.enter_context(_moved_stdout(sink.fileno() if quiet else 2))
        stack.enter_context(contextlib.redirect_stdout(sink))
        stack.enter_context(contextlib.redirect_stderr(sink))
        try:
            yield
            answer = _ended[0] if _ended else {}
        except UserError as error:
            answer = {"error": str(error)}
            raise
        finally:
            stack.close()
            if as_json and answer:
                print(json.dumps(redact({"command": command, **answer}), ensure_ascii=False, default=str), flush=True)


@contextlib.contextmanager
def _moved_stdout(to: int) -> Iterator[None]:
    """Sends what libraries and child processes write to descriptor 1 to another one."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(to, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
