"""Exports whose layers multiply float8 numbers: compressed-tensors' form, without calibration.

    layers.*_proj.weight          float8 (e4m3) [out, in]
    layers.*_proj.weight_scale    bfloat16 [out, 1], by which a row is multiplied
    all others                    bfloat16: norms, the fusing layer, the head

Inputs are rounded to float8 by the engine, with a scale per token that it computes. vLLM reads the
scheme where it reads a draft's other keys: in `transformer_layer_config` of speculators' form.
Source: compressed-tensors' `float-quantized` format; vLLM 0.32, quantization/compressed_tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from drafttrain.files import Json

FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FLOAT8).max
_ROUNDED = "_proj.weight"  # the end of the names of layers' linear weights
_SCALE = "_scale"  # behind a weight's name
_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
_SCHEME: Json = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["re:.*lm_head", "re:.*fc$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_NUMBERS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_NUMBERS, "strategy": "token", "dynamic": True},
        }
    },
}
SCHEME_KEY = "quantization_config"  # of config.json


def is_float8(config: Json) -> bool:
    """Whether a config.json is of this form."""
    return config.get(SCHEME_KEY) == _SCHEME


def to_float8(config: Json, weights: Mapping[str, Tensor]) -> tuple[Json, dict[str, Tensor]]:
    """Config and tensors of an export, with its layers in float8."""
    made: dict[str, Tensor] = {}
    for name, weight in weights.items():
        made[name] = weight
        if name.endswith(_ROUNDED):
            made[name], made[name + _SCALE] = _divided(weight)
    described = {**config, SCHEME_KEY: _SCHEME}
    inner = config.get("transformer_layer_config")
    if inner is not None:
        described["transformer_layer_config"] = {**inner, SCHEME_KEY: _SCHEME}
    return described, made


def widened(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an export with bfloat16 in place of float8, and without scales."""
    made = {}
    for name, weight in weights.items():
        scale = weights.get(name + _SCALE)
        if weight.dtype == FLOAT8 and scale is not None:
            made[name] = _product(weight, scale)
        elif not name.endswith(_ROUNDED + _SCALE):
            made[name] = weight
    return made


@torch.no_grad()
def round_layers(drafter: nn.Module) -> None:
    """Rounds a drafter's layers to what an export in float8 holds of them."""
    for name, weight in drafter.named_parameters():
        if name.endswith(_ROUNDED):
            weight.copy_(_product(*_divided(weight)))


def _divided(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 numbers [out, in] and their scales [out, 1]."""
    wide = weight.float()
    tiny = torch.finfo(torch.float32).tiny  # of rows of zeros, too
    scale = (wide.abs().amax(1, keepdim=True) / _LARGEST).clamp(min=tiny).bfloat16()
    # The scale was rounded, perhaps down.
    numbers = (wide / scale.float()).clamp(-_LARGEST, _LARGEST)
    return numbers.to(FLOAT8), scale


def _product(numbers: Tensor, scale: Tensor) -> Tensor:
    return (numbers.float() * scale.float()).bfloat16()
