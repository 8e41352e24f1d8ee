"""Exports whose layers hold float8 or float4 numbers: compressed-tensors' forms, without calibration.

    float8   layers.*_proj.weight                float8 (e4m3) [out, in]
             layers.*_proj.weight_scale          bfloat16 [out, 1], by which a row is multiplied
    nvfp4    layers.*_proj.weight_packed         uint8 [out, in / 2], two float4 (e2m1) numbers, the first in the low bits
             layers.*_proj.weight_scale          float8 (e4m3) [out, in / 16], by which 16 numbers are multiplied
             layers.*_proj.weight_global_scale   bfloat16 [1], by which all are divided; one for the whole head
             all others                          bfloat16: norms, the fusing layer, the head

float8 layers multiply inputs that the engine rounds, with a scale per token that it computes; nvfp4
layers multiply inputs as they are (W4A16). vLLM reads the scheme where it reads a draft's other
keys: in `transformer_layer_config` of speculators' form.
Source: compressed-tensors' formats `float-quantized` and `nvfp4-pack-quantized`; vLLM 0.32,
quantization/compressed_tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from drafttrain.errors import UserError
from drafttrain.files import Json

SCHEME_KEY = "quantization_config"  # of config.json
_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max  # 448
_GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # magnitudes of float4 (e2m1)
_BLOCK = 16  # float4 numbers with one scale
_ROUNDED = "_proj.weight"  # the end of the names of layers' linear weights


class SmallLayers(Protocol):
    """A form of layers' weights.

    Attributes:
        scheme: its description in config.json.
        parts: ends of the names of a weight's tensors, behind the weight's own name.
    """

    scheme: Json
    parts: tuple[str, ...]

    def divided(self, weight: Tensor, highest: Tensor) -> tuple[Tensor, ...]:
        """The parts of a weight [out, in]. highest: the largest magnitude of all layers' weights."""
        ...

    def product(self, *parts: Tensor) -> Tensor:
        """The weight [out, in] that an engine computes with, in bfloat16."""
        ...


def _scheme(name: str, group: Json) -> Json:
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "ignore": ["re:.*lm_head", "re:.*fc$"],
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
    }


class Float8:
    """8 bits a number, a scale per row."""

    _NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
    scheme = _scheme(
        "float-quantized",
        {
            "weights": {**_NUMBERS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_NUMBERS, "strategy": "token", "dynamic": True},
        },
    )
    parts: tuple[str, ...] = ("", "_scale")

    def divided(self, weight: Tensor, highest: Tensor) -> tuple[Tensor, ...]:
        wide = weight.float()
        tiny = torch.finfo(torch.float32).tiny  # of rows of zeros, too
        scale = (wide.abs().amax(1, keepdim=True) / _LARGEST).clamp(min=tiny).bfloat16()
        # The scale was rounded, perhaps down.
        numbers = (wide / scale.float()).clamp(-_LARGEST, _LARGEST)
        return numbers.to(_FLOAT8), scale

    def product(self, *parts: Tensor) -> Tensor:
        numbers, scale = parts
        return (numbers.float() * scale.float()).bfloat16()


class Nvfp4:
    """4 bits a number, a float8 scale per 16 and one scale for the head.

    vLLM joins projections of one input (q, k, v; gate, up) and keeps one of their global scales, so
    all layers have the same.
    """

    scheme = _scheme(
        "nvfp4-pack-quantized",
        {
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "tensor_group",
                "group_size": _BLOCK,
                "dynamic": False,
            }
        },
    )
    parts: tuple[str, ...] = ("_packed", "_scale", "_global_scale")

    def divided(self, weight: Tensor, highest: Tensor) -> tuple[Tensor, ...]:
        outputs, inputs = weight.shape
        if inputs % _BLOCK:
            raise UserError(
                f"dtype='nvfp4' needs layers whose inputs are a multiple of {_BLOCK}, found {inputs}; use float8"
            )
        # The largest scale is float8's largest number.
        whole = (_LARGEST * _GRID[-1] / highest).bfloat16()
        blocks = weight.float().view(outputs, -1, _BLOCK) * whole.float()
        scale = blocks.abs().amax(-1, keepdim=True) / _GRID[-1]
        scale = scale.clamp(max=_LARGEST).to(_FLOAT8)
        # A block whose scale is rounded to zero is zero.
        numbers = blocks / scale.float().clamp(min=torch.finfo(_FLOAT8).smallest_normal / 8)
        middles = (_GRID[1:] + _GRID[:-1]) / 2
        codes = torch.bucketize(numbers.abs(), middles.to(numbers.device)).to(torch.uint8)
        codes += 8 * (numbers < 0)  # the sign's bit
        codes = codes.view(outputs, inputs)
        packed = codes[:, 0::2] + 16 * codes[:, 1::2]
        return packed, scale[..., 0], whole.view(1)

    def product(self, *parts: Tensor) -> Tensor:
        packed, scale, whole = parts
        codes = torch.stack((packed % 16, packed // 16), dim=-1).long()  # [out, in / 2, 2]
        numbers = _GRID.to(packed.device)[codes % 8] * (1 - 2 * (codes // 8))
        blocks = numbers.view(len(packed), -1, _BLOCK) * scale.float()[..., None] / whole.float()
        return blocks.flatten(1).bfloat16()


SMALL: dict[str, SmallLayers] = {"float8": Float8(), "nvfp4": Nvfp4()}


def small_layers(config: Json) -> SmallLayers | None:
    """The form of an export's layers, by its config.json; None for plain ones."""
    found = config.get(SCHEME_KEY)
    return next((form for form in SMALL.values() if form.scheme == found), None)


def with_small_layers(
    form: SmallLayers,
    config: Json,
    weights: Mapping[str, Tensor],
) -> tuple[Json, dict[str, Tensor]]:
    """Config and tensors of an export, with its layers in a form."""
    highest = _highest(weights)
    made: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not name.endswith(_ROUNDED):
            made[name] = weight
            continue
        for part, tensor in zip(form.parts, form.divided(weight, highest), strict=True):
            made[name + part] = tensor
    described = {**config, SCHEME_KEY: form.scheme}
    inner = config.get("transformer_layer_config")
    if inner is not None:
        described["transformer_layer_config"] = {**inner, SCHEME_KEY: form.scheme}
    return described, made


def widened(config: Json, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an export with small layers in bfloat16. A weight that lacks a part stays in parts."""
    made = dict(weights)
    form = small_layers(config)
    if form is None:
        return made
    first = form.parts[0]
    for name in weights:
        own = name.removesuffix(first)
        names = [own + part for part in form.parts]
        if own.endswith(_ROUNDED) and made.keys() >= set(names):
            parts = [made.pop(part) for part in names]
            made[own] = form.product(*parts)
    return made


@torch.no_grad()
def round_layers(form: SmallLayers, drafter: nn.Module) -> None:
    """Rounds a drafter's layers to what an export in a form holds of them."""
    weights = dict(drafter.named_parameters())
    highest = _highest(weights)
    for name, weight in weights.items():
        if name.endswith(_ROUNDED):
            weight.copy_(form.product(*form.divided(weight, highest)))


def _highest(weights: Mapping[str, Tensor]) -> Tensor:
    """The largest magnitude of the layers' weights."""
    found = [
        weight.abs().max().float() for name, weight in weights.items() if name.endswith(_ROUNDED)
    ]
    tiny = torch.tensor(torch.finfo(torch.float32).tiny)
    return torch.stack([tiny, *found]).max()
