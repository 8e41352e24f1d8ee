"""Cache folders, JSON and JSON-lines files, and snapshots from the Hub."""

from __future__ import annotations

import errno
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError, first_line

Json = dict[str, Any]  # a JSON object


def cache_folder() -> Path:
    """What drafttrain can get or make again (models, built kernels): $DRAFTTRAIN_CACHE, else the user's cache folder."""
    own = os.environ.get("DRAFTTRAIN_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "drafttrain"


def suites_folder() -> Path:
    """The evaluation suites that come with drafttrain: in the repository, or where a wheel installs them."""
    repository = Path(__file__).resolve().parents[1] / "eval" / "suites"
    return repository if repository.is_dir() else Path(sysconfig.get_path("data")) / "share" / "drafttrain" / "suites"


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says so; safetensors and torch have errors of their own, with the cause in the text only."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(sign in str(error) for sign in ("No space left", "Disk quota exceeded", "PytorchStreamWriter"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces a JSON file in one step, so that readers see the old or the new one.

    Raises:
        UserError: the place cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"output={str(path)!r} cannot be written ({error.strerror}); choose another place") from error


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, row) of every line that is not blank.

    Raises:
        UserError: no such file, not UTF-8, or a line that is no JSON object.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a JSONL file, one JSON object per line")
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise UserError(f"{path} line {number}: {type(row).__name__} instead of a JSON object per line")
                    yield number, row
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path} line {number}: not JSON ({error}); the file must hold one JSON object per line"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text ({error}); convert it first") from error


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes rows to a temporary file beside `path` and renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_hub_id(name: str) -> bool:
    """Whether a name has the form user/name of a Hub repository, and not that of a path."""
    return not name.startswith((".", "/", "~")) and name.count("/") == 1


def hub_snapshot(repo: str, patterns: Sequence[str], key: str, ignore: Sequence[str] = ()) -> Path:
    """Downloads a Hub repository's files into the Hub's cache, or finds them there.

    Args:
        repo: user/name. patterns, ignore: file names to take and to leave, as globs.
        key: the setting that the user gave the name for, for the error.

    Raises:
        UserError: no Hub id, or the Hub does not provide it.
    """
    if not is_hub_id(repo):
        raise UserError(f"{key}={repo!r}: no such folder, and not a Hub id (user/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=list(patterns), ignore_patterns=list(ignore) or None))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{key}={repo!r}: no such folder, and the Hub does not provide it ({first_line(error)}); check the name, and log "
            "in for a private one: hf auth login"
        ) from error
