"""`drafttrain COMMAND`: the command line, how it begins and how it ends.

drafttrain/commands/ has a file per command: the signature from which its flags and help come. They
import no torch, so that every --help is quick.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drafttrain import interrupts
from drafttrain.commands import COMMANDS, app_of, function_of, summary_of, switches_of
from drafttrain.credentials import redact
from drafttrain.environment import __version__
from drafttrain.errors import UserError, did_you_mean, shown
from drafttrain.files import is_disk_full

if TYPE_CHECKING:
    from logging import LogRecord

    from drafttrain.command import Function, Values

# Variables of the environment that tqdm, with which libraries show bars, reads as numbers.
TQDM_NUMBERS = {
    "TQDM_DELAY": float,
    "TQDM_INITIAL": int,
    "TQDM_MAXINTERVAL": float,
    "TQDM_MININTERVAL": float,
    "TQDM_MINITERS": float,
    "TQDM_NCOLS": int,
    "TQDM_NROWS": int,
    "TQDM_POSITION": int,
    "TQDM_SMOOTHING": float,
    "TQDM_TOTAL": float,
    "TQDM_UNIT_DIVISOR": int,
}
NEEDLESS = {  # notices of libraries that are true and change nothing, by logger
    "DeepSpeed": "Setting accelerator to CPU",  # which libraries import that do not use it
    "transformers.modeling_utils": "does not expose input embeddings",  # drafters read the target's
}
PIPELINE = """From a target model to a published drafter:

  drafttrain prompts  -> prompts.jsonl     what users ask, or what the target makes up
  drafttrain generate -> data/             the target's answers
  drafttrain train    -> drafter/          a drafter that agrees with the target
  drafttrain tune     -> decoding.json     the fastest tree on this machine
  drafttrain eval     -> results.json      speed-up and proof that the text is the same
  drafttrain report   -> report.html
  drafttrain export, verify, push          for vLLM, SGLang, transformers, llama.cpp and the Hub

`drafttrain COMMAND --help` explains each command with an example."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit status.

    Args:
        argv: None for the arguments of this process, which then ends on signals.
    """
    try:
        if argv is None:
            _open_closed_streams()
            interrupts.install()
        try:
            return run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # while it can still be said that its disk is full
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is left to write
        return 128 + signal.SIGPIPE  # as other programs end in `drafttrain ... | head`
    except (
        BaseException
    ) as error:  # a signal inside an import or a loader may come out as another exception
        if number := interrupts.cause(error):
            return interrupts.end(number)
        if is_disk_full(error) and _stdout_is_full():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is left to write
            error = UserError("stdout cannot be written (its disk is full); free some space")
        if not isinstance(error, UserError):
            raise
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return 2


def _open_closed_streams() -> None:
    """Opens what the caller has closed (`drafttrain ... >&-`), before a file of ours takes its
    number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


def _stdout_is_full() -> bool:
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _is_needed(record: LogRecord) -> bool:
    return NEEDLESS[record.name] not in record.getMessage()


def _reader_is_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more."""
    watch = select.poll()
    watch.register(1, 0)
    return any(event & select.POLLERR for _, event in watch.poll(0))


def show_overview() -> None:
    """Prints what `drafttrain` alone prints: the commands and the pipeline."""
    from cyclopts import App

    app = App(
        name="drafttrain",
        version=__version__,
        help="Train a drafter that makes a language model answer faster without changing a single token.",
        help_format="plaintext",
        help_epilogue=PIPELINE,
    )
    for place, command in enumerate(COMMANDS):
        app.command(
            App(
                name=command,
                help=summary_of(command),
                sort_key=place,
            )
        )
    app.help_print([])


def parsed(argv: Sequence[str]) -> tuple[Function, Values, dict[str, bool]]:
    """The function of a command line, its arguments by name, and its switches.

    Raises:
        UserError: an unknown flag, or a value that is not of its kind.
        SystemExit: --help was given, and has been shown.
    """
    from drafttrain.command import checked, read_words

    command, *words = argv
    function = function_of(command)
    known = switches_of(command)
    given = read_words(app_of(command), command, function, words, known)
    switches = {name: bool(given.pop(name, False)) for name in known}
    try:
        return function, checked(function, given), switches
    except UserError as error:
        if str(error).endswith(" must be given"):
            raise UserError(f"{error}; see drafttrain {command} --help") from error
        raise


def _check_tqdm() -> None:
    """Raises UserError for a variable of tqdm that is not the number that tqdm reads."""
    for name, kind in TQDM_NUMBERS.items():
        word = os.environ.get(name, "0")
        try:
            kind(word)
        except ValueError as error:
            rule = "a whole number" if kind is int else "a number"
            raise UserError(
                f"{name}={shown(word)} must be {rule}; correct it, or unset it"
            ) from error


def run(argv: list[str]) -> int:
    """Parses the arguments and runs the command."""
    if not argv or argv[0] in ("--help", "-h"):
        show_overview()
        return 0
    if argv[0] == "--version":
        print(f"drafttrain {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        hint = did_you_mean(argv[0][:80], COMMANDS, most=2) or f"known: {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {shown(argv[0])}; {hint}")
    from drafttrain.command import run_as_command

    function, values, switches = parsed(argv)

    _check_tqdm()
    # tqdm reads these when it is imported: bars of libraries show for long work only, and few lines
    # without a terminal.
    os.environ.setdefault("TQDM_DELAY", "5")
    os.environ.setdefault("TQDM_MININTERVAL", "0.1" if sys.stderr.isatty() else "15")
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)  # for those who write programs
    import logging  # not before a --help has been shown

    from drafttrain.outcome import commanded, voice

    for name in NEEDLESS:
        logging.getLogger(name).addFilter(_is_needed)
    quiet = switches.get("quiet", False)
    as_json = switches.get("json", False)
    with commanded(argv), voice(argv[0], quiet, as_json):
        return run_as_command(function, values)


if __name__ == "__main__":
    sys.exit(main())
