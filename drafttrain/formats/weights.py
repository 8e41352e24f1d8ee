"""Checkpoints of others: reading safetensors (or a checked pickle on demand), checking tensors, writing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.errors import UserError, first_line
from drafttrain.files import Json, write_json, writing

Shapes = dict[str, tuple[int, ...]]  # a checkpoint's tensors: name -> shape

_PICKLES = ("pytorch_model.bin", "model.bin", "model.pt", "pytorch_model.pt", "model.pth")
_TABLES = {"d2t": torch.int64, "t2d": torch.bool}  # tensors of EAGLE-3's forms that are no weights


def read_config(folder: Path, name: str = "config.json", missing: Json | None = None) -> Json:
    """A folder's config.json, or another JSON file. missing: the result if there is no such file.

    Raises:
        UserError: no such file and no `missing`, or not a JSON object.
    """
    path = folder / name
    if missing is not None and not path.is_file():
        return missing
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{str(folder)!r}: {name} cannot be read ({error}); repair it, or give a checkpoint's folder"
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"{str(folder)!r}: {name} must hold an object, not {type(config).__name__}")
    return config


def read_weights(folder: Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, on the CPU.

    Args:
        allow_pickle: also read .bin and .pt files, by torch.load(weights_only=True).

    Raises:
        UserError: no weights, damaged ones, or only pickles without `allow_pickle`.
    """
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [folder / Path(name).name for name in names]  # a name with a folder in it could point anywhere
        else:
            files = [path for path in [folder / "model.safetensors"] if path.is_file()]
        if files:
            return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{str(folder)!r}: safetensors cannot be read ({error}); export or download again") from error
    pickles = [folder / name for name in _PICKLES if (folder / name).is_file()]
    if not pickles:
        raise UserError(f"{str(folder)!r} has no model.safetensors; give a checkpoint's folder")
    if not allow_pickle:
        raise UserError(
            f"{pickles[0].name} in {str(folder)!r} is a pickle, which can run code when loaded; ask its author for "
            "safetensors, or pass --allow-pickle to read it with torch's weights_only check"
        )
    try:
        return torch.load(pickles[0], map_location="cpu", weights_only=True)
    except Exception as error:  # pickle errors come in many classes
        raise UserError(f"{pickles[0].name} holds more than tensors, or is damaged ({first_line(error)})") from error


def check_names(found: Mapping[str, Tensor], expected: Shapes, where: str) -> None:
    """Checks that names and shapes are exactly the expected ones.

    Raises:
        UserError: names the first tensors that are missing, unknown or of another shape.
    """
    for word, names in (("lacks", expected.keys() - found.keys()), ("has unknown", found.keys() - expected.keys())):
        if names:
            raise UserError(f"{where} {word} weights: {', '.join(sorted(names)[:5])}")
    for name, shape in expected.items():
        if tuple(found[name].shape) != tuple(shape):
            raise UserError(f"{where}: {name} has shape {list(found[name].shape)}, must be {list(shape)}")


def check_weights(found: Mapping[str, Tensor], expected: Shapes, config: Json, where: str) -> torch.dtype:
    """Checks an exported checkpoint against what an engine's loader expects: names, shapes, dtypes, finite values.

    Args:
        config: its config.json, which names the dtype.

    Returns:
        The dtype of the weights.

    Raises:
        UserError: names the first tensors that differ.
    """
    check_names(found, expected, where)
    name = config.get("torch_dtype") or config.get("dtype")
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{where}: config.json names dtype={name!r}, which torch does not have; export again")
    for key, tensor in found.items():
        wanted = _TABLES.get(key, dtype)
        if tensor.dtype != wanted:
            raise UserError(f"{where}: {key} has dtype {tensor.dtype}, must be {wanted}; export again")
        if not tensor.isfinite().all():
            raise UserError(f"{where}: {key} holds values that are not finite; use an earlier checkpoint")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """As config.json spells it: bfloat16."""
    return str(dtype).removeprefix("torch.")


def write_checkpoint(folder: Path, config: Json, weights: Mapping[str, Tensor], dtype: torch.dtype) -> list[Path]:
    """Writes config.json and model.safetensors; floating-point tensors get `dtype`.

    Returns:
        Both files.

    Raises:
        UserError: the folder cannot be written.
    """
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous().clone()
        for name, tensor in weights.items()
    }
    files = [folder / "config.json", folder / "model.safetensors"]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, files[1], metadata={"format": "pt"})
    write_json(files[0], config)
    return files
