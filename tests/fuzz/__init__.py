"""Property-based tests of the borders: whatever a file or a value holds, the outcome is success or one UserError line.

A test names its border, draws faults, and passes each to `outcome`:

    @fuzz(examples=40)
    @given(fault=file_faults(), seed=seeds())
    def test_meta(fault, seed, folder):
        (folder / "meta.json").write_bytes(fault.apply(VALID, Random(seed)))
        outcome("data set: meta.json", fault.name, lambda: load_records(folder))

$FUZZ_SCALE multiplies the examples (tests/fuzz/test_long.py, marked slow); $FUZZ_COUNTS names a file that collects the counts,
which `python -m tests.fuzz.table FILE` prints as borders x kinds of fault.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from drafttrain.errors import UserError

COMPUTE_SECONDS = 30  # of CPU time, which other work on the machine does not lengthen
WAIT_SECONDS = 300  # of the clock, for what waits without computing: a pipe, a lock, a socket
LONGEST_LINE = 1000  # characters of an error


@dataclass(frozen=True)
class Fault:
    """A way in which content is wrong: apply(content, random) gives the faulty content."""

    name: str
    apply: Callable[[Any, Random], Any]


def fuzz(examples: int) -> Callable:
    """Runs a hypothesis test over `examples` cases, the same ones each time."""
    scale = int(os.environ.get("FUZZ_SCALE", "1"))
    return settings(
        max_examples=examples * scale,
        deadline=None,
        database=None,
        derandomize=scale == 1,
        suppress_health_check=list(HealthCheck),
    )


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**32)


# -- faults of a file's bytes -----------------------------------------------------------------------------------------


def _cut(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content)) if content else 0]


def _flip(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 8, 64))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _insert(content: bytes, random: Random) -> bytes:
    at = random.randrange(len(content) + 1)
    return content[:at] + random.randbytes(random.randint(1, 40)) + content[at:]


def _zeros(content: bytes, random: Random) -> bytes:
    begin = random.randrange(len(content)) if content else 0
    return content[:begin] + bytes(len(content) - begin)


FILE_FAULTS = (
    Fault("cut off", _cut),
    Fault("bits flipped", _flip),
    Fault("bytes inserted", _insert),
    Fault("zeros", _zeros),
    Fault("empty", lambda content, random: b""),
    Fault("twice", lambda content, random: content + content),
    Fault("another file", lambda content, random: b"<html><body>502 Bad Gateway</body></html>\n"),
)
TEXT_FAULTS = (
    *FILE_FAULTS,
    Fault("UTF-16", lambda content, random: content.decode("utf-8", "replace").encode("utf-16")),
    Fault("latin-1", lambda content, random: content + "é".encode("latin-1")),
    Fault("byte order mark", lambda content, random: b"\xef\xbb\xbf" + content),
    Fault(
        "line separators", lambda content, random: content.replace(b" ", "\u2028\x85".encode(), 1)
    ),
    Fault("deep nesting", lambda content, random: b"[" * 100_000),
)


def file_faults() -> st.SearchStrategy[Fault]:
    """Faults of a binary file."""
    return st.sampled_from(FILE_FAULTS)


def text_faults() -> st.SearchStrategy[Fault]:
    """Faults of a text file: those of a binary one, and wrong encodings."""
    return st.sampled_from(TEXT_FAULTS)


# -- faults of values -------------------------------------------------------------------------------------------------

WRONG_VALUES = {
    "another type": (None, True, 3, 2.5, "abc", "", [], ["x"], {}, {"a": 1}, [[1]]),
    "not finite": (float("nan"), float("inf"), -float("inf")),
    "out of range": (-1, 0, -0.5, 2, 1e9, 10**12, 10**30, -(10**30), 2**31, 2**63, 1e308, 1e-320),
    "odd text": (
        "\ud800",
        "\x00",
        "a\nb",
        "\u2028",
        "[/bold]",
        "[red]x",
        "../../x",
        "~",
        "%s{0}",
        "é" * 500,
    ),
}
# The same as words of a command line or values of an override.
WRONG_WORDS = {
    "another type": (
        "abc",
        "",
        "true",
        "null",
        "[]",
        "[1,2]",
        "{}",
        "a=b",
        "1,2",
        "2.5",
        "0x10",
        "1e3",
        " 3",
        "3 ",
        "--",
        "-",
    ),
    "not finite": ("nan", "inf", "-inf", ".nan", ".inf", "1e999", "NaN"),
    "out of range": (
        "-1",
        "0",
        "-0.5",
        "1.5",
        "2",
        "1e9",
        "99999999999",
        "9" * 30,
        "-" + "9" * 30,
        "1e-320",
    ),
    "odd text": (
        "\ud800",
        "a\nb",
        "\u2028",
        "[/bold]",
        "../../x",
        "~",
        "%s{0}",
        "é" * 500,
        "1" * 5000,
        "\u0663",
    ),
}


def _places(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """Every key and index in nested lists and objects."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield (*place, key)
        yield from _places(inner, (*place, key))


