"""Keys, tokens and passwords: `redact` takes them out of what is recorded or shown, `find_secret`
finds them before a push.
"""

from __future__ import annotations

import os
import re
from typing import TypeVar

T = TypeVar("T")

HIDDEN = "***"
# Names of settings, flags, query fields and environment variables whose values are secret. Not
# "eos_token", "max_tokens", "key".
_WORDS = r"(?:api|access|auth|bearer|github|hf|hub|private|refresh|secret|session|wandb)"
_NAME = rf"(?:[\w-]*[_-])?(?:{_WORDS}[_-]?(?:key|token)(?:_?id)?|pass(?:word|wd|phrase)|secret|credentials?)"
# Behind another word a token is mostly one of a text: "first drafted token: 0.58".
_NAME += r"|token(?=[\"']?\s*=)|(?<!\w )token|pwd"
_SECRET_NAME = re.compile(rf"-{{0,2}}(?:{_NAME})", re.IGNORECASE)
_VARIABLE = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_NOTED: set[str] = set()  # names that `note_variable` was given

# Kind of secret -> how it looks. A token may follow an escape such as \n in JSON, so few of them
# can ask for a word's begin.
_SHAPES = {
    "a Hugging Face token": r"hf_[A-Za-z0-9]{20,}",
    "an API key (sk-)": r"(?<![A-Za-z0-9-])(?:sk-(?=[\w-]*\d)[\w-]*[A-Za-z0-9]{16}[\w-]*|[sr]k_(?:live|test)_\w{16,})",
    "a GitHub token": r"gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{22,}",
    "a GitLab token": r"glpat-[\w-]{20,}",
    "a Slack token": r"xox[abeoprs]-[A-Za-z0-9-]{10,}",
    "an AWS key": r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])",
    "a Google key": r"(?<![A-Za-z0-9_-])AIza[\w-]{35}(?![\w-])",
    "a private key": r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----",
    "a URL with a password": r"(?<=://)[^\s/?#\"'<>@:]*:[^\s/?#\"'<>]{1,200}@(?=[\w\[])",
    "a key of 40 digits": r"(?i:(?:key|token|secret|pass(?:word|wd)|login)\\?[\"']?\s*[:= ]\s*\\?[\"']?)[0-9a-f]{40}(?![0-9a-f])",
}
_ANY = re.compile("|".join(f"(?:{shape})" for shape in _SHAPES.values()))
_FIND = {kind: re.compile(shape) for kind, shape in _SHAPES.items()}
_PLACEHOLDER = re.compile(
    r"(?i)example|placeholder|your[-_ ]|x{6}|\*{3}|\.{3}|[<>{}$]|:(?:pass(?:word|wd)?|pwd|secret|token)@$"
)

# In a text: the user of a URL, and values of secret names.
_USER = re.compile(r"(?<=://)[^\s/?#\"'<>]+@(?=[\w\[])")
_VALUE = re.compile(
    rf"(?<![\w-])((?:{_NAME})[\"']?\s*[=:]\s*[\"']?)(?!\*\*\*)[^\s\"',;&)\]}}]{{4,}}", re.IGNORECASE
)
_QUERY = re.compile(
    r"([?&][\w.-]*(?:token|key|secret|password|sig|signature|auth)=)[^&\s\"']+", re.IGNORECASE
)
_BEARER = re.compile(r"(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE)


def redact(value: T) -> T:
    """A text, or nested lists and objects of texts, with *** for every secret: tokens of known
    shape, users and passwords of URLs, values of secret names (`api_key=...`, `--hub-token ...`),
    and values of environment variables such as HF_TOKEN.
    """
    if isinstance(value, str):
        return _redact_text(value)  # type: ignore[return-value]
    if isinstance(value, dict):
        return {  # type: ignore[return-value]
            key: HIDDEN if isinstance(item, str) and item and _is_secret_name(key) else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        before = [None, *value]  # a command's flag and its value are neighbors
        items = (
            HIDDEN if isinstance(item, str) and _is_flag(flag) else redact(item)
            for flag, item in zip(before, value)  # noqa: B905
        )
        return type(value)(items) if type(value) in (list, tuple) else value  # type: ignore[return-value]
    return value


def find_secret(text: str) -> str | None:
    """The kind of the first secret in a text, such as "a GitHub token"; None without one.
    Placeholders of examples are none.
    """
    plain = re.sub(r"\\(?:[bfnrt]|u[0-9a-fA-F]{4})", " ", text).replace(
        "\\/", "/"
    )  # escapes of JSON
    for kind, shape in _FIND.items():
        for found in shape.finditer(plain):
            word = found.group(0)
            if not _PLACEHOLDER.search(word) and (len(set(word[-16:])) >= 5 or "@" in word):
                return kind
    return None


def _redact_text(text: str) -> str:
    for secret in _environment_secrets():
        text = text.replace(secret, HIDDEN)
    if "://" in text:
        text = _USER.sub(f"{HIDDEN}@", text)
    for pattern in (_QUERY, _VALUE, _BEARER):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return _ANY.sub(HIDDEN, text)


def note_variable(name: str) -> None:
    """Notes a variable of the environment, whatever its name, as one that holds a key."""
    _NOTED.add(name)


def _environment_secrets() -> list[str]:
    """Values of variables that hold keys. Short ones and paths would hide ordinary words."""
    found = (
        value for name, value in os.environ.items() if name in _NOTED or _VARIABLE.search(name)
    )
    return [value for value in found if len(value) >= 8 and not value.startswith(("/", "~", "."))]


def _is_secret_name(name: object) -> bool:
    return isinstance(name, str) and _SECRET_NAME.fullmatch(name) is not None


def _is_flag(word: object) -> bool:
    return isinstance(word, str) and word.startswith("-") and _is_secret_name(word)
