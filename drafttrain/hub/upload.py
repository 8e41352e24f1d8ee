"""Publishing a folder on the Hub: cards, search for private text, upload, tag; never delete, never
print a token.

A card's text is in templates/, its facts are in files.
"""

from __future__ import annotations

import argparse
import re
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
        args: of `add_publishing_flags`. command: push or push-data. kind: "model" or "dataset".
            message: of the commit.
        prepare: fills an empty folder.

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
            left_out = ("command", "dry_run", "output", "batch_schedule")
            given = {name: value for name, value in vars(args).items() if name not in left_out}
            conclude(result, [folder], next_command(command, **given))
        else:
            result["url"] = upload(folder, args.repo, kind, args.private, message, args.tag)
            print(result["url"])
            then = ""
            if kind == "model":
                then = next_command("eval", target="TARGET", drafter=args.repo)
            conclude(result, [folder] if args.output else [], then)
    return 0


def write_card(folder: Path, template: str, metadata: Json, **values: object) -> None:
    """Writes README.md from a template of this package. A value that the template needs and does
    not get is an error.

    Args:
        metadata: for the Hub's index, in front of the text; empty values are left out.
    """
    source = (Path(__file__).with_name("templates") / template).read_text(encoding="utf-8")
    # No HTML escapes: they would show in Markdown.
    environment = Environment(
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
    )
    environment.filters["link"] = lambda model: (
        f"[{model}](https://huggingface.co/{model})" if "/" in model else model
    )
    kept = {key: value for key, value in metadata.items() if value}
    front = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True).strip()
    card = redact(
        environment.from_string(source).render(version=__version__, metadata=front, **values)
    )
    write_text(folder / "README.md", card)


def check_private(folder: Path, names: list[Path]) -> None:
    """Searches the files that are about to be published for credentials, and those of text for
    local paths.

    Raises:
        UserError: found one; names the file and the kind, but not the secret.
    """
    home = str(Path.home())
    for name in names:
        for number, line in _lines(folder / name):
            if kind := find_secret(line):
                if name.suffix in _TEXT:
                    place = f"{name} line {number}"
                else:
                    place = f"the metadata of {name}"
                raise UserError(
                    f"{place} holds what looks like {kind}; remove it before publishing"
                )
    for name in (name for name in names if name.suffix in _TEXT):
        text = (folder / name).read_text(encoding="utf-8", errors="replace")
        found = _LOCAL.search(text)
        if found or (len(home) > 1 and home in text):
            if found:
                where = found.group(0)
            else:
                where = home
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
    """Raises UserError unless the Hub answers soon. Its client alone retries for more than a
    minute.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"repo={repo!r}: HF_HUB_OFFLINE is set; unset it to publish, or use --dry-run"
        )
    if reason := unreachable(constants.ENDPOINT, _REACHED):
        raise UserError(
            f"repo={repo!r}: {constants.ENDPOINT} does not answer ({reason}); check the network and its proxy settings "
            "(HTTPS_PROXY), then run the command again"
        )


def upload(folder: Path, repo: str, kind: str, private: bool, message: str, tag: str = "") -> str:
    """Uploads a folder's files to a repository, creates it if it does not exist, and tags the new
    revision.

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
        api.create_repo(repo, repo_type=kind, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo,
            repo_type=kind,
            folder_path=folder,
            commit_message=message,
            ignore_patterns=[".*", "*/.*"],
        )
        refs = api.list_repo_refs(repo, repo_type=kind).tags
        if not tag:
            numbers = [int(ref.name[1:]) for ref in refs if re.fullmatch(r"v\d+", ref.name)]
            here = [
                ref.name
                for ref in refs
                if ref.target_commit == done.oid and re.fullmatch(r"v\d+", ref.name)
            ]
            if here:
                tag = here[-1]
            else:
                tag = f"v{max(numbers, default=0) + 1}"
        if not any(ref.name == tag and ref.target_commit == done.oid for ref in refs):
            api.create_tag(repo, tag=tag, revision=done.oid, repo_type=kind)
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
    shown = (f"HTTP {status}, " if status else "") + first_line(error)
    reasons = {
        401: "the Hub does not accept the token (401); run hf auth login, or set HF_TOKEN to a valid one",
        403: "the token may not write there (403); use a write token of an account that may",
        409: f"the Hub reports a conflict ({shown}); choose another --tag, or try again",
    }
    broken = f"the upload broke off ({shown}); run the same command again, stored files are not sent again"
    if hint := without_xet(error):
        return broken + hint
    return reasons.get(status, broken)
