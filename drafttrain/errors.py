"""The one exception that users are meant to read."""


class UserError(Exception):
    """Bad input, said in one line: the key, its value, the rule it breaks and the fix.

    The command line prints `error: <message>` and exits with status 2; libraries may catch it.
    """
