"""States as int8 with a scale per row and 64 columns: about half of bfloat16's bytes.

Hidden states have a few columns that are 30 to 150 times as large as their median. A scale per 64
columns keeps those, and layers of other magnitudes, from flattening the rest of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.target.devices import DTYPES
from drafttrain.values import StoreDtype

_BLOCK = 64  # columns that share a scale
_SCALE = "_scale"  # after the name of a tensor, the name of its scales


def block_size(width: int) -> int:
    """Columns that share a scale in states of `width` columns: the largest divisor up to 64."""
    return max(size for size in range(1, _BLOCK + 1) if width % size == 0)


def value_bytes(dtype: StoreDtype, width: int) -> float:
    """Bytes of a stored value, its part of a scale included; width: of the target's hidden state."""
    if dtype == "int8":
        return 1 + DTYPES["bfloat16"].itemsize / block_size(width)
    return DTYPES[dtype].itemsize


def stored_as(
    name: str,
    states: Tensor,
    dtype: StoreDtype,
    width: int,
) -> dict[str, Tensor]:
    """Tensors to store for states [n, c*width] of c layers.

    Values that are not finite give scales that are not finite.
    """
    if dtype != "int8":
        return {name: states.to(DTYPES[dtype])}
    blocks = states.float().unflatten(-1, (-1, block_size(width)))  # [n, c*width/64, 64]
    highest = blocks.abs().amax(-1, keepdim=True)  # [n, c*width/64, 1]
    scale = (highest / 127).bfloat16()
    divisor = scale.float().clamp(min=torch.finfo(torch.float32).tiny)  # of zeros, too
    values = (blocks / divisor).round().clamp(-127, 127).nan_to_num()
    return {name: values.to(torch.int8).flatten(1), name + _SCALE: scale.squeeze(-1)}


def scale_names(name: str, values: Tensor) -> tuple[str, ...]:
    """Names of the scales that `restored` needs for int8 values; none for other values."""
    if values.dtype == torch.int8:
        return (name + _SCALE,)
    return ()


def restored(values: Tensor, scale: Tensor) -> Tensor:
    """bfloat16 states [n, c] from int8 values [n, c] and scales [n, c / 64]."""
    blocks = values.unflatten(-1, (scale.shape[1], -1)).float()  # [n, c / 64, 64]
    return (blocks * scale.float().unsqueeze(-1)).bfloat16().flatten(1)
