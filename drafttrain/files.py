"""Cache folders, JSON and JSON-lines files, and snapshots from the Hub."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypeVar

from drafttrain.credentials import redact
from drafttrain.errors import UserError, first_line, reason_of, shown, without_xet

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError
    from safetensors import safe_open

Json = dict[str, Any]  # a JSON object


T = TypeVar("T", default=Json)


def value_of(keys: Mapping[str, object], name: str, default: object) -> Any:
    """A key's value, or the default where the key is missing or null."""
    value = keys.get(name)
    if value is None:
        return default
    return value


def cache_folder() -> Path:
    """The folder of fetched models and built kernels: $DRAFTTRAIN_CACHE, else drafttrain/ in the
    user's cache folder.
    """
    own = os.environ.get("DRAFTTRAIN_CACHE")
    if own:
        return Path(own).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "drafttrain"


# Errors of a full disk, and what libraries' texts of it have in common.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_SIGNS = (
    "No space left",
    "Disk quota exceeded",
    "File too large",
    "PytorchStreamWriter",
    "inline_container",
)
# Errors of file systems without locks.
_NO_LOCKS = (
    errno.ENOLCK,
    errno.ENOTSUP,
    errno.EINVAL,
    errno.ENOSYS,
)


def is_disk_full(error: BaseException) -> bool:
    """Whether the cause is a full disk; safetensors and torch wrap it in their own errors, so their
    text counts too.
    """
    if getattr(error, "errno", None) in _FULL or any(sign in str(error) for sign in _FULL_SIGNS):
        return True
    return error.__cause__ is not None and is_disk_full(error.__cause__)


def lock(path: Path, shared: bool = False) -> int | None:
    """Opens a file, which is created when missing, and locks it until the descriptor is closed or
    the process ends.

    On file systems without locks it only opens the file.

    Args:
        shared: others may hold a shared lock too.

    Returns:
        The descriptor; None if another process has the lock.
    """
    kind = fcntl.LOCK_EX
    if shared:
        kind = fcntl.LOCK_SH
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(file)
                raise
        # The lock counts only if the path still leads to the file that is locked.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        os.close(file)  # its last holder has deleted it meanwhile


def upgrade(file: int) -> bool:
    """Makes a shared lock exclusive; False if others have it too."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        return error.errno in _NO_LOCKS


def _is_abandoned(path: Path) -> bool:
    """Whether no process holds the lock of a file of this user."""
    try:
        # Opened for writing, which network file systems want for an exclusive lock.
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.fstat(file.fileno()).st_uid == os.geteuid()
    except OSError:
        return False


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary file in the folder of `path`. It replaces `path` if the block succeeds, and
    is deleted if not.

    Temporary files of `path` that killed processes have left are deleted first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Eight hex digits, or a process id in earlier versions.
    left = re.compile(re.escape(f".{path.name}.") + r"([0-9a-f]{8}|\d+)")
    for name in filter(left.fullmatch, os.listdir(path.parent)):
        if _is_abandoned(path.with_name(name)):
            path.with_name(name).unlink(missing_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    while (held := lock(part)) is None:  # another process is looking at it
        pass
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
        os.close(held)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder, deleted at the end. Those that killed processes have left are deleted
    first.
    """
    name = ".drafttrain-scratch"  # locked
    for old in Path(tempfile.gettempdir()).glob(f"drafttrain-*/{name}"):
        if _is_abandoned(old):
            shutil.rmtree(old.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="drafttrain-") as folder:
        # While it is locked, `_is_abandoned` says no in other processes.
        held = lock(Path(folder, name))
        try:
            yield Path(folder)
        finally:
            if held is not None:
                os.close(held)


