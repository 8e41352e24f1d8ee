"""Outputs of commands: no command removes or replaces what it did not write.

`output_file` and `OutputFolder` check an output before any model loads: it is not an input, it can
be written, and what is there is this command's own. A folder's marker is its lock and its record:
it names the command and the files that the command wrote. Folders of earlier versions have no
record; signs in their files tell what wrote them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import TypedDict

from drafttrain.environment import __version__
from drafttrain.errors import UserError, first_line, reason_of
from drafttrain.files import Json, check_plain, lock, read_json, upgrade, writing

MARKER = ".drafttrain"  # in every folder that a command writes; hidden files are never published
# In such a folder: what is not complete yet; what a run replaces; the same before all of it is
# there.
PARTIAL = ".partial"
_BEFORE = ".before"
_MOVING = ".before.partial"
# Keys of the JSON files that commands write; other JSON files have other keys.
_JSON_KEYS = {
    "eval": {"overall", "categories", "decoding"},
    "tune": {"tree", "candidates", "sampling"},
    "sweep": {"axes", "cells"},
    "estimate": {"rows", "advice"},
    "plan": {"memory_gb", "disk_gb", "hours"},
    "verify": {"versions", "files", "command"},
    "doctor": {"releases", "rows", "command"},
    "bench-server": {"servers", "workload"},
    "compare": {"trainings", "drafters"},
    "benchmark": {"ratio", "goal", "sides"},
    "prompts summary": {"settings", "kept", "dropped"},
    "decoding": {"tree"},
    "chat": {"messages", "turns", "decoding"},
}
STORE = "ngram-store"  # the command
PICTURE_SIGN = "written by drafttrain"  # in the metadata of pictures and pages
# Text in the files of commands that write no JSON; of pages also what earlier versions wrote.
_TEXTS = {
    "report": (PICTURE_SIGN, '<p class="kicker">drafttrain report</p>'),
    "trace": (PICTURE_SIGN, '<p class="kicker">drafttrain trace</p>'),
    STORE: ('"format":"drafttrain ',),
    "compare table": ("minutes of training each; ",),
}
_SIGN_BYTES = 200_000  # at either end of a file, where its sign is
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_MODEL = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "draft.gguf",
    *_TOKENIZER,
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "drafttrain.json",
    "decoding.json",
    "training.json",
    "mask_embedding.*",
    "adapter",
)


@dataclass(frozen=True)
class FolderKind:
    """What a command writes into a folder.

    Attributes:
        files: patterns of its files and folders.
        signs: text in a file, by a pattern of its name; any of them tells folders of earlier
            versions, which have no marker.
        absent: patterns of files that other commands write. follow: names of files about the written
            ones, which go when those go, also if another command or the user wrote them.
        alone: a folder without marker or sign must be empty. published: every folder must hold
            nothing else.
    """

    files: tuple[str, ...]
    signs: Mapping[str, str]
    absent: tuple[str, ...] = ()
    follow: tuple[str, ...] = ()
    alone: bool = False
    published: bool = False


_OURS = '"drafter_kind"'  # in the config of every trained drafter
_RUN = ("training.json", "checkpoint-*")  # what only training writes
KINDS = {
    "generate": FolderKind(
        (
            "meta.json",
            "summary.json",
            "part-*.jsonl",
            "features/part-*.safetensors",
            "features/features.json",
            "images",
            "arrow",
        ),
        {"meta.json": '"format"', "part-*.jsonl": '"spans"'},
        alone=True,
    ),
    "train": FolderKind(
        (*_MODEL, "checkpoint-*"),
        {
            "training.json": '"config"',
            "checkpoint-*/config.json": _OURS,
            "checkpoint-*/drafttrain.json": _OURS,
        },
        absent=("README.md",),
        follow=("decoding.json",),
    ),
    "adapt": FolderKind(
        ("state.jsonl", "current", "version-*"),
        {"state.jsonl": '"allowance"', "version-*/config.json": _OURS},
        alone=True,
    ),
    "import": FolderKind(
        _MODEL,
        {"config.json": _OURS, "drafttrain.json": _OURS},
        absent=("README.md", *_RUN),
        follow=("decoding.json",),
    ),
    "export": FolderKind(
        _MODEL,
        {
            "config.json": r'"speculators_model_type"|"(\w*Eagle\w*|MedusaModel|DFlashDraftModel|MLPSpeculator\w*)"',
            "draft.gguf": "^GGUF",
        },
        absent=("README.md", "decoding.json", *_RUN),
    ),
    "push": FolderKind(
        (*_MODEL, "README.md", "results/*.json", "plots/*.png", *(f"*/{name}" for name in _MODEL)),
        {"README.md": "library_name: drafttrain"},
        published=True,
    ),
    "push-data": FolderKind(
        ("README.md", "meta.json", "part-*.jsonl", "images"),
        {"README.md": r"\n- distillation\n- drafttrain\n"},
        published=True,
    ),
    "sweep": FolderKind(
        ("summary.json", f"{'[0-9a-f]' * 16}.json"), {"summary.json": '"crossover"'}
    ),
    "compare": FolderKind(("cells",), {"cells/*.json": '"overall"', "cells/*.log": ""}),
}


# -- what is there ---------------------------------------------------------------------------------


def _holds_keys(path: Path, keys: set[str]) -> bool:
    try:
        check_plain(path)
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and keys <= content.keys()


def _holds_text(path: Path, pattern: str) -> bool:
    try:
        check_plain(path)
        with path.open("rb") as file:
            head = file.read(_SIGN_BYTES)
            # The last bytes, but for those that the head has already.
            file.seek(max(file.tell(), file.seek(0, os.SEEK_END) - _SIGN_BYTES))
            return re.search(pattern.encode(), head + file.read()) is not None
    except OSError:
        return False


def wrote_file(path: Path, kind: str) -> bool:
    """Whether a file has the signs of what the command `kind` writes."""
    if kind == "prompts":  # JSON lines that anyone may write; the counts are next to them
        path = path.with_name(path.name + ".summary.json")
        kind = "prompts summary"
    if kind in _JSON_KEYS:
        return _holds_keys(path, _JSON_KEYS[kind])
    return any(_holds_text(path, re.escape(text)) for text in _TEXTS[kind])


def _files(folder: Path) -> Iterator[str]:
    """Relative names of a folder's files, without hidden files and folders."""
    for place, folders, names in os.walk(folder):
        # Changed in place, which keeps os.walk out of hidden folders.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield str(Path(place, name).relative_to(folder))


