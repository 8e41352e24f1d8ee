"""States in a byte per value and their scales: about half of bfloat16's bytes.

Hidden states have a few columns that are 30 to 150 times as large as their median. int8 has evenly
spaced values, so 64 columns share a scale, which keeps those columns, and layers of other
magnitudes, from flattening the rest of a row. float8 (e4m3) has an exponent of its own in each
value, so a scale per row is enough; hs-connectors stores states so too (`hidden_states_scales`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.target.devices import DTYPES
from drafttrain.values import StoreDtype

_BLOCK = 64  # columns that share a scale in int8
_SCALE = "_scale"  # after the name of a tensor, the name of its scales
_FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MAX = torch.finfo(_FLOAT8).max  # 448
QUANTIZED = ("int8", "float8")


def block_size(width: int) -> int:
    """Columns that share a scale in int8 states of `width` columns: the largest divisor up to 64."""
    return max(size for size in range(1, _BLOCK + 1) if width % size == 0)


def value_bytes(dtype: StoreDtype, width: int) -> float:
    """Bytes of a stored value, its part of a scale included; width: of the target's hidden state."""
    if dtype == "int8":
        return 1 + DTYPES["bfloat16"].itemsize / block_size(width)
    if dtype == "float8":  # a float32 scale per row; rows of several layers need less
        return 1 + DTYPES["float32"].itemsize / width
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
    if dtype not in QUANTIZED:
        return {name: states.to(DTYPES[dtype])}
    size = states.shape[-1]
    if dtype == "int8":
        size = block_size(width)
    blocks = states.float().unflatten(-1, (-1, size))  # [n, c*width/size, size]
    highest = blocks.abs().amax(-1, keepdim=True)  # [n, c*width/size, 1]
    tiny = torch.finfo(torch.float32).tiny  # of zeros, too
    if dtype == "int8":
        scale = (highest / 127).bfloat16()
        rounded = (blocks / scale.float().clamp(min=tiny)).round().clamp(-127, 127)
        values = rounded.nan_to_num().to(torch.int8)
    else:
        scale = highest / _FLOAT8_MAX
        values = (blocks / scale.clamp(min=tiny)).nan_to_num().to(_FLOAT8)
    return {name: values.flatten(1), name + _SCALE: scale.squeeze(-1)}


def scale_names(name: str, values: Tensor) -> tuple[str, ...]:
    """Names of the scales that `restored` needs for quantized values; none for other values."""
    if values.dtype in (torch.int8, _FLOAT8):
        return (name + _SCALE,)
    return ()


def scale_columns(values: Tensor, width: int) -> int:
    """Scales per row of quantized values [n, c*width]."""
    if values.dtype == torch.int8:
        return values.shape[1] // block_size(width)
    return 1


def restored(values: Tensor, scale: Tensor) -> Tensor:
    """bfloat16 states [n, c] from quantized values [n, c] and scales [n, blocks]."""
    blocks = values.unflatten(-1, (scale.shape[1], -1)).float()  # [n, blocks, c / blocks]
    return (blocks * scale.float().unsqueeze(-1)).bfloat16().flatten(1)
