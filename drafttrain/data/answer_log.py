"""Logs of a server's answers: written, and read while they grow and rotate.

One JSON object a line for each answer, in any of these forms, with "accepted_length" where the
server knows it:

    {"prompt_token_ids": [...], "token_ids": [...]}                                the exact tokens, as `AnswerLog` writes
    {"messages": [..., {"role": "assistant", ...}], "tools": [...], ...}           and the other formats of row_formats.py
    {"request": {"messages": [...], ...}, "response": {"choices": [...]}}          body and reply of /v1/chat/completions

Only the last answer of a line counts: a chat's earlier answers have lines of their own.
"""

from __future__ import annotations

import glob
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from drafttrain.data.chat import ChatInputs
from drafttrain.data.masks import answer_record
from drafttrain.data.row_formats import parse_row
from drafttrain.errors import UserError, reason_of, shown
from drafttrain.files import Json, append_line, check_json, parse_line, upgrade
from drafttrain.inference.sequence import Generation
from drafttrain.target import Target

# Bytes at a log's start by which it is recognized under another name. Lines may begin with one
# system prompt, so they hold several.
HEAD = 65_536
LONGEST = 64_000_000  # bytes of a line
_PACKED = (".gz", ".zst", ".xz", ".bz2")  # rotated logs that are compressed are not read
_FIX = "see the forms in docs/how-to/adapt.md"
_PLACES = 100  # positions that are kept, of logs that are away too
_DIGITS = 32  # of the hash of a beginning
TokenIds = list[Annotated[int, Field(ge=0)]]


class _LoggedChoice(TypedDict):
    """An answer in a reply; `token_ids` where the server gives them (vLLM: return_token_ids)."""

    message: NotRequired[Json | None]
    token_ids: NotRequired[TokenIds | None]
    finish_reason: NotRequired[str | None]


class _Reply(_LoggedChoice):
    """A reply of /v1/chat/completions, or the whole line."""

    choices: NotRequired[Annotated[list[_LoggedChoice], Field(min_length=1)] | None]
    prompt_token_ids: NotRequired[TokenIds | None]
    accepted_length: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)] | None]
    messages: NotRequired[list[Json] | None]


class Place(TypedDict):
    """How far a log was read.

    `head` is the hash of its first `length` bytes, `offset` the end of the last line read.
    """

    head: str
    length: int
    offset: int


@dataclass(frozen=True)
class LoggedAnswer:
    """An answer as tokens.

    Attributes:
        start: length of the prompt.
        accepted: the logged accepted length, 0 if unknown.
    """

    tokens: list[int]
    start: int
    accepted: float


