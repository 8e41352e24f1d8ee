"""Publishing a folder on the Hub: cards, search for private text, upload, tag; never delete, never
print a token.

A card's text is in templates/, its facts are in files.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError
from jinja2 import Environment, StrictUndefined

from drafttrain.credentials import find_secret, redact
from drafttrain.environment import __version__
from drafttrain.errors import UserError, first_line, without_xet
from drafttrain.files import Json, scratch_folder, unreachable, write_text
from drafttrain.folders import OutputFolder, inputs_of
from drafttrain.outcome import conclude, next_command

_TEXT = (".json", ".md", ".jsonl", ".yaml", ".jinja", ".txt")
_HEAD = 32 * 2**20  # bytes of a GGUF file that are searched: its metadata and vocabulary come first
_REACHED = 8.0  # seconds within which the Hub must answer
# Places that exist on one machine only, in running text and in JSON.
_LOCAL = re.compile(
    r"(?<![\w.:/])(?:~/|/(?:home|Users|root|tmp|var|mnt|work|data|opt|srv|private|scratch)/)[^\s\"'`]*"
)


def publish(
    args: argparse.Namespace,
    command: str,
    kind: str,
    message: str,
    prepare: Callable[[Path], None],
) -> int:
    """Prepares a folder and uploads it, unless --dry-run is set.

    Args:
        args: repo, private, dry_run, output, tag, and what else the command reads.
        command: push or push-data. kind: model or dataset.
        message: of the commit. prepare: fills an empty folder.

    Raises:
        UserError: no repository's name, a dry run without --output, something private in a file, or
            a failed upload.
    """
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", args.repo):
        raise UserError(f"repo={args.repo!r} must be user/name or organization/name")
    if args.dry_run and not args.output:
        raise UserError(
            "dry-run leaves the prepared folder for you to look at; name it: --output DIR"
        )
    if not args.dry_run:
        check_reachable(args.repo)
    with (
        scratch_folder() as scratch,
        OutputFolder(args.output or scratch / "repository", command, inputs_of(args)) as output,
    ):
        folder = output.path
        with output.staged() as part:
            prepare(part)
            names = sorted(path.relative_to(part) for path in part.rglob("*") if path.is_file())
            check_private(part, names)
        print(f"{kind} {args.repo}: {len(names)} files in {folder}")
        for name in names:
            print(f"  {(folder / name).stat().st_size:>12,}  {name}")
        result: Json = {"repo": args.repo, "files": [str(name) for name in names]}

        if args.dry_run:
            print("dry run: nothing was uploaded")
            given = vars(args).copy()
            for name_of_flag in ("command", "dry_run", "output", "batch_schedule"):
                given.pop(name_of_flag, None)
            conclude(result, [folder], next_command(command, **given))
            return 0

        result["url"] = upload(folder, args.repo, kind, args.private, message, args.tag)
        print(result["url"])
        then = ""
        if kind == "model":
            then = next_command("eval", target="TARGET", drafter=args.repo)
        conclude(result, [folder] if args.output else [], then)
    return 0


def write_card(folder: Path, template: str, metadata: Json, **values: object) -> None:
    """Writes README.md from a template of this package.

    Args:
        metadata: for the Hub's index, in front of the text; empty values are left out.
        values: what the template needs; a missing one is an error.
    """
    source = (Path(__file__).with_name("templates") / template).read_text(encoding="utf-8")
    # Values come from files of others: nothing in them is Markdown, unless a filter made it.
    environment = Environment(
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        finalize=_as_text,
    )
    environment.filters |= {"link": _link, "code": _code, "word": _word, "fenced": _fenced}
    kept = {key: value for key, value in metadata.items() if value}
    front = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True).strip()
    template_of = environment.from_string(source)
    card = template_of.render(
        version=__version__,
        metadata=_Markdown(front),
        **values,
    )
    write_text(folder / "README.md", redact(card))


class _Markdown(str):
    """Text of a card that is written as it is."""


_ESCAPES = {ord(sign): f"\\{sign}" for sign in "\\`*[]<>|#~"}


def _one_line(value: object) -> str:
    """Text without newlines and other control characters, which could begin a heading or a list."""
    return "".join(c if c.isprintable() else " " for c in str(value))


def _as_text(value: object) -> str:
    """A value as Markdown shows it: no markup, link, table cell or line of its own."""
    if isinstance(value, _Markdown):
        return value
    text = _one_line(value).translate(_ESCAPES)
    # Addresses become links by themselves.
    return text.replace("://", ":\\//").replace("www.", "www\\.")


def _link(name: str, place: str = "") -> str:
    """A link to a model of the Hub, or to a repository below `place`; other names as text."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _Markdown(f"[{name}](https://huggingface.co/{place}{name})")
    return name


def _code(value: object) -> str:
    """A value in a code span, where no escapes work."""
    return _Markdown(f"`{_one_line(value)}`" if "`" not in str(value) else _as_text(value))


def _word(value: object) -> str:
    """A value as one word of a command."""
    return _Markdown(shlex.quote(_one_line(value)))


def _fenced(text: str) -> str:
    """Lines of code, behind a fence that they do not close."""
    fence = "```"
    while fence in text:
        fence += "`"
    return _Markdown(f"{fence}\n{text}\n{fence}")


def check_private(folder: Path, names: list[Path]) -> None:
    """Searches the files that are about to be published for credentials, and those of text for
    local paths.

    Raises:
        UserError: found one; names the file and the kind, but not the secret.
    """
    for name in names:
        for number, line in _lines(folder / name):
            kind = find_secret(line)
            if not kind:
                continue
            place = f"the metadata of {name}"
            if name.suffix in _TEXT:
                place = f"{name} line {number}"
            raise UserError(f"{place} holds what looks like {kind}; remove it before publishing")

    home = str(Path.home())
    for name in names:
        if name.suffix not in _TEXT:
            continue
        text = (folder / name).read_text(encoding="utf-8", errors="replace")
        found = _LOCAL.search(text)
        where = ""
        if found:
            where = found[0]
        elif len(home) > 1 and home in text:
            where = home
        if where:
            raise UserError(
                f"{name} names a local path, {where}; give names or Hub ids (--base-model, --results, ...)"
            )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file; of a file with weights, only of its metadata."""
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            yield 1, file.read(int.from_bytes(file.read(8), "little")).decode(errors="replace")
            return
        for number, line in enumerate(file, 1):
            yield number, line.decode(errors="replace")
            if path.suffix not in _TEXT and file.tell() > _HEAD:
                return


def check_reachable(repo: str) -> None:
    """Checks that the Hub answers soon; its client alone retries for more than a minute.

    Raises:
        UserError: it does not.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"repo={repo!r}: HF_HUB_OFFLINE is set; unset it to publish, or use --dry-run"
        )
    reason = unreachable(constants.ENDPOINT, _REACHED)
    if reason:
        raise UserError(
            f"repo={repo!r}: {constants.ENDPOINT} does not answer ({reason}); check the network and its proxy settings "
            "(HTTPS_PROXY), then run the command again"
        )


