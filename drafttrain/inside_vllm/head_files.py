"""A head's files: read once, with their digest, and compared with the head that serves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

ROOT = "DRAFTTRAIN_SWAP_ROOT"  # variable of the server: folder whose subfolders may be swapped in
FILES = ("config.json", "model.safetensors")
# Keys of config.json that say nothing about what a head computes. dtypes are compared by tensor.
_NAMES = {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "speculators_config"}


class SwapRefused(Exception):
    """The new head cannot take the place of the served one, which serves on. One line says why."""


class HeadFiles(NamedTuple):
    """A head as its two files have it.

    Attributes:
        folder: as it was named. digest: sha256 of both files, in hexadecimal. size: their bytes.
    """

    folder: str
    config: dict[str, object]
    tensors: dict[str, Tensor]
    digest: str
    size: int

    @property
    def dtype(self) -> str:
        """Type of its weights, as config.json spells it: bfloat16."""
        # Under either name, by the release of transformers that wrote it.
        return str(self.config.get("torch_dtype") or self.config.get("dtype"))


def folder_below(root: str, name: str) -> Path:
    """The folder of a name below the root.

    Raises:
        SwapRefused: a name that leads out of the root, also through links of its files.
    """
    base = Path(root).resolve()
    folder = (base / name).resolve()
    files = [(folder / file).resolve() for file in FILES]
    for path in (folder, *files):
        if base not in path.parents:
            raise SwapRefused(f"folder={name!r} leads out of the server's root; name one below it")
    return folder


def read_head(folder: Path, name: str, most: int | None = None) -> HeadFiles:
    """Reads a head; what is hashed is what is returned.

    Args:
        name: of the folder in messages. most: bytes that both files may have.

    Raises:
        SwapRefused: missing, torn or damaged files, several files of weights, or too many bytes.
    """
    contents = []
    digest = hashlib.sha256()
    size = 0
    for file in FILES:
        path = folder / file
        # A pipe or a device in its place would never end.
        if not path.is_file():
            raise SwapRefused(f"folder={name!r} has no {file}; name a folder of one exported head")
        size += path.stat().st_size
        if most is not None and size > most:
            raise SwapRefused(
                f"folder={name!r} has {size} bytes, more than the served head's shape"
            )
        content = path.read_bytes()
        digest.update(hashlib.sha256(content).digest())
        contents.append(content)
    try:
        config = {**json.loads(contents[0])}
        tensors = load(contents[1])
    except (ValueError, TypeError, RecursionError, SafetensorError) as error:
        raise SwapRefused(
            f"folder={name!r} has a damaged file ({error}); export it again"
        ) from error
    return HeadFiles(name, config, tensors, digest.hexdigest(), size)


def check(new: HeadFiles, served: HeadFiles, shared: Iterable[str], vocabulary: int | None) -> None:
    """Compares a head with the served one.

    Args:
        shared: names of the parts that are the target's own, such as embed_tokens.
        vocabulary: number of the target's tokens; None where the served head's d2t stays.

    Raises:
        SwapRefused: it differs in more than its values, or its values would end the engine or
            change the target.
    """
    ours = _described(new)
    theirs = _described(served)
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise SwapRefused(
                f"folder={new.folder!r} does not fit the served head: {key} is {ours.get(key)}, "
                f"served {theirs.get(key)}"
            )
    for key, tensor in new.tensors.items():
        parts = set(key.split(".")).intersection(shared)
        if parts:
            raise SwapRefused(
                f"folder={new.folder!r}: {key} would change the target, which shares it with the "
                "head; serve heads without it"
            )
        # 8-bit numbers have no isfinite of their own.
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            raise SwapRefused(f"folder={new.folder!r}: {key} holds values that are not finite")
    offsets = new.tensors.get("d2t")
    if offsets is None or vocabulary is None:
        return
    # A token outside of the vocabulary ends the engine at the next draft.
    ids = torch.arange(len(offsets)) + offsets  # [d] token ids of the target
    inside = ids[(ids >= 0) & (ids < vocabulary)]
    if len(inside.unique()) != len(ids):
        raise SwapRefused(
            f"folder={new.folder!r}: d2t leads to a token twice, or outside of the target's "
            f"vocabulary of {vocabulary}"
        )


def refuse_small_layers(new: HeadFiles) -> None:
    """Raises SwapRefused: weights that vLLM has laid out anew when it loaded the served head's."""
    if any(tensor.dtype == torch.float8_e4m3fn for tensor in new.tensors.values()):
        raise SwapRefused(
            f"folder={new.folder!r} has layers in float8 or nvfp4, which vLLM lays out anew as it "
            "loads; serve and swap heads in bfloat16, or restart the server with it"
        )


def _described(head: HeadFiles) -> dict[str, str]:
    """What must be the same in two heads."""
    found = {}
    for key, value in head.config.items():
        if key not in _NAMES:
            found[key] = json.dumps(value)
    for name, tensor in head.tensors.items():
        found[name] = f"{tensor.dtype} {list(tensor.shape)}"
    return found
