"""Reading block drafters' checkpoints, in export.py's form and other trainers' spellings of it.

    DFlashDraftModel (z-lab; SpecForge and AngelSlim's QwenDFlashDraftModel; ModelOpt)   keys in dflash_config
    DominoDraftModel (SpecForge, verl-SpeCo)   as DFlashDraftModel with projector_type domino, keys outside or in dflash_config
    DFlash2DraftModel (inco.ai, z-lab)   as DFlashDraftModel
    Qwen3DSparkModel (DeepSpec), DSparkDraftModel (SpecForge; ModelOpt's is named DFlash)  keys outside or in dflash_config
    speculators_model_type dflash, dspark (speculators)   layer keys in transformer_layer_config; layers as ours, not one less

Layers have windows by `layer_types`, or all of them by `use_swa`; `swa_window_size` precedes
`sliding_window`. Their blocks are causal as a key says for all layers; without one, in layers with a
window alone (vLLM, SGLang; speculators unless `sliding_window_non_causal`). Sinks are in all layers.

A DSpark checkpoint predicts at its first token too unless `sample_from_anchor` is false; its
`block_size` then counts the masks, in speculators' form the first token too. Sources: z-lab/dflash
dflash/model.py; deepseek-ai/DeepSpec modeling/dspark (June 2026); SpecForge 0.2
modeling/draft/{dflash,dspark}.py; AngelSlim train/models/draft/qwen_dflash.py; NVIDIA
Model-Optimizer export/plugins/hf_spec_export.py; speculators 0.8 models/{dflash,dspark}; the
loaders of vLLM 0.32 and SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import TypedDict

from drafttrain.drafters.common.configs import SLIDING
from drafttrain.drafters.eagle3.reading import (
    check_embedding,
    check_keys,
    drop_whole_table,
    published_rope,
)
from drafttrain.drafters.published_keys import LAYER_FORMS, Fixed, windows_of
from drafttrain.drafters.shipping import Exported, check_target
from drafttrain.errors import UserError
from drafttrain.files import Json, value_of
from drafttrain.formats.weights import architectures_in
from drafttrain.target import resolve_target
from drafttrain.target.loading import read_embedding

_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "max_position_embeddings", "vocab_size",
)  # fmt: skip
# Copies of what belongs to the target, tables that follow from d2t, buffers.
_UNUSED = (
    "t2d",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
    "rotary_emb.inv_freq",
    "mask_embedding",
)
# Other trainers' names, as prefixes, and those of the form that is read.
_PREFIXES = {
    "model.": "", "draft_model.": "", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.",
    "logit_head.": "", "markov_w": "markov_head.markov_w", "confidence_proj.": "confidence_head.proj.",
    "gate_proj.": "markov_head.gate_proj.", "joint_proj.": "markov_head.joint_proj.",
}  # fmt: skip


# Other spellings, in the order in which vLLM looks for them.
_ALIASES = {
    "dspark_noise_token_id": "mask_token_id",
    "pard_token": "mask_token_id",
    "ptd_token_id": "mask_token_id",
    "dspark_markov_rank": "markov_rank",
}


class _PublishedBlock(TypedDict, total=False):
    """Keys whose place or type others choose; sizes and flags are checked by `BlockConfig`."""

    transformer_layer_config: Json
    dflash_config: Json | None
    dspark_config: Json | None
    layer_types: list[str] | None
    target_layer_ids: list[int] | None
    aux_hidden_state_layer_ids: list[int] | None
    sample_from_anchor: bool | None
    markov_rank: int | None
    markov_head_type: str | None
    block_size: int | None
    mask_token_id: int | None
    use_swa: bool | None
    swa_window_size: int | None
    sliding_window_non_causal: bool | None
    causal: bool | None
    causal_head: bool | None
    is_causal: bool | None
    dflash_query_causal: bool | None
    attention_sink_bias: bool | None
    add_swa_attention_sink_bias: bool | None
    dflash_attention_sink: bool | None
    eagle_aux_hidden_state_layer_ids: list[int] | None


_SINKS = ("attention_sink_bias", "add_swa_attention_sink_bias", "dflash_attention_sink")
FIXED_KEYS = {
    "projector_type": Fixed(("dflash", "dspark"), "is of {key}={value!r:.60}"),
    "hidden_act": Fixed(("silu",)),
    "attention_mode": Fixed(("gqa",)),
    "attention_bias": Fixed((False,)),
    "mlp_bias": Fixed((False,)),
    "final_logit_softcapping": Fixed((0,), "caps its logits ({key})"),
    "is_neox_style": Fixed((True,), "rotates neighboring values (is_neox_style false)"),
    "output_multiplier": Fixed((1,)),
    "input_embedding_scale": Fixed((1,)),
    "attention_value_scale": Fixed((1,)),
}
PUBLISHED_KEYS = {
    *_SIZES, *LAYER_FORMS, *_ALIASES, *_PublishedBlock.__annotations__, "draft_vocab_size", "shift_label", "target_hidden_size",
}  # fmt: skip


def own_keys(config: Mapping[str, object]) -> Json:
    """A block drafter's own keys, from all places where trainers put them.

    Keys without a value are left out.
    """
    keys: Json = {}
    spelled: Json = {}  # under an alias
    for place in (config, config.get("dflash_config"), config.get("dspark_config")):
        if isinstance(place, Mapping):
            for key, value in place.items():
                if value is None:
                    continue
                if key in _ALIASES:
                    spelled.setdefault(_ALIASES[key], value)
                else:
                    keys[key] = value
    return spelled | keys


def is_dspark(config: Mapping[str, object]) -> bool:
    """Whether a block drafter's config has a Markov head."""
    default = 0
    if config.get("speculators_model_type") == "dspark":
        default = 256
    rank = own_keys(config).get("markov_rank", default)
    return isinstance(rank, int) and rank > 0


