"""Reading weights that others made: safetensors, or on explicit demand a pickle whose every object torch checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.errors import UserError

_PICKLES = ("pytorch_model.bin", "model.bin", "model.pt", "pytorch_model.pt", "model.pth")


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A folder's config.json, or another JSON file.

    Raises:
        UserError: none there, or not a JSON object.
    """
    try:
        config = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(folder)!r}: {name} cannot be read ({error}); give a checkpoint's folder") from error
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
            # A name with a folder in it could point anywhere.
            files = [folder / Path(name).name for name in names]
        else:
            files = [path for path in [folder / "model.safetensors"] if path.is_file()]
        if files:
            return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{str(folder)!r}: the safetensors cannot be read ({error}); fetch or export anew") from error
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
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{pickles[0].name} holds more than tensors, or is damaged ({first}); it is not loaded"
        ) from error
