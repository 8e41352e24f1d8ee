"""Reads GGUF files back: keys, and tensors as float32 or int64."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafttrain.errors import UserError, first_line
from drafttrain.extras import LazyPackage, require
from drafttrain.files import Json
from drafttrain.formats.write_gguf import TYPES

if TYPE_CHECKING:
    import gguf
else:
    gguf = LazyPackage("gguf")

_TEXT = ("tokens", "token_type", "merges", "scores")  # of the tokenizer: long, and not needed here


def read_gguf(path: Path) -> tuple[Json, dict[str, Tensor]]:
    """A file's keys, without the tokenizer's lists, and its tensors by name.

    Raises:
        UserError: no such file, or not GGUF.
    """
    require("gguf", str(path))
    keys = {}
    tensors = {}
    try:
        reader = gguf.GGUFReader(path)
        for name, field in reader.fields.items():
            if name.removeprefix("tokenizer.ggml.") not in _TEXT:
                keys[name] = field.contents()
        for tensor in reader.tensors:
            values = tensor.data
            if tensor.tensor_type != gguf.GGMLQuantizationType.I64:
                values = gguf.quants.dequantize(values, tensor.tensor_type)
            tensors[tensor.name] = torch.tensor(values)  # copied out of the mapped file
    except Exception as error:  # the reader's errors come in many classes
        raise UserError(
            f"{str(path)!r} is not a complete GGUF file ({first_line(error)}); export again"
        ) from error
    return keys, tensors


def dtype_of(keys: Json) -> torch.dtype | None:
    """The type of a file's matrices, None for a type that torch does not have."""
    stored = keys.get("general.file_type")
    for name, (_, kind) in TYPES.items():
        dtype = getattr(torch, name, None)
        if gguf.LlamaFileType[kind] == stored and isinstance(dtype, torch.dtype):
            return dtype
    return None
