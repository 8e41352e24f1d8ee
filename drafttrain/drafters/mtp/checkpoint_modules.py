"""The prediction module in a target's own checkpoint, and which layer of ours computes it.

    around the layer    enorm, hnorm, eh_proj, norm      the family's names and order are in `Form`
    the layer           as `DraftLayer`, with kernels, where it computes the same; else as the target's own class (`OwnLayer`)

Sources of names and order: vLLM 0.32 models/{deepseek_mtp, glm4_moe_mtp, qwen3_next_mtp,
qwen3_5_mtp, mimo_mtp}.py. They read the target's state behind its final norm, concatenate
(embedding, state) but for MiMo, and hand the normed output to the next depth.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig

from drafttrain.drafters.common import starts
from drafttrain.errors import UserError
from drafttrain.files import Json, hub_snapshot, value_of
from drafttrain.target import Target
from drafttrain.target.loading import check_finite, loading


class Form(NamedTuple):
    """How a family stores its first module.

    Attributes:
        module: prefix of its tensors; {n} is the target's number of layers. layer: prefix of the
            decoder layer's, after that.
        names: the family's names -> ours, without `.weight`.
        further: prefixes that show further modules. swapped: the projection reads the state before
            the embedding.
    """

    module: str
    layer: str
    names: dict[str, str]
    further: str
    swapped: bool = False


DEEPSEEK = Form(  # GLM-4 too
    "model.layers.{n}.",
    "",
    {
        "enorm": "enorm",
        "hnorm": "hnorm",
        "eh_proj": "eh_proj",
        "shared_head.norm": "norm",
    },
    "model.layers.{next}.",
)
QWEN = Form(
    "mtp.",
    "layers.0.",
    {
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "fc": "eh_proj",
        "norm": "norm",
    },
    "mtp.layers.1.",
)
MIMO = Form(
    "model.mtp_layers.0.",
    "",
    {
        "token_layernorm": "enorm",
        "hidden_layernorm": "hnorm",
        "input_proj": "eh_proj",
        "final_layernorm": "norm",
    },
    "model.mtp_layers.1.",
    swapped=True,
)
FORMS = {
    "deepseek": DEEPSEEK,
    "qwen": QWEN,
    "mimo": MIMO,
}
# A module's copies of the target's embedding and head, and a buffer of older files.
_EMBEDDINGS = ("embed_tokens.weight",)
_HEADS = ("shared_head.head.weight",)
_BUFFERS = ("rotary_emb.inv_freq",)
_SCALE = "_scale_inv"  # behind the name of an FP8 weight: its factors, one per block
# Modules of a plain dense layer.
_PLAIN = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "self_attn.q_proj",
    "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


class NativeModule(NamedTuple):
    """A module's weights, float32.

    Attributes:
        form: key of `FORMS`. around: by our names; plain norms. layer: by the family's names,
            behind the layer's.
        head: [v, h] the module's own head rows, None if the target's serve it.
    """

    form: str
    around: dict[str, Tensor]
    layer: dict[str, Tensor]
    head: Tensor | None


def read_native(target: Target) -> NativeModule:
    """Reads the first MTP module of the target's checkpoint.

    Raises:
        UserError: no such tensors; values that are not finite; an embedding of its own.
    """
    key, prefix, own = _find(target)
    form = FORMS[key]
    head = None
    around: dict[str, Tensor] = {}
    layer: dict[str, Tensor] = {}
    for name, path in own.items():
        full = prefix + name
        if name.endswith((*_BUFFERS, _SCALE)) or full.startswith(_further(form, target)):
            continue
        with loading(f"target={target.path!r}", "download it again"), safe_open(path, "pt") as file:
            weight = _widened(file.get_tensor(full), full, own.get(name + _SCALE), target)
        stem, _, part = name.rpartition(".")
        if name.endswith(_EMBEDDINGS):
            if not _same(weight, target.embed_weight):
                raise UserError(
                    f"init='native': {full} of target {target.name!r} is not the target's embedding, which drafters "
                    "read; use init=target"
                )
        elif name.endswith(_HEADS):
            head = None if _same(weight, target.head_weight) else weight
        elif stem in form.names:
            around[f"{form.names[stem]}.{part}"] = weight
        else:
            layer[name.removeprefix(form.layer)] = weight

    named = {prefix + name: weight for name, weight in {**around, **layer}.items()}
    module = f"init='native': the prediction module of target {target.name!r}"
    check_finite(named.items(), module, "use init=target")
    around = _plain_norms(around, target)
    if form.swapped:
        around["eh_proj.weight"] = swapped(around["eh_proj.weight"])
    return NativeModule(key, around, layer, head)


def _find(target: Target) -> tuple[str, str, dict[str, Path]]:
    """Finds the module in the target's checkpoint.

    Returns:
        Its form, the prefix of its tensors, and the file of each tensor by the rest of its name.
    """
    folder = Path(target.path)
    if not folder.is_dir():
        folder = hub_snapshot(target.path, ["*.safetensors"], "target")
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with loading(f"target={target.path!r}", "download it again"), safe_open(path, "pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    for key, form in FORMS.items():
        prefix = form.module.format(n=target.num_layers)
        own = {}
        for name, path in files.items():
            if name.startswith(prefix):
                own[name.removeprefix(prefix)] = path
        if not all(f"{name}.weight" in own for name in form.names):
            continue
        if any(name.startswith(_further(form, target)) for name in files):
            note = f"target {target.name!r} has several prediction modules; the first serves all depths"
            print(f"note: {note}", flush=True)
        return key, prefix, own
    raise UserError(
        f"init='native': the checkpoint of target {target.name!r} ({target.path}) holds no multi-token prediction module "
        "(eh_proj, mtp.fc or mtp_layers); use init=target"
    )


def _further(form: Form, target: Target) -> str:
    return form.further.format(next=target.num_layers + 1)


def _widened(
    weight: Tensor,
    name: str,
    scales: Path | None,
    target: Target,
) -> Tensor:
    """A stored weight in float32; FP8 blocks, as DeepSeek publishes them, times their factors."""
    if scales is None:
        return weight.float()
    if weight.element_size() > 1:
        raise UserError(
            f"init='native': {name}{_SCALE} of target {target.name!r} scales a weight that is not FP8; use init=target"
        )
    # Of the file: a loaded model may have other values, or none.
    config, _ = PreTrainedConfig.get_config_dict(target.path)
    quantization = value_of(config, "quantization_config", {})
    rows, columns = value_of(quantization, "weight_block_size", (128, 128))
    with safe_open(scales, "pt") as file:
        factors = file.get_tensor(name + _SCALE).float()  # [blocks of rows, blocks of columns]
    # Each factor for the rows and columns of its block; the last blocks may be cut.
    factors = factors.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return weight.float() * factors[: weight.shape[0], : weight.shape[1]]


def _plain_norms(weights: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
    """Weights whose norms hold plain factors, from those of the target's family."""
    offset = norm_offset(starts.final_norm(target))
    plain = dict(weights)
    for name, weight in weights.items():
        if "norm" in name:
            plain[name] = weight + offset
    return plain


