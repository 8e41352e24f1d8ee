"""UserError, the one error that users can cause, and helpers for messages of other libraries'
errors.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path

from drafttrain.credentials import redact

_LONGEST = 900  # characters of a message


class UserError(Exception):
    """Bad input. The message is one line that names the key, the value, the rule and the fix;
    commands exit with 2.

    Line breaks, control characters and lone surrogates, which values from files may hold, are shown
    escaped; a message that quotes too much is cut in the middle. Credentials are replaced: values
    that users name may hold them, and so may other libraries' errors.
    """

    def __init__(self, message: str = ""):
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in redact(message))
        super().__init__(
            line
            if len(line) <= _LONGEST
            else f"{line[: _LONGEST // 2]} [...] {line[-_LONGEST // 2 + 8 :]}"
        )


def did_you_mean(
    word: str,
    known: Iterable[str],
    most: int = 3,
    cutoff: float = 0.5,
) -> str:
    """`did you mean A or B?` with the known words closest to a wrong one; empty if none is close.

    Args:
        most: words named. cutoff: similarity, 0 to 1, that a word needs.
    """
    close = difflib.get_close_matches(word, list(known), n=most, cutoff=cutoff)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return ""


def text_of(error: BaseException) -> str:
    """A library's error as one line, or its type's name where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of a library's error, or its type's name where it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def reason_of(error: BaseException) -> str:
    """What the system says of an error ("Permission denied"), else the error's own first line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)


def shown(value: object) -> str:
    """A value in an error: its repr in one line of at most 80 characters."""
    try:
        text = " ".join(repr(value).split())
    except (
        ValueError,
        RecursionError,
    ):  # more digits than Python prints, more levels than it follows
        text = f"a {type(value).__name__} too large to show"
    if len(text) <= 80:
        return text
    return text[:77] + "..."


def without_xet(error: BaseException) -> str:
    """How to go on without Xet, through which the Hub's client moves large files, if an error may
    come from there; '' if not.

    Xet's library raises Python's own errors, mostly in threads; the Hub's other requests raise
    HTTPError.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError

    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = any("xet" in f"{Path(code.co_filename).name} {code.co_name}" for code in frames)
    native = isinstance(error, ConnectionError | PermissionError | RuntimeError) and not isinstance(
        error, HTTPError
    )
    if constants.HF_HUB_DISABLE_XET or not (inside or native):
        return ""
    return "; large files go through Xet: set HF_HUB_DISABLE_XET=1 to go without it"
