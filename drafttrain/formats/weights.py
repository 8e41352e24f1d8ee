"""Checkpoints of others: reading safetensors or, on demand, a checked pickle; checking; writing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.errors import UserError, first_line
from drafttrain.files import Json, open_tensors, read_json, reading, write_json, writing
from drafttrain.target.loading import check_finite
from drafttrain.values import ShardIndex

Shapes = dict[str, tuple[int, ...]]  # a checkpoint's tensors: name -> shape

_PICKLES = ("pytorch_model.bin", "model.bin", "model.pt", "pytorch_model.pt", "model.pth")
_REPAIR = "export or download again"
_TABLES = {"d2t": torch.int64, "t2d": torch.bool}  # tensors of EAGLE-3's forms that are no weights


def read_config(folder: Path, name: str = "config.json", missing: Json | None = None) -> Json:
    """A folder's config.json, or another JSON file. missing: the result if there is no such file.

    Raises:
        UserError: no such file and no `missing`, or not a JSON object.
    """
    if missing is not None and not (folder / name).is_file():
        return missing
    return read_json(folder / name, "checkpoint", "repair it, or give a checkpoint's folder")


def architectures_in(config: Mapping[str, object]) -> list[str]:
    """The names of model classes in a config.json; empty where it has no list of them."""
    names = config.get("architectures")
    if not isinstance(names, list):
        return []
    return [str(name) for name in names]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a checkpoint: those that its index names, or model.safetensors.

    Empty if it has none.

    Raises:
        UserError: a damaged index, or one that names files that are missing.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        path = folder / "model.safetensors"
        if path.is_file():
            return [path]
        return []
    named = read_json(index, "checkpoint", _REPAIR, ShardIndex)["weight_map"].values()
    files = []
    for name in sorted(set(named)):
        path = folder / Path(name).name  # a name with a folder in it could point anywhere
        if not os.path.isfile(path):  # also for names that no path can have
            raise UserError(
                f"{str(folder)!r}: {path.name!r:.80}, which {index.name} names, "
                f"cannot be read (no such file); {_REPAIR}"
            )
        files.append(path)
    return files


def file_shapes(folder: Path) -> Shapes:
    """The shapes of a checkpoint's tensors, from the headers of its safetensors alone.

    Raises:
        UserError: as `read_weights`.
    """
    shapes: Shapes = {}
    for path in weight_files(folder):
        with open_tensors(path, "checkpoint", _REPAIR) as file:
            for name in file.keys():  # noqa: SIM118  # the file is not a mapping
                shapes[name] = tuple(file.get_slice(name).get_shape())
    if not shapes:
        raise UserError(
            f"{str(folder)!r} has no model.safetensors with weights; give a checkpoint's folder"
        )
    return shapes


def read_weights(folder: Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, on the CPU.

    Args:
        allow_pickle: also read .bin and .pt files, by torch.load(weights_only=True).

    Raises:
        UserError: no weights, damaged ones, or only pickles without `allow_pickle`.
    """
    tensors: dict[str, Tensor] = {}
    files = weight_files(folder)
    for file in files:
        with reading(file, "checkpoint", _REPAIR):
            tensors |= load_file(file)
    if files:
        return tensors
    pickles = [folder / name for name in _PICKLES if (folder / name).is_file()]
    if not pickles:
        raise UserError(f"{str(folder)!r} has no model.safetensors; give a checkpoint's folder")
    if not allow_pickle:
        raise UserError(
            f"{pickles[0].name} in {str(folder)!r} is a pickle, which can run code when loaded; "
            "ask its author for safetensors, "
            "or pass --allow-pickle to read it with torch's weights_only check"
        )
    return read_pickle(pickles[0])


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a dict that torch has saved; other values are left out.

    Reads by torch.load(weights_only=True).

    Raises:
        UserError: more than tensors and plain values, or damaged.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle errors come in many classes
        raise UserError(
            f"{path.name} holds more than tensors, or is damaged ({first_line(error):.200})"
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"{path.name} must hold tensors by name, not {type(found).__name__}")
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}


def check_kept_ids(kept: Tensor, vocab_size: int, where: str) -> None:
    """Checks kept ids [d]: ascending ids of the target's vocabulary, each once.

    Raises:
        UserError: they are not.
    """
    valid = kept.dtype == torch.int64 and kept.dim() == 1 and len(kept) > 0
    if valid:
        # Ascending without repeats, which bisection by other engines relies on.
        inside = int(kept.min()) >= 0 and int(kept.max()) < vocab_size
        valid = inside and bool((kept[1:] > kept[:-1]).all())
    if not valid:
        raise UserError(
            f"{where}: the kept ids (kept_ids or d2t) must be ascending ids "
            f"of the target's {vocab_size} tokens, each once; train or export again"
        )


def check_names(found: Mapping[str, Tensor] | Shapes, expected: Shapes, where: str) -> None:
    """Checks that names and shapes are exactly the expected ones.

    Raises:
        UserError: names the first tensors that are missing, unknown or of another shape.
    """
    differences = {
        "lacks": expected.keys() - found.keys(),
        "has unknown": found.keys() - expected.keys(),
    }
    for word, names in differences.items():
        if names:
            shown = ", ".join(sorted(names)[:5])
            raise UserError(
                f"{where} {word} weights: {shown:.300}; config.json does not describe its files"
            )
    for name, wanted in expected.items():
        entry = found[name]
        shape = list(entry if isinstance(entry, tuple) else entry.shape)
        if shape != list(wanted):
            raise UserError(f"{where}: {name} has shape {shape}, must be {list(wanted)}")


def check_weights(
    found: Mapping[str, Tensor],
    expected: Shapes,
    config: Json,
    where: str,
) -> torch.dtype:
    """Checks an exported checkpoint: names, shapes, dtypes and finite values.

    Args:
        expected: what an engine's loader expects. config: its config.json, which names the dtype.

    Returns:
        The dtype of the weights.

    Raises:
        UserError: names the first tensors that differ.
    """
    check_names(found, expected, where)
    name = config.get("torch_dtype") or config.get("dtype")
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(
            f"{where}: config.json names dtype={name!r}, which torch does not have; export again"
        )
    for key, tensor in found.items():
        # Tables of ids keep their own type, whatever the weights have.
        wanted = _TABLES.get(key, dtype)
        if tensor.dtype != wanted:
            raise UserError(
                f"{where}: {key} has dtype {tensor.dtype}, must be {wanted}; export again"
            )
    check_finite(found.items(), where, "use an earlier checkpoint")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """As config.json spells it: bfloat16."""
    return str(dtype).removeprefix("torch.")


def write_checkpoint(
    folder: Path,
    config: Json,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> list[Path]:
    """Writes config.json and model.safetensors; floating-point tensors but float8 get `dtype`.

    Returns:
        Both files.

    Raises:
        UserError: the folder cannot be written.
    """
    tensors = {}
    for name, tensor in weights.items():
        values = tensor.detach().to("cpu")
        if values.is_floating_point() and values.itemsize > 1:  # float8 stays
            values = values.to(dtype)
        tensors[name] = values.contiguous().clone()  # safetensors takes no shared memory
    described = folder / "config.json"
    stored = folder / "model.safetensors"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, stored, metadata={"format": "pt"})
    write_json(described, config)
    return [described, stored]