def block_kind(config: Mapping[str, object]) -> str:
    """The kind of a published block drafter; its parts, not its name, tell them apart."""
    if own_keys(config).get("projector_type") == "domino":
        return "domino"
    if "DominoDraftModel" in architectures_in(config):
        return "domino"
    if is_dspark(config):
        return "dspark"
    keys = own_keys(config)
    nemo = "Qwen3DFlashDraftModel" in architectures_in(config)
    if keys.get("causal_head") or (nemo and keys.get("causal")):
        return "jetspec"
    return "dflash"


def foreign_block(checkpoint: Exported) -> list[str]:
    """What a checkpoint computes that our block drafters do not, where no single key says it."""
    check_keys(checkpoint, _PublishedBlock)
    keys = own_keys(checkpoint.config)
    layer = checkpoint.config.get("transformer_layer_config", checkpoint.config)
    reasons = windows_of(layer, mixed=True)
    aux = [layer + 1 for layer in value_of(keys, "target_layer_ids", [])]
    if aux and keys.get("eagle_aux_hidden_state_layer_ids", aux) != aux:
        reasons.append("has eagle_aux_hidden_state_layer_ids of other layers than target_layer_ids")
    width = keys.get("target_hidden_size")
    if width not in (None, layer.get("hidden_size")):
        reasons.append(f"has target_hidden_size={width}, another width than its own")
    return reasons


