"""UserError, the one error that users can cause, and a helper for messages of other libraries' errors."""

from __future__ import annotations

from drafttrain.credentials import redact


class UserError(Exception):
    """Bad input. The message is one line that names the key, the value, the rule and the fix; commands exit with 2.

    Credentials in the message are replaced: values that users name may hold them, and so may other libraries' errors.
    """

    def __init__(self, message: str = ""):
        super().__init__(redact(message))


def first_line(error: BaseException) -> str:
    """The first line of a library's error, or its type's name where it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
