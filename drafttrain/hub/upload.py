"""Putting a prepared folder on the Hub: create, upload, tag; never delete, and never say a token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError

_TEXT = (".json", ".md", ".jsonl", ".yaml", ".jinja", ".txt")
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")
# Places that only exist on somebody's machine, in running text and in JSON.
_LOCAL = re.compile(r"(?<![\w.:/])(?:~/|/(?:home|Users|root|tmp|var|mnt|work|data|opt|srv|private|scratch)/)[^\s\"'`]*")


def shorten(value: Any) -> Any:
    """Takes folders off local paths, in a string or in everything below a JSON value.

    A path is what begins like one, has more than one slash, or lies on this disk; a Hub id and a URL are not.
    """
    if isinstance(value, dict):
        return {key: shorten(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shorten(item) for item in value]
    if not isinstance(value, str) or "/" not in value or "://" in value or any(c.isspace() for c in value):
        return value
    head, equals, tail = value.rpartition("=")
    plain, plus, rest = tail.partition("+")
    path = Path(plain).expanduser()
    local = plain.startswith((".", "/", "~")) or plain.count("/") > 1 or path.exists()
    return head + equals + (path.name if local else plain) + plus + rest


def check_private(folder: Path, names: Iterable[Path]) -> None:
    """Looks through what is about to be published for local paths and tokens.

    Raises:
        UserError: found one; says in which file, but not the token.
    """
    home = str(Path.home())
    for name in names:
        if name.suffix not in _TEXT:
            continue
        text = (folder / name).read_text(encoding="utf-8", errors="replace")
        if _TOKEN.search(text):
            raise UserError(f"{name} holds what looks like a Hub token; take it out before publishing")
        found = _LOCAL.search(text)
        if found or (len(home) > 1 and home in text):
            where = found.group(0) if found else home
            raise UserError(
                f"{name} names a local path, {where}; publish names or Hub ids (--base-model, --results, ...)"
            )


def list_files(folder: Path) -> list[Path]:
    """Files below a folder, relative to it."""
    return sorted(
        path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts
    )


def print_files(folder: Path, repo: str, kind: str) -> None:
    files = list_files(folder)
    print(f"{kind} {repo}: {len(files)} files in {folder}")
    for name in files:
        print(f"  {(folder / name).stat().st_size:>12,}  {name}")


def check_repo(repo: str) -> None:
    if not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", repo):
        raise UserError(f"repo={repo!r} must be user/name or organisation/name")


def upload(folder: Path, repo: str, kind: str, private: bool, message: str, tag: str = "") -> str:
    """Uploads a folder's files to a repository, which is made if it does not exist, and tags the new revision.

    Files that the repository has and the folder lacks stay. What an interrupted upload has brought across is not sent again.

    Args:
        kind: "model" or "dataset". tag: the next of v1, v2, ... unless given.

    Returns:
        The address of the tagged revision.

    Raises:
        UserError: not logged in, no right to write there, or the connection broke.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi()
    try:
        api.whoami()
        api.create_repo(repo, repo_type=kind, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo, repo_type=kind, folder_path=folder, commit_message=message, ignore_patterns=[".cache/*"]
        )
        refs = api.list_repo_refs(repo, repo_type=kind).tags
        if not tag:
            numbers = [int(ref.name[1:]) for ref in refs if re.fullmatch(r"v\d+", ref.name)]
            here = [ref.name for ref in refs if ref.target_commit == done.oid and re.fullmatch(r"v\d+", ref.name)]
            tag = here[-1] if here else f"v{max(numbers, default=0) + 1}"
        if not any(ref.name == tag and ref.target_commit == done.oid for ref in refs):
            api.create_tag(repo, tag=tag, revision=done.oid, repo_type=kind)
    except LocalTokenNotFoundError as error:
        raise UserError(f"repo={repo!r}: not logged in; run hf auth login, or set HF_TOKEN") from error
    except HfHubHTTPError as error:
        raise _explain(repo, error) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"repo={repo!r}: the upload broke off ({_first_line(error)}); run the same command again, what has arrived stays"
        ) from error
    prefix = "datasets/" if kind == "dataset" else ""
    return f"{api.endpoint}/{prefix}{repo}/tree/{tag}"


def _explain(repo: str, error: Any) -> UserError:
    status = error.response.status_code if error.response is not None else 0
    if status == 401:
        return UserError(
            f"repo={repo!r}: the Hub does not accept the token (401); run hf auth login, or set HF_TOKEN anew"
        )
    if status == 403:
        return UserError(
            f"repo={repo!r}: the token may not write there (403); use a write token of an account that may"
        )
    if status == 409:
        return UserError(
            f"repo={repo!r}: the Hub reports a conflict ({_first_line(error)}); choose another --tag, or try again"
        )
    return UserError(
        f"repo={repo!r}: the upload broke off (HTTP {status}, {_first_line(error)}); run the same command again, what has "
        "arrived stays"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return _TOKEN.sub("hf_...", lines[0]) if lines else type(error).__name__


def write_clean_json(path: Path, content: Any) -> None:
    """JSON without local paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(shorten(content), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