class AnswerLog:
    """Appends answers to a log that only this user can read. Threads and processes may share it.

    Args:
        most_bytes: the log is then renamed to FILE.1, in place of an earlier one.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: str | Path, most_bytes: int = 100_000_000):
        self.path = Path(path).expanduser()
        self.most_bytes = most_bytes
        self._turn = threading.Lock()  # the file changes while it is rotated
        self._file = self._open()

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, prompt_ids: Sequence[int], answer: Generation) -> None:
        """Appends one answer; follows a file that another program has renamed."""
        row = {
            "time": round(time.time(), 3),
            "prompt_token_ids": [int(token) for token in prompt_ids],
            "token_ids": answer.tokens,
            "finish_reason": "stop" if answer.stats.ended else "length",
            "accepted_length": round(answer.stats.accepted_length, 3),
        }
        with self._turn:
            self._rotate()
            append_line(self._file, row)

    def _rotate(self) -> None:
        """Renames a file that is full, and opens the one at the path."""
        held = os.fstat(self._file)
        # One of several processes renames it: the others' next file is the new one.
        if held.st_size >= self.most_bytes and upgrade(self._file) and self._is_at_path(held):
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
        if not self._is_at_path(held):
            os.close(self._file)
            self._file = self._open()

    def _is_at_path(self, held: os.stat_result) -> bool:
        """Whether the file is still found by its name."""
        return self.path.exists() and os.path.samestat(held, self.path.stat())

    def close(self) -> None:
        os.close(self._file)


def read_answer(
    line: bytes,
    path: Path,
    target: Target,
    kwargs: Json,
    most: int,
) -> LoggedAnswer:
    """The answer of a line.

    Args:
        path: for errors. kwargs: chat_template_kwargs of lines without any. most: tokens that are
            kept of prompt and answer.

    Raises:
        UserError: no JSON object, none of the forms, another target's tokens, or no two tokens of
            the answer within `most`.
    """
    row = parse_line(line, path, 0)
    request = row
    if isinstance(row.get("request"), dict):
        request = row["request"]
    reply = row
    if isinstance(row.get("response"), dict):
        reply = row["response"]
    for part in (row, request, reply):
        check_json(part, "the line", _FIX, _Reply)
    # The whole line may be the reply, and the reply its own choice.
    choice = reply
    if reply.get("choices"):
        choice = reply["choices"][0]

    if reply.get("prompt_token_ids") and choice.get("token_ids"):
        start = len(reply["prompt_token_ids"])
        tokens = reply["prompt_token_ids"] + choice["token_ids"]
        if target.sight is not None and target.sight.placeholder in tokens[:start]:
            raise UserError("its prompt has images, which adapt does not read; log answers to text")
        if max(tokens) >= target.vocab_size:
            raise UserError(
                f"token {max(tokens)} is outside the target's vocabulary of {target.vocab_size}; give its log"
            )
        text = (choice.get("message") or {}).get("content")
        meant = target.tokenizer.decode(choice["token_ids"])
        # Reasoning, stop strings and tool calls are left out of the text.
        if isinstance(text, str) and "".join(text.split()) not in "".join(meant.split()):
            raise UserError(
                f"token_ids say {shown(meant)} to the target's tokenizer, and the text is {shown(text)}; "
                "give the target's own log"
            )
    else:
        tokens, start = _rendered(request, choice, target, kwargs)
    if min(len(tokens), most) - start < 2:
        raise UserError(
            f"less than two tokens of the answer within {most} (the prompt has {start}); raise --max-length"
        )
    accepted = float(row.get("accepted_length") or 0)
    return LoggedAnswer(tokens[:most], start, accepted)


def _rendered(
    request: Json,
    choice: Json,
    target: Target,
    kwargs: Json,
) -> tuple[list[int], int]:
    """The tokens of a conversation and the start of its last answer. Raises UserError.

    Args:
        request: has the messages. choice: has the answer, unless the messages end with it.
    """
    chat = request
    if choice.get("message"):
        messages = list(request.get("messages") or [])
        chat = {**request, "messages": [*messages, choice["message"]]}
    parsed = parse_row(chat)
    if parsed is None or "messages" not in parsed:
        raise UserError(f"no conversation with an answer; {_FIX}")
    inputs = ChatInputs.of(parsed, kwargs)
    record = answer_record(
        target.tokenizer,
        parsed["messages"],
        inputs,
        target.eos_ids,
    )
    start, end = record["spans"][0]
    # The template has closed an answer that the limit ended.
    if choice.get("finish_reason") == "length" and record["finish"] == ["stop"]:
        end -= 1
    return record["tokens"][:end], start


@dataclass
class LogReader:
    """Reads what was added to a log since the last time.

    It finds its place also after the log was renamed, copied and truncated, or begun again.

    Args:
        path: a file, which is read together with its rotated siblings (FILE.1, FILE-20260101), or a
            folder of *.jsonl files.
        places: of earlier runs.
    """

    path: Path
    places: list[Place] = field(default_factory=list)

    def _files(self) -> list[Path]:
        if self.path.is_dir():
            files = self.path.glob("*.jsonl*")
        else:
            files = self.path.parent.glob(f"{glob.escape(self.path.name)}*")
        found = [path for path in files if path.suffix not in _PACKED and path.is_file()]
        return sorted(found, key=lambda path: (path.stat().st_mtime, path.name))

    def read(self, most: int) -> tuple[list[tuple[str, Path, bytes]], int]:
        """The newest `most` new lines, oldest first, and the number of older ones left out.

        Each line comes with `FILE byte N` and its file.

        A last line without a line break is being written, and read later.

        Raises:
            UserError: nothing there, or a log that cannot be read.
        """
        lines = deque[tuple[str, Path, bytes]](maxlen=most)
        count = 0
        try:
            files = self._files()
            for path in files:
                for where, line in self._new_lines(path):
                    count += 1
                    lines.append((where, path, line))
            # Those of the logs that are here are the last ones.
            self.places = self.places[-max(_PLACES, len(files)) :]
        except FileNotFoundError:
            pass  # a log was renamed meanwhile, and the next call finds it
        except OSError as error:
            raise UserError(
                f"log={str(self.path)!r} cannot be read ({reason_of(error)}); check --log"
            ) from error
        return list(lines), count - len(lines)

    def _new_lines(self, path: Path) -> Iterator[tuple[str, bytes]]:
        with path.open("rb") as file:
            head = file.read(HEAD)
            # The place of the longest beginning that is known; a new log has none.
            place = Place(
                head="",
                length=0,
                offset=0,
            )
            known = {(held["length"], held["head"]): held for held in self.places}
            digest = hashlib.sha256()
            done = 0  # bytes in the digest
            for length in sorted({length for length, _ in known}):
                digest.update(head[done:length])
                done = length
                place = known.get((length, digest.hexdigest()[:_DIGITS]), place)
            # Go on behind the last line read.
            at = file.seek(place["offset"])
            while line := file.readline(LONGEST):
                if line.endswith(b"\n"):
                    if line.strip():
                        yield f"{path.name} byte {at}", line
                # A line without an end is passed over piece by piece; its rest counts as unusable.
                elif len(line) < LONGEST:
                    break
                at += len(line)
            # Keep the hash of a longer beginning, by which the log is recognized next time.
            file.seek(0)
            head = file.read(min(at, HEAD))
            self.places = [p for p in self.places if p is not place]
            self.places.append(
                Place(
                    head=hashlib.sha256(head).hexdigest()[:_DIGITS],
                    length=len(head),
                    offset=at,
                )
            )
