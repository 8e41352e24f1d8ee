"""A head's files: read once, with their digest, and compared with the head that serves."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

ROOT = "DRAFTTRAIN_SWAP_ROOT"  # variable of the server: folder whose subfolders may be swapped in
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_MOST_CONFIG = 1_000_000  # bytes
_HEADER_ROOM = 1_000_000  # bytes by which headers of files with the same tensors may differ
# Keys of config.json that say nothing about what a head computes. dtypes are compared by tensor.
_NAMES = {
    "_name_or_path",
    "dtype",
    "speculators_config",
    "speculators_version",
    "torch_dtype",
    "transformers_version",
}


class SwapRefused(Exception):
    """The new head cannot take the place of the served one, which serves on. One line says why."""


@dataclass(frozen=True)
class HeadFiles:
    """A head as its two files have it.

    Attributes:
        folder: as it was named. digest: sha256 of both files, in hexadecimal. size: bytes of the
            weights' file.
    """

    folder: str
    config: dict[str, object]
    tensors: dict[str, Tensor]
    digest: str
    size: int


def folder_below(root: str, name: str) -> Path:
    """The folder of a name below the root.

    Raises:
        SwapRefused: no root, a name that leads out of it, also through links, or no folder.
    """
    if not root:
        raise SwapRefused(f"the server has no {ROOT}: start it with the folder of heads in there")
    base = Path(root).resolve()
    if not name or "\0" in name or len(name) > 1000:
        raise SwapRefused("folder must be the name of a folder below the server's root")
    try:
        folder = (base / name).resolve()
        files = [(folder / file).resolve() for file in (CONFIG, WEIGHTS)]
    except (OSError, RuntimeError) as error:
        raise SwapRefused(f"folder={name!r} cannot be read ({type(error).__name__})") from error
    for path in (folder, *files):
        if base not in path.parents:
            raise SwapRefused(f"folder={name!r} leads out of the server's root; name one below it")
    if not folder.is_dir():
        raise SwapRefused(f"folder={name!r}: no such folder below the server's root")
    return folder


def read_head(folder: Path, name: str = "", most: int | None = None) -> HeadFiles:
    """Reads a head; what is hashed is what is returned.

    Args:
        name: of the folder in messages; its path unless given. most: bytes that the weights may
            have.

    Raises:
        SwapRefused: missing, torn or damaged files, more bytes than `most`, or several files of
            weights.
    """
    name = name or str(folder)
    if (folder / f"{WEIGHTS}.index.json").exists():
        raise SwapRefused(f"folder={name!r} has its weights in several files; export it again")
    config = _content(folder / CONFIG, name, _MOST_CONFIG)
    weights = _content(folder / WEIGHTS, name, most)
    try:
        described = json.loads(config)
        tensors = load(weights)
    except (ValueError, RecursionError, SafetensorError) as error:
        reason = str(error).strip() or type(error).__name__
        raise SwapRefused(
            f"folder={name!r} has a damaged file ({reason.splitlines()[0]}); export it again"
        ) from error
    if not isinstance(described, dict):
        raise SwapRefused(f"folder={name!r}: {CONFIG} is not a JSON object; export it again")
    return HeadFiles(name, described, tensors, _digest(config, weights), len(weights))


def digest_of(folder: Path) -> str:
    """The digest of a head's files. Raises SwapRefused: they cannot be read."""
    name = str(folder)
    config = _content(folder / CONFIG, name, _MOST_CONFIG)
    return _digest(config, _content(folder / WEIGHTS, name, None))


def _content(path: Path, name: str, most: int | None) -> bytes:
    """A file's content. Raises SwapRefused: not a regular file, or more than `most` bytes."""
    # A pipe or a device in its place would never end.
    if not path.is_file():
        raise SwapRefused(f"folder={name!r} has no {path.name}; name an export for this server")
    try:
        size = path.stat().st_size
        if most is not None and size > most:
            raise SwapRefused(
                f"folder={name!r}: {path.name} has {size} bytes, more than {most} of a head of the "
                "served shape"
            )
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise SwapRefused(
            f"folder={name!r}: {path.name} cannot be read ({os.strerror(error.errno or 0)})"
        ) from error


def _digest(config: bytes, weights: bytes) -> str:
    found = hashlib.sha256(len(config).to_bytes(8, "little"))
    found.update(config)
    found.update(weights)
    return found.hexdigest()


def compare(new: HeadFiles, served: HeadFiles) -> None:
    """Raises SwapRefused: tensors or settings that differ in more than their values, or values that
    are not finite.
    """
    ours = _shapes(new.tensors)
    theirs = _shapes(served.tensors)
    different = sorted(
        key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)
    )
    if different:
        key = different[0]
        raise SwapRefused(
            f"folder={new.folder!r}: {len(different)} tensors differ from those of the served head, "
            f"as {key}: {ours.get(key, 'missing')}, served {theirs.get(key, 'missing')}"
        )
    keys = (new.config.keys() | served.config.keys()) - _NAMES
    different = sorted(key for key in keys if new.config.get(key) != served.config.get(key))
    if different:
        key = different[0]
        raise SwapRefused(
            f"folder={new.folder!r}: {CONFIG} differs from the served head's in {', '.join(different)} "
            f"({key}: {_short(new.config.get(key))}, served {_short(served.config.get(key))})"
        )
    for key, tensor in new.tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise SwapRefused(f"folder={new.folder!r}: {key} holds values that are not finite")


def check_vocabulary(new: HeadFiles, size: int) -> None:
    """Checks the target ids of a pruned vocabulary: an id outside ends the engine at the next draft.

    Args:
        size: of the target's vocabulary.

    Raises:
        SwapRefused: ids outside of it, or twice the same.
    """
    offsets = new.tensors.get("d2t")
    if offsets is None:
        return
    if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise SwapRefused(f"folder={new.folder!r}: d2t is not a list of whole numbers")
    ids = torch.arange(len(offsets)) + offsets  # [d] token ids of the target
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= size):
        raise SwapRefused(
            f"folder={new.folder!r}: d2t leads to token {int(ids.max())} or {int(ids.min())}, outside "
            f"the target's vocabulary of {size}"
        )
    if len(ids.unique()) != len(ids):
        raise SwapRefused(f"folder={new.folder!r}: d2t leads to a token twice")


def refuse_shared(new: HeadFiles, shared: Iterable[str]) -> None:
    """Raises SwapRefused: a tensor of a part that the head shares with the target.

    Loading it would change the target, and so the text.

    Args:
        shared: names of the parts, such as embed_tokens.
    """
    for part in sorted(shared):
        for key in new.tensors:
            if part in key.split("."):
                raise SwapRefused(
                    f"folder={new.folder!r}: the server shares the target's {part} with its head, and "
                    f"{key} would change the target; serve heads without it"
                )


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    found = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        found[name] = f"{dtype} {list(tensor.shape)}"
    return found


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    if len(text) <= 60:
        return text
    return text[:57] + "..."