def block_fields(checkpoint: Exported, target: Json) -> Json:
    """Arguments of a block drafter's config, from a checkpoint's.

    Raises:
        UserError: the checkpoint describes what ours cannot compute.
    """
    where = checkpoint.where
    config = checkpoint.config
    check_keys(checkpoint, _PublishedBlock)
    keys = own_keys(config)
    layer = config.get("transformer_layer_config", config)
    nested = "speculators_model_type" in config
    place = "aux_hidden_state_layer_ids" if nested else "target_layer_ids"
    for name in (place, "block_size"):
        if not keys.get(name):
            raise UserError(f"{where}: config.json has no {name}; it is needed")
    layers: list[int] = list(keys[place])
    if not nested:  # the flat form counts one less
        layers = [i + 1 for i in layers]

    # A flat DSpark checkpoint predicts at its first token too unless it says otherwise; if not,
    # its block_size leaves that token out.
    flat_dspark = False
    if not nested:
        named_dspark = any("DSpark" in name for name in architectures_in(config))
        flat_dspark = named_dspark or is_dspark(config)
    anchor = bool(keys.get("sample_from_anchor", keys.get("shift_label", flat_dspark)))
    size = keys["block_size"]
    if flat_dspark and not anchor:
        size += 1

    fields: Json = {name: layer[name] for name in _SIZES if layer.get(name) is not None}
    v = target["vocab_size"]
    learned = "mask" in checkpoint.weights
    table = checkpoint.weights.get("embed_tokens.weight", ())
    if holds_mask(table, checkpoint, v):
        fields["vocab_size"] = v
        learned = True
    check_target(fields, "hidden_size", target, where)
    if not all(0 <= i <= target["num_layers"] for i in layers):
        raise UserError(
            f"{where} reads layers {layers}, but {target['name']!r} has {target['num_layers']}"
        )
    if "mask_token_id" not in keys and not learned:
        raise UserError(f"{where}: config.json has no mask_token_id; it is needed")
    rope = published_rope(layer)
    types = _layer_types(keys, layer)
    window = 0
    if SLIDING in types:
        window = keys.get("swa_window_size") or value_of(layer, "sliding_window", 0)
    return {
        **fields,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "feature_layers": tuple(layers),
        "draft_vocab_size": keys.get("draft_vocab_size") or v,
        "block_size": size,
        "sample_from_anchor": anchor,
        "layer_types": types or None,
        "sliding_window": window,
        "causal": _causal(keys),
        "attention_sink_bias": any(keys.get(name) for name in _SINKS),
        "mask_token_id": None if learned else keys["mask_token_id"],
        "train_head": "lm_head.weight" in checkpoint.weights,
        "target": target,
    }


def _layer_types(keys: Json, layer: Json) -> list[str]:
    """The type of each layer, none where all see everything. A longer list, such as the target's, begins with the drafter's."""
    count = layer.get("num_hidden_layers")
    types = value_of(layer, "layer_types", [])[:count]
    if keys.get("use_swa") and SLIDING not in types:
        return [SLIDING] * (count or len(types))
    return types


def _causal(keys: Json) -> bool | str:
    """Whether a block's tokens see earlier ones of it alone (`BlockConfig.causal`).

    The names are vLLM's, ModelOpt's, JetSpec's and speculators'.
    """
    for name in ("dflash_query_causal", "causal_head", "causal", "is_causal"):
        if keys.get(name) is not None:
            return bool(keys[name])
    if keys.get("sliding_window_non_causal"):
        return False
    return "sliding"


def named(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors under the names of engines' form."""
    found = {}
    for name, value in weights.items():
        for theirs, form in _PREFIXES.items():
            if name.startswith(theirs):
                name = form + name.removeprefix(theirs)
        if not name.endswith(_UNUSED):
            found[name] = value
    return found


def without_copies(
    weights: dict[str, Tensor], checkpoint: Exported, target: Json
) -> dict[str, Tensor]:
    """Leaves out of a checkpoint's tensors what belongs to the target.

    That is an embedding, unless a learned mask stands behind its rows, a head that is the target's
    (if the target's files are on this disk), and the table of a vocabulary that is kept whole.

    Args:
        weights: under the names of engines' form.

    Raises:
        UserError: another embedding.
    """
    found = dict(weights)
    name = target["name"]
    v = target["vocab_size"]
    table = found.get("embed_tokens.weight")
    if table is not None:
        check_embedding(table[:v], name, checkpoint.where)
        if not holds_mask(table, checkpoint, v):
            del found["embed_tokens.weight"]
    drop_whole_table(found, v)
    head = found.get("lm_head.weight")
    files = resolve_target(name)
    if head is not None and len(head) == v and Path(files).is_dir():
        own = read_embedding(files, ("lm_head.weight", "embed_out.weight"))
        if own is None:  # the target's embedding is its head too
            own = read_embedding(files)
        if own is not None and torch.equal(own[:v].to(head.dtype), head):
            del found["lm_head.weight"]
    return found


def holds_mask(table: Sized, checkpoint: Exported, vocab_size: int) -> bool:
    """Whether the last row of an embedding is a learned mask, behind those of the target's tokens.

    Args:
        table: [v, h] or [v + 1, h].
    """
    layer = checkpoint.config.get("transformer_layer_config", checkpoint.config)
    if own_keys(checkpoint.config).get("mask_token_id") != vocab_size:
        return False
    return len(table) == layer.get("vocab_size") == vocab_size + 1