def upload(
    folder: Path,
    repo: str,
    kind: str,
    private: bool,
    message: str,
    tag: str = "",
) -> str:
    """Uploads a folder's files to a repository and tags the new revision.

    A repository that does not exist is created.
    Files that the repository has and the folder lacks stay. What an interrupted upload has stored
    is not sent again.

    Args:
        kind: "model" or "dataset". tag: the next of v1, v2, ... unless given.

    Returns:
        The address of the tagged revision.

    Raises:
        UserError: not logged in, no right to write there, or the connection broke.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.whoami()
        api.create_repo(
            repo,
            repo_type=kind,
            private=private,
            exist_ok=True,
        )
        done = api.upload_folder(
            repo_id=repo,
            repo_type=kind,
            folder_path=folder,
            commit_message=message,
            ignore_patterns=[".*", "*/.*"],
        )
        refs = api.list_repo_refs(repo, repo_type=kind).tags
        here = [ref.name for ref in refs if ref.target_commit == done.oid]
        # The tag v1, v2, ... that the revision has, else the next one of the repository.
        if not tag:
            numbers = [int(ref.name[1:]) for ref in refs if re.fullmatch(r"v\d+", ref.name)]
            tag = f"v{max(numbers, default=0) + 1}"
            own = [name for name in here if re.fullmatch(r"v\d+", name)]
            if own:
                tag = own[-1]
        if tag not in here:
            api.create_tag(
                repo,
                tag=tag,
                revision=done.oid,
                repo_type=kind,
            )
    except (OSError, ValueError, RuntimeError, HTTPError) as error:  # HfHubHTTPError is an OSError
        raise UserError(f"repo={repo!r}: {_explain(error)}") from error
    prefix = "datasets/" if kind == "dataset" else ""
    return redact(f"{api.endpoint}/{prefix}{repo}/tree/{tag}")


def _explain(error: Exception) -> str:
    """What stopped an upload and what to do."""
    if isinstance(error, LocalTokenNotFoundError):
        return "not logged in; run hf auth login, or set HF_TOKEN"
    status = 0
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
    shown = first_line(error)
    if status:
        shown = f"HTTP {status}, {shown}"
    broken = f"the upload broke off ({shown}); run the same command again, stored files are not sent again"
    hint = without_xet(error)
    if hint:
        return broken + hint
    if status == 401:
        return "the Hub does not accept the token (401); run hf auth login, or set HF_TOKEN to a valid one"
    if status == 403:
        return "the token may not write there (403); use a write token of an account that may"
    if status == 409:
        return f"the Hub reports a conflict ({shown}); choose another --tag, or try again"
    return broken