def _same(copy: Tensor, own: Tensor) -> bool:
    """Whether a module's copy of a weight equals the target's own."""
    return copy.shape == own.shape and torch.equal(copy.to(own.device, own.dtype), own)


def swapped(project: Tensor) -> Tensor:
    """[h, 2h] with its halves exchanged."""
    return torch.cat(project.chunk(2, dim=1)[::-1], dim=1)


def norm_offset(norm: nn.Module | None) -> float:
    """1 for a norm that stores its factors minus one, else 0.

    A family does it for all norms of a module.
    """
    if norm is None:
        return 0.0
    weight = starts.norm_weight(norm)
    if weight is None:
        return 0.0
    # `weight` is what the norm applies, the parameter what it stores.
    return float((weight - next(norm.parameters())).float().mean().round())


def plain_layer(module: NativeModule, target: Target) -> tuple[Json, dict[str, Tensor]]:
    """The config options and weights of a `DraftLayer` that has a module's tensors.

    Raises:
        UserError: tensors that a plain dense layer does not have.
    """
    for name in module.layer:
        if name.rpartition(".")[0] not in _PLAIN:
            raise UserError(f"not a plain dense layer, which has no {name}")
    state = _plain_norms(module.layer, target)
    gate = state.get("mlp.gate_proj.weight", torch.empty(1))
    shapes: Json = {
        "intermediate_size": len(gate),
        "qk_norm": "self_attn.q_norm.weight" in state,
    }
    if "self_attn.q_proj.bias" in state:
        shapes["attention_bias"] = True  # of all four; one that is missing is zero
        state.setdefault("self_attn.o_proj.bias", torch.zeros(target.hidden_size))
    return shapes, state