def _change(value: Any, random: Random, change: Callable[[Any, Any], None]) -> Any:
    value = copy.deepcopy(value)
    if not (places := list(_places(value))):
        return value
    *parents, last = random.choice(places)
    holder = value
    for key in parents:
        holder = holder[key]
    change(holder, last)
    return value


def _wrong(name: str) -> Fault:
    def apply(value: Any, random: Random) -> Any:
        return _change(
            value,
            random,
            lambda holder, key: holder.__setitem__(key, random.choice(WRONG_VALUES[name])),
        )

    return Fault(name, apply)


def _missing(value: Any, random: Random) -> Any:
    return _change(value, random, lambda holder, key: holder.__delitem__(key))


JSON_FAULTS = (*map(_wrong, WRONG_VALUES), Fault("missing key", _missing))


def json_faults() -> st.SearchStrategy[Fault]:
    """Faults of one value inside nested lists and objects: another type, not finite, out of range, odd text, missing."""
    return st.sampled_from(JSON_FAULTS)


def wrong_words() -> st.SearchStrategy[tuple[str, str]]:
    """(name of the fault, word) for flags, overrides and other values that are text."""
    return st.sampled_from([(name, word) for name, words in WRONG_WORDS.items() for word in words])


# -- outcomes ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _no_hang() -> Iterator[None]:
    def fail(signal_number: int, _: object) -> None:
        raise AssertionError(f"still running: {signal.Signals(signal_number).name}")

    limits = [
        (signal.SIGPROF, signal.ITIMER_PROF, COMPUTE_SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, WAIT_SECONDS),
    ]
    for number, timer, seconds in limits:
        signal.signal(number, fail)
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, timer, _ in limits:
            signal.setitimer(timer, 0)
            signal.signal(number, signal.SIG_DFL)


def outcome(border: str, fault: str, call: Callable[[], object]) -> str:
    """Runs `call`; asserts that it succeeds or raises one line of UserError (or argparse's exit 2), and does not hang.

    Returns:
        The error's text; '' for success.
    """
    text = ""
    try:
        with _no_hang():
            call()
    except UserError as error:
        text = str(error)
        assert text and len(text.splitlines()) == 1, f"not one line: {text!r}"
        assert len(text) <= LONGEST_LINE, f"{len(text)} characters: {text!r}"
    except SystemExit as stop:
        if stop.code not in (0, None, 2):
            raise AssertionError(f"exit status {stop.code}") from stop
        text = "exit 2" if stop.code == 2 else ""
    if file := os.environ.get("FUZZ_COUNTS"):
        with open(file, "a", encoding="utf-8") as counts:
            counts.write(json.dumps([border, fault, "refused" if text else "accepted"]) + "\n")
    return text
