"""How a command ends: what it wrote, the command that follows, and its result as JSON; --quiet and
--json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO, TypedDict

from drafttrain.credentials import redact
from drafttrain.errors import UserError
from drafttrain.progress import hushed

# Flags that a following command needs as well; left out where they have their default.
CARRIED = {
    "dtype": "auto",
    "device": "auto",
    "trust_remote_code": False,
    "chat_template_kwargs": {},
}
logger = logging.getLogger("drafttrain")


class Outcome(TypedDict):
    """What a command says at its end; see `conclude`."""

    wrote: list[str]
    next: str
    result: Mapping[str, Any]


_words: ContextVar[Sequence[str]] = ContextVar("words", default=())  # of the running command
_ended: ContextVar[Outcome | None] = ContextVar("ended", default=None)  # of the running command
_hushing = threading.Lock()
_errors: list[TextIO] = []  # where errors go while --quiet silences stderr


def next_command(
    command: str,
    *words: str,
    carry: argparse.Namespace | None = None,
    **flags: object,
) -> str:
    """A command line to copy.

    Args:
        words: positional arguments. carry: the flags of this command, of which the next takes those
            of CARRIED.
        flags: --name value; True stands for the flag alone, an empty value leaves it out.
    """
    if carry is not None:
        for name, value in vars(carry).items():
            if name in CARRIED and value != CARRIED[name]:
                flags[name] = value
    line = ["drafttrain", command, *words]
    for name, value in flags.items():
        if value in (None, False, "", {}, []):
            continue
        line.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list):
            line += value
        elif isinstance(value, dict):
            line.append(json.dumps(value))
        elif value is not True:
            line.append(str(value))
    return shlex.join(line)


@contextlib.contextmanager
def commanded(words: Sequence[str]) -> Iterator[None]:
    """Within, `command_line` gives these words."""
    token = _words.set(["drafttrain", *words])
    try:
        yield
    finally:
        _words.reset(token)


def command_line() -> list[str]:
    """The command that runs, for results; of a call from Python the command that does the same."""
    return list(_words.get()) or [Path(sys.argv[0]).name, *sys.argv[1:]]


def conclude(
    result: Mapping[str, object],
    wrote: Sequence[str | Path] = (),
    then: str = "",
) -> None:
    """Ends a command's output with a line for each file or folder that it wrote, and one for the
    next command.

    Args:
        result: what --json prints. then: of `next_command`.
    """
    for path in wrote:
        print(f"wrote {path}")
    if then:
        print(f"next: {redact(then)}")
    sys.stdout.flush()
    _ended.set({"wrote": [str(path) for path in wrote], "next": then, "result": result})


def ended() -> Outcome:
    """What the running command has concluded so far; an empty result before that."""
    return _ended.get() or {"wrote": [], "next": "", "result": {}}


def fault(line: str) -> None:
    """Prints a line that --quiet does not silence: why a command that ran to its end has failed."""
    print(line, file=_errors[-1] if _errors else sys.stderr, flush=True)


@contextlib.contextmanager
def voice(command: str, quiet: bool, as_json: bool) -> Iterator[None]:
    """Runs a command as --quiet and --json ask: quiet shows errors only, as_json one JSON object
    alone on stdout.
    """
    _ended.set(None)
    if not (quiet or as_json):
        with noticed():
            yield
        return
    answer: Mapping[str, object] = {}
    with contextlib.ExitStack() as stack:
        sink = sys.stderr
        if quiet:
            # Left open: loggers that are made meanwhile keep it.
            sink = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        _errors.append(sys.stderr)
        stack.callback(_errors.pop)
        sys.stdout.flush()
        kept = os.dup(1)  # what libraries and child processes write there is moved too
        os.dup2(sink.fileno() if quiet else 2, 1)
        stack.callback(os.close, kept)
        stack.callback(os.dup2, kept, 1)
        stack.enter_context(contextlib.redirect_stdout(sink))
        stack.enter_context(contextlib.redirect_stderr(sink))
        try:
            with noticed():
                yield
            answer = dict(_ended.get() or {})
        except UserError as error:
            answer = {"error": str(error)}
            raise
        finally:
            stack.close()  # stdout is back: the JSON goes there
            if as_json and answer:
                print(
                    json.dumps(
                        redact({"command": command, **answer}),
                        ensure_ascii=False,
                        default=str,
                    ),
                    flush=True,
                )


@contextlib.contextmanager
def noticed() -> Iterator[None]:
    """Shows what the package logs on stderr, as text alone."""
    handler = logging.StreamHandler(sys.stderr)
    before = (logger.level, logger.propagate)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


def concluded(run: Callable[[], object], progress: bool) -> Outcome:
    """Runs a command's function for a call from Python and returns what it concluded.

    Args:
        progress: print what the command prints; False sends the text of this thread to the log,
            level INFO.
    """
    _ended.set(None)
    with noticed() if progress else _hush():
        run()
    return ended()


class _HushedStream:
    """sys.stdout or sys.stderr while calls of some threads are quiet: their lines go to the log,
    those of others pass.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        # Threads that are not hushed print as ever.
        if threading.get_ident() not in hushed:
            return self.stream.write(text)
        for line in filter(None, map(str.strip, text.splitlines())):
            logger.info(line)
        return len(text)

    def isatty(self) -> bool:
        return threading.get_ident() not in hushed and self.stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def _hush() -> Iterator[None]:
    thread = threading.get_ident()
    with _hushing:
        if not hushed:
            sys.stdout = _HushedStream(sys.stdout)  # type: ignore[assignment]
            sys.stderr = _HushedStream(sys.stderr)  # type: ignore[assignment]
        hushed.add(thread)
    try:
        yield
    finally:
        with _hushing:
            hushed.discard(thread)
            if not hushed:  # the last quiet call ends; a stream may have been replaced meanwhile
                if isinstance(sys.stdout, _HushedStream):
                    sys.stdout = sys.stdout.stream
                if isinstance(sys.stderr, _HushedStream):
                    sys.stderr = sys.stderr.stream