def _matching(folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """The files and folders that match a pattern."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            if not any(part.startswith(".") for part in path.relative_to(folder).parts):
                yield path


def _has_signs(folder: Path, kind: FolderKind) -> bool:
    """Whether a folder without a marker is of this kind."""
    if any(True for _ in _matching(folder, kind.absent)):
        return False
    for sign, text in kind.signs.items():
        if any(_holds_text(file, text) for file in _matching(folder, [sign])):
            return True
    return False


# -- the record ------------------------------------------------------------------------------------


class Record(TypedDict, total=False):
    """What a folder's marker holds.

    Attributes:
        folder: the command that writes the folder. drafttrain: its version.
        files: what the command has written, by relative name; absent while it writes.
        others: what was there before and is not the command's, while it writes.
    """

    folder: str
    drafttrain: str
    files: list[str]
    others: list[str]


def _read_record(marker: Path) -> Record:
    """The content of a marker; empty if there is none, or it cannot be read."""
    try:
        return read_json(marker, "output", "choose another folder", Record)
    except UserError:
        return {}


def _files_of(folder: Path, patterns: Iterable[str]) -> set[str]:
    """Relative names of all files that match a pattern, or are in a folder that does."""
    found = set[str]()
    for path in _matching(folder, patterns):
        inside = [path]
        if path.is_dir() and not path.is_symlink():
            inside = [path / name for name in _files(path)]
        found.update(str(file.relative_to(folder)) for file in inside)
    return found


# -- checks ----------------------------------------------------------------------------------------


def inputs_of(args: argparse.Namespace, *outputs: str) -> Iterator[tuple[str, str]]:
    """(flag, value) of what a command's flags name, `output` and `outputs` left out; in
    FOLDER+KIND:FILE each part.
    """
    for key, value in vars(args).items():
        if key in ("output", *outputs):
            continue
        if isinstance(value, list | tuple):
            words = value
        else:
            words = [value]
        for word in words:
            if not isinstance(word, str | Path):
                continue
            # The whole may be a path in which a separator is part of a name.
            for part in {str(word), *re.split("[+:=,]", str(word))}:
                if part:
                    yield key, part


def _expanded(name: str | Path, key: str) -> Path:
    """The path of an output: links are followed. Raises UserError: empty, or no path."""
    if not str(name):
        raise UserError(f"{key}='' names nothing; write a path")
    try:
        path = Path(name).expanduser()
        # Encoding raises for what is not text, which not every library can write to.
        if "\0" in str(path).encode().decode():
            raise ValueError("embedded null byte")
        if path.is_symlink():
            return path.resolve()
        return path
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{key}={str(name)!r} is not a valid path ({first_line(error)}); choose another"
        ) from error


def _check_place(path: Path, key: str, is_folder: bool) -> None:
    """Raises UserError: a folder where a file is meant or the reverse, or a place that cannot be
    written.
    """
    where = f"{key}={str(path)!r}"
    fix = "choose another place"
    try:
        at = path
        meant = "folder"
        fits = path.is_dir()
        if not is_folder:
            at = path.parent
            meant = "file"
            fits = path.is_file()
        if path.exists() and not fits:
            held = "not a plain file"
            if path.is_dir():
                held = "a folder"
            raise UserError(f"{where} cannot be written (it is {held}); name a {meant}")
        # The nearest folder that exists, in which the others would be created.
        while not at.exists() and at != at.parent:
            at = at.parent
        # 255 bytes fit, less the ending of a temporary file.
        if len(os.fsencode(path.name)) > 240:
            raise UserError(f"{where} cannot be written (the name is too long); {fix}")
        with tempfile.TemporaryFile(dir=at):  # a file without a name
            pass
    except (OSError, ValueError) as error:
        raise UserError(f"{where} cannot be written ({reason_of(error)}); {fix}") from error


def _same(output: Path, given: Path, below: bool) -> bool:
    """Whether an output is an input or, with `below`, a folder that the input is in; also by
    another name.
    """
    try:
        given = given.expanduser().resolve(strict=True)
        places = [given]
        if below:
            places += given.parents
        return any(os.path.samefile(output, place) for place in places)
    except (OSError, ValueError, RuntimeError):  # one of them does not exist
        return False


def _check_inputs(
    path: Path,
    inputs: Iterable[tuple[str, str]],
    key: str,
    below: bool,
) -> None:
    for name, value in inputs:
        if _same(path, Path(value), below):
            raise UserError(
                f"{key}={str(path)!r} is or holds the input {name}={value!r}; choose another output"
            )


def output_file(
    name: str | Path,
    kind: str,
    inputs: Iterable[tuple[str, str]] = (),
    key: str = "output",
) -> Path:
    """The path of a file to write.

    Args:
        kind: the command, as in `drafttrain COMMAND`. inputs: (key, name) of what it reads. key:
            the setting for errors.

    Raises:
        UserError: no place to write to, an input, or a file that the command did not write.
    """
    path = _expanded(name, key)
    _check_place(path, key, is_folder=False)
    _check_inputs(path, inputs, key, below=False)
    # An empty file, as mktemp leaves it, may be replaced.
    if path.is_file() and path.stat().st_size and not wrote_file(path, kind):
        raise UserError(
            f"{key}={str(path)!r} contains files that drafttrain {kind} did not write; choose another name, or move it away"
        )
    return path


def asked_file(args: argparse.Namespace, kind: str, *outputs: str) -> Path | None:
    """The path of --output for a command that writes a file only when asked; see `output_file`."""
    if args.output is None:
        return None
    return output_file(args.output, kind, inputs_of(args, *outputs))


def check_folder(
    name: str | Path,
    kind: str,
    inputs: Iterable[tuple[str, str]] = (),
    key: str = "output",
) -> Path:
    """The path of a folder to write; see `output_file`."""
    path = _expanded(name, key)
    of = KINDS[kind]
    _check_place(path, key, is_folder=True)
    _check_inputs(path, inputs, key, below=True)
    if not path.is_dir():
        return path
    where = f"{key}={str(path)!r}"
    wrote = _read_record(path / MARKER).get("folder", "")
    if not wrote:
        # The command itself first: signs of several commands may be there.
        wrote = next((other for other in (kind, *KINDS) if _has_signs(path, KINDS[other])), "")
    if wrote and wrote != kind:
        raise UserError(
            f"{where} was written by drafttrain {wrote}, not by {kind}; choose another folder"
        )
    known = bool(wrote)
    foreign: Iterable[str] = ()
    if of.published and known:
        ours = [file.relative_to(path) for file in _matching(path, of.files)]
        foreign = (
            name
            for name in _files(path)
            if not any(Path(name).is_relative_to(file) for file in ours)
        )
    elif not known:
        if of.published or of.alone:
            foreign = _files(path)
        else:
            foreign = (file.name for file in _matching(path, of.files))
    # The first one is named.
    for name in foreign:
        raise UserError(
            f"{where} holds other files ({name}); choose an empty folder, or one that drafttrain {kind} wrote"
        )
    return path


def beside(name: str, file: str) -> Path:
    """The default output: `file` next to an input; in the current folder if the input is not a path,
    such as a Hub id.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path.parent / file
    return Path(file)


# -- folders ---------------------------------------------------------------------------------------


class OutputFolder:
    """A folder that a command writes: created, checked, recorded, and locked until it is closed.

    A folder in which nothing was written is removed at the end.

    Args:
        name, kind, inputs, key: see `check_folder`.
        rank: of one of several processes that share the work: each locks its rank, and together
            they keep others out.

    Raises:
        UserError: as `check_folder`, or another process writes there.
    """

    def __init__(
        self,
        name: str | Path,
        kind: str,
        inputs: Iterable[tuple[str, str]] = (),
        key: str = "output",
        rank: int | None = None,
    ):
        self.path = check_folder(name, kind, inputs, key)
        self.name = kind
        self.kind = KINDS[kind]
        # Folders that do not exist yet, the innermost first; `close` removes them if they stay
        # empty.
        self._made = [place for place in (self.path, *self.path.parents) if not place.exists()]
        self._locks: list[int] = []
        self._others: set[str] = set()
        self._own = None
        if rank is not None:
            self._own = self.path / f"{MARKER}-{rank:04d}"
        try:
            with writing(self.path, key):
                self.path.mkdir(parents=True, exist_ok=True)
                # Processes that share the work share the marker, and each has a file of its own.
                self._take(self.path / MARKER, shared=rank is not None)
                if self._own is not None:
                    self._take(self._own, shared=False)
            check_folder(name, kind, inputs, key)  # as it is under the lock
            with writing(self.path, key):
                self._others = self._find_others()
                self._write_record(others=self._others)
        except BaseException:
            self.close()
            raise

    def _take(self, path: Path, shared: bool) -> None:
        held = lock(path, shared)
        if held is None:
            raise UserError(
                f"{str(path.parent)!r} is being written by another process; wait for it, or choose another folder"
            )
        self._locks.append(held)

    def _find_others(self) -> set[str]:
        """Files with names like this command's that the command did not write."""
        record = _read_record(self.path / MARKER)
        if "others" in record:  # of a process that was killed, or that shares the work
            return set(record["others"])
        if "files" in record:
            ours = {*record["files"], *self.kind.follow}
            return _files_of(self.path, self.kind.files) - ours
        return set()  # an earlier version's folder: all that has its names is its own

    def _write_record(self, **content: set[str]) -> None:
        record: Json = {"folder": self.name, "drafttrain": __version__}
        for key, names in content.items():
            record[key] = sorted(names)
        text = json.dumps(record).encode()
        # Longer or shorter than before: the end is cut last, so that the marker is never empty.
        os.pwrite(self._locks[0], text, 0)
        os.ftruncate(self._locks[0], len(text))

    def _ours(self, patterns: Iterable[str] = ()) -> set[str]:
        """Relative names of what this command wrote; of `patterns` unless empty."""
        return _files_of(self.path, patterns or self.kind.files) - self._others

    def close(self) -> None:
        """Records what was written and unlocks the folder; removes one without a file of ours."""
        with contextlib.suppress(OSError):
            if len(self._locks) == 2 and self._own is not None:
                self._own.unlink(missing_ok=True)
            if self._locks and upgrade(self._locks[0]):  # the last of the processes
                written = self._ours()
                if not written and not (self.path / _BEFORE).exists():
                    (self.path / MARKER).unlink()
                    for place in self._made:
                        place.rmdir()  # unless it holds something
                elif "others" in _read_record(self.path / MARKER):
                    self._write_record(files=written)
        for held in self._locks:
            os.close(held)
        self._locks = []

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextlib.contextmanager
    def staged(self, keep: tuple[str, ...] = ()) -> Iterator[Path]:
        """Gives an empty folder. If the block succeeds, its files replace this command's files.

        Args:
            keep: patterns of this command's files that stay, as files of others do.
        """
        part = self.path / PARTIAL
        with writing(self.path):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
        try:
            with writing(self.path, reads=True):
                yield part
            with writing(self.path):
                made = set(_files(part))
                for name in sorted(made):
                    _move(part, self.path, name)
                # A file that was another's is this command's now.
                self._others -= made
                kept = made
                if keep:
                    kept = made | self._ours(keep)
                _remove(self.path, self._ours() - kept)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def set_aside(self, *patterns: str) -> None:
        """Moves this command's files, or those of `patterns`, out of the way until `forget` or
        `restore`.
        """
        before = self.path / _BEFORE
        moving = self.path / _MOVING
        with writing(self.path):
            ours = self._ours(patterns)
            if before.is_dir():
                # An interrupted run set files aside; the present ones are its own, never complete.
                _remove(self.path, ours)
                return
            for name in sorted(ours):
                _move(self.path, moving, name)
            _remove_empty(self.path, ours)
            # Renamed in one step: a folder of this name is complete.
            if moving.is_dir():
                moving.rename(before)

    def restore(self) -> None:
        """Moves back what was set aside, for a run that fails before it has written anything."""
        for name in [*_files(self.path / _BEFORE)]:
            _move(self.path / _BEFORE, self.path, name)
        self.forget()

    def forget(self) -> None:
        """Removes what was set aside: the new files are complete."""
        shutil.rmtree(self.path / _BEFORE, ignore_errors=True)


def _move(source: Path, folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    os.replace(source / name, folder / name)


def _remove(folder: Path, names: Iterable[str]) -> None:
    """Removes files, and the folders that are empty without them."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    _remove_empty(folder, names)


def _remove_empty(folder: Path, names: Iterable[str]) -> None:
    """Removes the folders of these files that hold nothing any more."""
    inside = {place for name in names for place in Path(name).parents if place != Path()}
    # Inner folders before those that hold them.
    for place in sorted(inside, reverse=True):
        with contextlib.suppress(OSError):  # it holds something, or has gone
            (folder / place).rmdir()
