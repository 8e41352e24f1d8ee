"""Reads the multi-token prediction module in some targets' checkpoints; transformers skips its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from drafttrain.drafters.common.target_weights import PROJECTIONS, final_norm, norm_weight
from drafttrain.errors import UserError
from drafttrain.files import Json, hub_snapshot
from drafttrain.target import Target


class _Form(NamedTuple):
    """How a family stores its first module.

    Attributes:
        module: prefix of its tensors; {n} is the target's number of layers. layer: prefix of the decoder layer's, after that.
        names: the family's names -> ours, without `.weight`.
        swapped: the projection reads the state before the embedding.
    """

    module: str
    layer: str
    names: dict[str, str]
    swapped: bool = False


_DEEPSEEK = _Form(  # GLM-4 too
    "model.layers.{n}.", "", {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"}
)
_QWEN = _Form(
    "mtp.",
    "layers.0.",
    {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"},
)
_MIMO = _Form(
    "model.mtp_layers.0.",
    "",
    {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"},
    swapped=True,
)
# Copies of the target's own tensors.
_SHARED = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
# Parts of tensor names that show an unsupported layer, and its description.
_FOREIGN = {"experts": "a mixture of experts", "kv_a_proj": "multi-head latent attention", "scale": "quantized"}
_PLAIN = {f"{block}.{name}" for block, names in PROJECTIONS.items() for name in names}
_PLAIN |= {"self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"}


def read_native(target: Target) -> tuple[Json, dict[str, Tensor]]:
    """Reads the first MTP module of the target's checkpoint.

    Returns:
        The drafter's config options that it fixes, and its tensors by the names of `MTPModule`, and `norm.weight`.

    Raises:
        UserError: no such tensors, or a module that is not dense with plain attention.
    """
    form, prefix, own = _find(target)
    layer, names = form.layer, form.names
    state: dict[str, Tensor] = {}
    for name, path in own.items():
        stem, _, part = name.rpartition(".")
        inner = stem.removeprefix(layer)
        if stem in names:
            ours = f"{names[stem]}.{part}"
        elif inner in _PLAIN and name.startswith(layer) and part in ("weight", "bias"):
            ours = f"layer.{inner}.{part}"
        elif name.endswith(_SHARED) or (layer and name.startswith("layers.") and not name.startswith(layer)):
            continue  # shared, or a further module's
        else:
            what = next((what for sign, what in _FOREIGN.items() if sign in name), "of another kind")
            raise UserError(
                f"init='native': the prediction module of target {target.name!r} is {what} ({prefix}{name}), and only dense "
                "ones with plain attention are supported; use init=target"
            )
        with safe_open(path, "pt") as file:
            state[ours] = file.get_tensor(prefix + name).float()
    offset = _norm_offset(target)
    for name in state:
        if "norm" in name:
            state[name] = state[name] + offset
    if form.swapped:
        state["eh_proj.weight"] = torch.cat(state["eh_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
    shapes: Json = {
        "intermediate_size": len(state["layer.mlp.gate_proj.weight"]),
        "qk_norm": "layer.self_attn.q_norm.weight" in state,
    }
    if "layer.self_attn.q_proj.bias" in state:
        shapes["attention_bias"] = True  # of all four; one that is missing is zero
        output = state["layer.self_attn.o_proj.weight"]
        state.setdefault("layer.self_attn.o_proj.bias", output.new_zeros(len(output)))
    return shapes, state


def _find(target: Target) -> tuple[_Form, str, dict[str, Path]]:
    """The form of the checkpoint's module, the prefix of its tensors, and the file of each tensor by the rest of its name."""
    files = dict(_tensors(target))
    for form in (_DEEPSEEK, _QWEN, _MIMO):
        prefix = form.module.format(n=target.num_layers)
        own = {name.removeprefix(prefix): path for name, path in files.items() if name.startswith(prefix)}
        if all(f"{name}.weight" in own for name in form.names):
            return form, prefix, own
    raise UserError(
        f"init='native': the checkpoint of target {target.name!r} ({target.path}) holds no multi-token prediction module "
        "(eh_proj, mtp.fc or mtp_layers); use init=target"
    )


def _tensors(target: Target) -> Iterator[tuple[str, Path]]:
    """Every tensor of the target's checkpoint, and its file."""
    folder = Path(target.path)
    if not folder.is_dir():
        folder = hub_snapshot(target.path, ["*.safetensors"], "target")
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                yield name, path


def _norm_offset(target: Target) -> float:
    """1 for families whose norms store their factors minus one, read off the target's final norm; else 0."""
    norm = final_norm(target)
    weight = None if norm is None else norm_weight(norm)
    return 0.0 if norm is None or weight is None else float((weight - next(norm.parameters())).float().mean().round())