@contextlib.contextmanager
def writing(path: Path, key: str = "output", reads: bool = False) -> Iterator[None]:
    """Reports a failure to write `path` as a UserError, also a full disk in safetensors' or torch's
    own errors.

    Args:
        key: the setting that names the path. reads: the block reads files too, so only a full disk
            is known to be a failure to write.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_disk_full(error) and (reads or not isinstance(error, OSError)):
            raise
        reason = reason_of(error)
        if is_disk_full(error):
            fix = "free some space, or choose another place"
        else:
            fix = "choose another place"
        raise UserError(f"{key}={str(path)!r} cannot be written ({reason}); {fix}") from error


def write_text(path: Path, text: str) -> None:
    """Replaces a file in one step, so that readers see the old or the new content. Raises UserError
    as `writing` does.
    """
    with writing(path), replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Replaces a JSON file; see `write_text`. Credentials in it are replaced, see `redact`."""
    write_text(path, json.dumps(redact(dict(content)), indent=2, ensure_ascii=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Replaces a JSON-lines file in one step. Raises UserError as `writing` does."""
    with writing(path), replacing(path) as part, part.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def check_plain(path: Path) -> None:
    """Raises OSError for a pipe, which is read for ever, and for a device, which may have no end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError("not a plain file")


def read_text(path: Path, key: str, fix: str) -> str:
    """The text of a file.

    Args:
        key: the setting that names the file. fix: what the user can do, ends the error.

    Raises:
        UserError: no such file, not readable, or not UTF-8.
    """
    try:
        check_plain(path)
        return path.read_bytes().decode("utf-8-sig")  # a byte order mark is not content
    except UnicodeDecodeError as error:
        raise UserError(
            f"{key}={str(path)!r} is not UTF-8 text (byte {error.start}); convert it, or {fix}"
        ) from error
    except OSError as error:
        raise UserError(
            f"{key}={str(path)!r} cannot be read ({reason_of(error)}); {fix}"
        ) from error


@contextlib.contextmanager
def reading(path: Path | str, key: str, fix: str) -> Iterator[None]:
    """Reports whatever a library raises about the content of `path` as a UserError; see
    `read_text`.
    """
    try:
        if os.path.exists(path):
            check_plain(Path(path))
        yield
    except UserError:
        raise
    # safetensors, torch, pyarrow, gzip and datasets raise a dozen unrelated classes.
    except Exception as error:
        raise UserError(
            f"{key}={str(path)!r} cannot be read ({first_line(error)}); {fix}"
        ) from error


def open_tensors(path: Path, key: str, fix: str) -> safe_open:
    """An open safetensors file. Raises UserError: missing, damaged or incomplete."""
    from safetensors import safe_open

    with reading(path, key, fix):
        return safe_open(path, framework="pt")


_HUB_SECONDS = 4.0  # in which the Hub must answer
_BLOCK = 1 << 20  # bytes read at once from a file's end
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _object(pairs: list[tuple[str, object]]) -> Json:
    """A JSON object. Raises ValueError for a repeated key, of which json keeps the last without a
    word.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} occurs twice")
            seen.add(key)
    return found


def parse_json(text: str) -> Any:
    """A JSON value. Raises ValueError: not JSON, nested too deeply, a repeated key, or half a
    character (\\ud800).
    """
    try:
        content = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if _SURROGATE.search(text):  # valid pairs are rare enough for a second look
        # Encoding fails for halves that form no pair.
        json.dumps(content, ensure_ascii=False).encode()
    return content


@functools.cache
def _adapter(schema: type) -> TypeAdapter:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)


def read_json(path: Path, key: str, fix: str, schema: type[T] = dict) -> T:  # type: ignore[assignment]
    """A JSON file's content, checked against a schema.

    Args:
        key: the setting that names the file. fix: what the user can do, ends the error.
        schema: a TypedDict (of typing_extensions) whose fields may carry pydantic's Field(ge=...);
            other keys are kept.

    Raises:
        UserError: not readable, not JSON, or not of the schema; names the place in the file, its
            value and the rule.
    """
    text = read_text(path, key, fix)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise UserError(f"{key}={str(path)!r} is not JSON ({first_line(error)}); {fix}") from error
    check_json(content, f"{key}={str(path)!r}", fix, schema)
    return content


def check_json(content: object, where: str, fix: str, schema: type) -> None:
    """Raises UserError, which begins with `where`, for content that is not of the schema; see
    `read_json`.
    """
    from pydantic import ValidationError

    try:
        _adapter(schema).validate_python(content, strict=True)
    except ValidationError as error:
        raise UserError(f"{where}: {violation(error)}; {fix}") from error


def violation(error: ValidationError) -> str:
    """The first violation of a pydantic schema: `place=value: rule`, or why the text is not JSON."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return f"not JSON ({first['ctx']['error']})"
    place = ".".join(map(str, first["loc"])) or "the content"
    rule = " ".join(first["msg"].split())
    if first["type"] == "missing":  # pydantic's input is then all that surrounds it
        return f"{place}: {rule.lower()}"
    return f"{place}={shown(first['input'])}: {rule[:1].lower() + rule[1:]}"


def read_jsonl(
    path: Path,
    growing: bool = False,
    fix: str = "the file must hold one JSON object per line",
    schema: type[T] = dict,  # type: ignore[assignment]
) -> Iterator[tuple[int, T]]:
    """Yields (line number, row) of every line that is not blank. Lines end with a line feed and
    nothing else.

    Args:
        growing: leave out a last line without a line break: it is being written, or its writer was
            killed.
        fix: ends the error about a line that is not JSON or not of the schema.
        schema: a TypedDict, see `read_json`; rows are then reduced to its keys. pydantic parses and
            checks a line faster than `json.loads` parses it.

    Raises:
        UserError: no such file, not UTF-8, or a line that is not a JSON object or not of the schema.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a JSONL file, one JSON object per line")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip() or (growing and not line.endswith(b"\n")):
                    continue
                yield number, parse_line(line, path, number, fix, schema)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a JSONL file") from error


def parse_line(
    line: bytes,
    path: Path,
    number: int,
    fix: str = "the file must hold one JSON object per line",
    schema: type[T] = dict,  # type: ignore[assignment]
) -> T:
    """The row of a line of a JSON-lines file; arguments and errors as in `read_jsonl`."""
    from pydantic import ValidationError

    where = f"{path} line {number}"
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
    try:
        if schema is dict:
            row = parse_json(line.decode())
        else:
            adapter = _adapter(schema)  # type: ignore[arg-type]  # TypedDicts are hashable
            row = adapter.validate_json(line, strict=True)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text ({error}); convert it first") from error
    except ValidationError as error:
        raise UserError(f"{where}: {violation(error)}; {fix}") from error
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error}); {fix}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: {type(row).__name__} instead of a JSON object per line")
    return row  # type: ignore[return-value]  # mypy loses T


def append_line(file: int, row: Json) -> None:
    """Appends a row to a JSON-lines file, by its descriptor: completely, or not at all with an
    OSError.
    """
    line = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
    # Where the line begins, so that part of one can be cut off again.
    begin = os.lseek(file, 0, os.SEEK_END)
    try:
        if os.write(file, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.ftruncate(file, begin)
        raise


def append_row(path: Path, row: Json) -> None:
    """Appends a row to a JSON-lines file, in place of the part of one that a killed process may have
    left at its end. Raises UserError: it cannot be written.
    """
    with writing(path), path.open("ab") as file:
        file.truncate(complete_bytes(path))
        append_line(file.fileno(), row)


class JsonlLog:
    """A JSON-lines file that an interrupted run continues: its settings in the first line, then one
    result a line.

    An incomplete last line, whose writer was killed, is cut off. The file is locked until it is
    closed.

    Args:
        schema: of a result; see `read_json`. overwrite: begin a file of other settings again, in
            place of an error.

    Attributes:
        rows: the results, those of earlier runs included.

    Raises:
        UserError: the file was begun with other settings, a line is damaged, it cannot be written,
            or another process writes it.
    """

    def __init__(
        self,
        path: Path,
        settings: Json,
        schema: type = dict,
        overwrite: bool = False,
    ):
        self.path, settings = path, redact(settings)
        fix = "delete that line to redo its result, or the file to start again"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            held = lock(path)
        if held is None:
            raise UserError(
                f"{str(path)!r} is being written by another process; wait for it, or choose another output"
            )
        self._file = held
        try:
            lines = [row for _, row in read_jsonl(path, growing=True, fix=fix)]
            if lines and lines[0] != settings:
                # Settings of another version have other keys: never silently begun again.
                if not overwrite or lines[0].keys() != settings.keys():
                    raise UserError(
                        f"{path} was begun with {differences(lines[0], settings)}; use those, or give --overwrite"
                    )
                lines = []
            for number, row in enumerate(lines[1:], 1):
                check_json(row, f"{path} result {number}", fix, schema)
            self.rows: list[Json] = lines[1:]
            # Cuts an incomplete last line off, or all of a file that begins again.
            whole = 0
            if lines:
                whole = complete_bytes(path)
            with writing(path):
                os.ftruncate(self._file, whole)
            if not lines:
                self._write(settings)
        except BaseException:
            self.close()
            raise

    def add(self, row: Json) -> None:
        """Adds a result. Raises UserError: it cannot be written; the file then holds all earlier
        ones.
        """
        self.rows.append(row)
        self._write(row)

    def _write(self, row: Json) -> None:
        with writing(self.path):
            append_line(self._file, row)

    def close(self) -> None:
        """Closes and unlocks the file, once."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def remove(self) -> None:
        """Closes and deletes the file."""
        self.path.unlink(missing_ok=True)
        self.close()


def complete_bytes(path: Path) -> int:
    """Size of a file up to its last line break; an interrupted write may have left part of a line
    after it.
    """
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            # From the end, block by block: the last line break is near it.
            begin = file.seek(max(0, end - _BLOCK))
            if (found := file.read(end - begin).rfind(b"\n")) >= 0:
                return begin + found + 1
            end = begin
    return 0


def first_change(before: Json, now: Json) -> str:
    """`key=old, this run has key=new` of the first setting that differs; '' if none does."""
    for key in [*now, *before]:
        if before.get(key) != now.get(key):
            return f"{key}={before.get(key)!r}, this run has {key}={now.get(key)!r}"
    return ""


def differences(before: Json, now: Json) -> str:
    """`key=value, ...` of the earlier settings that differ now."""
    return ", ".join(
        f"{key}={before.get(key)!r}" for key in {**before, **now} if before.get(key) != now.get(key)
    )


def unreachable(url: str, seconds: float) -> str:
    """Why a server sends no answer within this time; '' if it sends any. Proxies of the environment
    are used.

    A thread asks, because looking up a name knows no time limit.
    """
    import httpx

    # The last one counts: the thread adds its own when it is done.
    reasons = [f"no answer within {seconds:g} s"]

    def ask() -> None:
        try:
            httpx.head(url, timeout=seconds)
            reasons.append("")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
            reason = first_line(error)
            if "CERTIFICATE" in str(error):
                reason = ""  # it answers, and other clients may know its certificate
            reasons.append(reason)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return redact(reasons[-1])


@functools.cache
def _ask_hub(address: str) -> str:
    """Why the Hub does not answer; '' if it does. Asked once per process."""
    reason = unreachable(address, _HUB_SECONDS)
    if reason:
        note = (
            f"note: {address} does not answer ({reason}); models and data come from its cache alone"
        )
        print(note, file=sys.stderr, flush=True)
    return reason


def hub_problem() -> str:
    """Why the Hub cannot be asked; '' if it answers.

    Its clients alone try again for up to a minute. Where it does not answer, they read their cache
    from now on, and fail at once for what is not there.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    reason = _ask_hub(constants.ENDPOINT)
    if reason:
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that load later, and child processes
    return reason


def is_hub_id(name: str) -> bool:
    """Whether a name has the form user/name of a Hub repository, and not that of a path.

    KIND:FOLDER/FILE names a kind without weights and the file that it reads.
    """
    return not name.startswith((".", "/", "~")) and name.count("/") == 1 and ":" not in name


def hub_snapshot(
    repo: str,
    patterns: Sequence[str],
    key: str,
    ignore: Sequence[str] = (),
    revision: str = "",
) -> Path:
    """Downloads a Hub repository's files into the Hub's cache, or finds them there.

    Args:
        repo: user/name. patterns, ignore: file names to download and to skip, as globs.
        key: the setting that holds the name, for the error. revision: branch, tag or commit; main
            unless given.

    Raises:
        UserError: no Hub id, or the Hub does not provide it.
    """
    if not is_hub_id(repo):
        raise UserError(f"{key}={repo!r}: no such folder, and not a Hub id (user/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    problem = hub_problem()
    try:
        left_out = list(ignore) or None
        found = snapshot_download(
            repo,
            revision=revision or None,
            allow_patterns=[*patterns],
            ignore_patterns=left_out,
        )
        return Path(found)
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        fix = without_xet(error) or "; check the name, and log in for a private one: hf auth login"
        # A file that is not in the cache: the connection is why.
        if problem:
            fix = f"; its server was not asked: {problem}"
        raise UserError(
            f"{key}={repo!r}: no such folder, and the Hub does not provide it ({first_line(error)}){fix}"
        ) from error
