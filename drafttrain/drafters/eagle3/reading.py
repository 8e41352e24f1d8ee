"""Reading published EAGLE-3 heads, in export.py's checkpoint forms and other trainers' spellings.

LlamaForCausalLM with draft_vocab_size   SafeAILab/EAGLE, the authors'
LlamaForCausalLMEagle3                   SpecForge 0.2, TensorRT-LLM, ModelOpt (its own keys in eagle_config), NeMo Automodel
Eagle3LlamaForCausalLM                   AngelSlim
Eagle3DeepseekV2ForCausalLM              with latent attention, for vLLM and SGLang; DeepseekV3Eagle3DraftModel of NeMo Automodel
speculators_model_type eagle3, peagle    speculators 0.8
"""

from __future__ import annotations

import re
from typing import TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from drafttrain.drafters.common.configs import LATENT_KEYS
from drafttrain.drafters.common.layers import Rotary
from drafttrain.drafters.common.llama_layers import LAYER_KEYS
from drafttrain.drafters.eagle3.model import Eagle3, Eagle3Config
from drafttrain.drafters.published_keys import LAYER_FORMS, Fixed, windows_of
from drafttrain.drafters.shipping import Exported, check_target
from drafttrain.errors import UserError
from drafttrain.files import Json, value_of, violation
from drafttrain.target import resolve_target
from drafttrain.target.loading import read_embedding

# Keys beyond a decoder layer's, and the default where a checkpoint lacks one. Fields without a key
# of one value: qk_norm (a model type), sliding_window (with layer types), rope, feature_layers.
HEAD_KEYS: Json = {
    "draft_vocab_size": 0,
    "target_hidden_size": 0,
    "norm_before_residual": False,
    "fc_norm": False,
    "norm_output": False,
    "norm_before_fc": False,
}
Head = TypeVar("Head", bound=Eagle3)


class _PublishedLayer(TypedDict, total=False):
    """Keys of a decoder layer in a published config.json; `Eagle3Config` checks sizes and flags."""

    layer_types: list[str] | None
    sliding_window: int | None
    rope_parameters: Json | None
    rope_scaling: Json | None
    rope_theta: float | None
    partial_rotary_factor: float | None


class _EagleKeys(TypedDict, total=False):
    """SGLang's and ModelOpt's `eagle_config`."""

    use_aux_hidden_state: bool | None
    use_input_layernorm_in_first_layer: bool | None
    use_last_layernorm: bool | None
    use_mtp_layernorm: bool | None
    next_layer_regular: bool | None
    parallel_draft_step: int | None
    norm_before_fc: bool | None
    eagle_aux_hidden_state_layer_ids: list[int] | None


class _Published(_PublishedLayer, total=False):
    """A head's config.json in one of both forms."""

    transformer_layer_config: _PublishedLayer
    eagle_config: _EagleKeys | None
    eagle_aux_hidden_state_layer_ids: list[int] | None
    norm_before_fc: bool | None
    use_aux_norm: bool | None  # fc_norm's earlier name


# What `head_fields`, `foreign_head` and the kinds read of a published config.
PUBLISHED_KEYS = {
    *LAYER_KEYS, *LATENT_KEYS, *HEAD_KEYS, *LAYER_FORMS, *_Published.__annotations__, *_EagleKeys.__annotations__,
    "mask_token_id", "ptd_token_id", "pard_token", "parallel_drafting",
}  # fmt: skip
FIXED_KEYS = {
    "use_aux_hidden_state": Fixed(
        (True,), "reads one target state (use_aux_hidden_state false), which is EAGLE-1"
    ),
    "use_input_layernorm_in_first_layer": Fixed(
        (True,),
        "has no norm of the token's embedding (use_input_layernorm_in_first_layer false)",
    ),
    "use_last_layernorm": Fixed((True,), "has no norm before its head (use_last_layernorm false)"),
    "use_mtp_layernorm": Fixed((False,), "has an MTP module's norms (use_mtp_layernorm)"),
    "num_nextn_predict_layers": Fixed((0, 1), "has {value} prediction modules ({key})"),
    "rope_interleave": Fixed(
        (True,), "rotates halves of latent attention's heads (rope_interleave false)"
    ),
    "parallel_draft_step": Fixed(
        (0, 1), "has Medusa-like heads beside its own (parallel_draft_step above 1)"
    ),
}
PUBLISHED_KEYS -= FIXED_KEYS.keys()


def default_layers(count: int) -> tuple[int, int, int]:
    """The target states that engines fuse by default, for a target of `count` layers."""
    return 2, count // 2, count - 3


def published_head(checkpoint: Exported, target: Json) -> Exported:
    """A published head as export.py's forms name its tensors, without what belongs to the target.

    An embedding stays, for `drafter_from` to compare.

    Raises:
        UserError: it brings other rotary frequencies than its config's, or copies of a norm that
            differ.
    """
    where = checkpoint.where
    found = {}
    for name, weight in checkpoint.weights.items():
        found[name.removeprefix("model.").replace("layers.0.", "midlayer.")] = weight

    # Later layers' norms, of which SGLang's form has two copies.
    for name in list(found):
        if not re.fullmatch(r"layers\.\d+\.hidden_norm\.weight", name):
            continue
        ours = name.replace("hidden_norm", "input_layernorm")
        norm = found.pop(name)
        if "Eagle3" not in str(checkpoint.config.get("architectures")):
            continue
        if not torch.equal(found.setdefault(ours, norm), norm):
            raise UserError(
                f"{where}: {name}, which SGLang reads, and {ours}, which vLLM reads, differ; keep one"
            )

    for name in list(found):
        if name.endswith("rotary_emb.inv_freq"):
            _check_frequencies(name, found.pop(name), checkpoint)
    # Some trainers store copies of what belongs to the target, which the head does not compute
    # with, and a table of a vocabulary that is kept whole.
    for name in ("t2d", "verifier_norm.weight", "verifier_lm_head.weight"):
        found.pop(name, None)
    drop_whole_table(found, target["vocab_size"])

    weights = {}
    for name, weight in found.items():
        if "transformer_layer_config" in checkpoint.config:
            name = name.replace("midlayer.", "layers.0.")
        # SGLang reads hidden_norm, vLLM input_layernorm.
        elif re.fullmatch(r"layers\.\d+\.input_layernorm\.weight", name):
            weights[name.replace("input_layernorm", "hidden_norm")] = weight
        weights[name] = weight
    return checkpoint._replace(weights=weights)


def drop_whole_table(found: dict[str, Tensor], vocab_size: int) -> None:
    """Drops a d2t that says that all of the target's tokens are kept: zeros, or verl-SpeCo's own ids."""
    table = found.get("d2t")
    if table is None or len(table) != vocab_size:
        return
    if not table.any() or torch.equal(table.cpu(), torch.arange(vocab_size)):
        del found["d2t"]


def _check_frequencies(name: str, stored: Tensor, checkpoint: Exported) -> None:
    """Raises UserError if stored rotary frequencies are not those of the config."""
    layer = checkpoint.config.get("transformer_layer_config", checkpoint.config)
    width = layer.get("qk_rope_head_dim") or layer.get("head_dim")
    if not width:
        width = layer["hidden_size"] // layer["num_attention_heads"]
    expected = Rotary(width, published_rope(layer)).frequencies
    same = stored.shape == expected.shape
    # They may have been rounded to bfloat16.
    if not same or not torch.allclose(stored.float(), expected, rtol=1e-2):
        raise UserError(
            f"{checkpoint.where}: {name} is not what config.json's rope_parameters give; ask its author"
        )


def check_keys(checkpoint: Exported, schema: type) -> None:
    """Raises UserError for a config.json whose keys have values of other types than `schema` says."""
    try:
        TypeAdapter(schema).validate_python(checkpoint.config, strict=True)
    except ValidationError as error:
        raise UserError(
            f"{checkpoint.where}: config.json has {violation(error)}; get an intact copy of it"
        ) from error


def check_embedding(embedding: Tensor, target: str, where: str) -> None:
    """Checks that an embedding that comes with a head is the target's, which our heads read.

    Values are compared; their dtypes may differ.

    Raises:
        UserError: it differs, or the target's weights are not at hand.
    """
    own = read_embedding(resolve_target(target))
    if own is None:
        raise UserError(
            f"{where} brings an embed_tokens, and target {target!r} has no safetensors here to compare it with; give the "
            "target's folder with its weights"
        )
    rows = min(len(own), len(embedding))  # either may be padded
    ours = own[:rows]
    theirs = embedding[:rows]
    same = False
    if ours.shape == theirs.shape:
        # Either may have been rounded to the other's dtype.
        same = torch.equal(ours, theirs.to(ours.dtype))
        if not same:
            same = torch.equal(ours.to(theirs.dtype), theirs)
    if not same:
        raise UserError(
            f"{where} brings an embed_tokens that differs from the target's; ours read the target's, so the head would draft "
            "something else: import a head that shares the target's embedding"
        )


def foreign_head(checkpoint: Exported) -> list[str]:
    """What a checkpoint computes that no kind of ours computes, where no single key says it."""
    check_keys(checkpoint, _Published)
    config = checkpoint.config
    layer = config.get("transformer_layer_config", config)
    eagle = value_of(config, "eagle_config", {})
    reasons = windows_of(layer)
    count = value_of(layer, "num_hidden_layers", 1)
    if eagle.get("next_layer_regular") is False and count > 1:
        reasons.append("has later layers that read the embedding too (next_layer_regular false)")
    return reasons


def head_fields(checkpoint: Exported, target: Json) -> Json:
    """Arguments of Eagle3Config from an engine's config and weights.

    Raises:
        UserError: the config describes what ours cannot compute.
    """
    check_keys(checkpoint, _Published)
    config = checkpoint.config
    layer = config.get("transformer_layer_config", config)
    # What vLLM takes for heads in speculators' form that do not say.
    eagle3 = layer is not config and config.get("speculators_model_type") == "eagle3"
    defaults = {**HEAD_KEYS, "norm_before_residual": eagle3}
    fields: Json = {}
    for keys, place in ((LAYER_KEYS, layer), (defaults, config)):
        for name, default in keys.items():
            fields[name] = value_of(place, name, default)
            if fields[name] is None:
                raise UserError(f"{checkpoint.where}: config.json has no {name}; it is needed")
    for name in LATENT_KEYS:
        fields[name] = value_of(layer, name, 0)
    if fields["kv_lora_rank"]:
        fields["head_dim"] = 0  # transformers writes the rotated part's width there
    eagle = value_of(config, "eagle_config", {})
    fields["fc_norm"] |= value_of(config, "use_aux_norm", False)
    fields["norm_before_fc"] |= value_of(eagle, "norm_before_fc", False)
    fields["qk_norm"] = any("self_attn.q_norm" in name for name in checkpoint.weights)
    fields["sliding_window"] = 0
    types = value_of(layer, "layer_types", [])
    if "sliding_attention" in types:
        fields["sliding_window"] = value_of(layer, "sliding_window", 0)
    rope = published_rope(layer)
    fields["rope_theta"] = rope["rope_theta"]
    fields["rope_parameters"] = rope
    if not fields["draft_vocab_size"]:
        head = checkpoint.weights.get("lm_head.weight", ())  # [d, h]
        fields["draft_vocab_size"] = len(head)

    if not fields["target_hidden_size"]:
        fields["target_hidden_size"] = fields["hidden_size"]
    check_target(fields, "target_hidden_size", target, checkpoint.where)
    fields["feature_layers"] = _feature_layers(checkpoint, fields["target_hidden_size"], target)

    # A drafter of ours that was published says how it was trained.
    if "drafter_kind" in config:
        for key in Eagle3Config.recipe_keys:
            if key in config:
                fields[key] = config[key]
    fields["target"] = target
    return fields


def published_layer(layer: Json) -> Json:
    """LAYER_KEYS and rope_parameters of a published config; those that it lacks get their default."""
    keys: Json = {"rope_parameters": published_rope(layer)}
    for name, default in LAYER_KEYS.items():
        value = value_of(layer, name, default)
        if value is not None:
            keys[name] = value
    return keys


def published_rope(layer: Json) -> Json:
    """rope_parameters of a published config, whose trainers spell them in several ways."""
    found = layer.get("rope_parameters")
    if not found:
        found = layer.get("rope_scaling")
    rope = dict(found or {})
    kind = rope.pop("type", None)  # the key's former name
    if kind:
        rope["rope_type"] = kind
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", value_of(layer, "rope_theta", 10000.0))
    if layer.get("partial_rotary_factor"):
        rope.setdefault("partial_rotary_factor", layer["partial_rotary_factor"])
    return rope


def _feature_layers(checkpoint: Exported, width: int, target: Json) -> tuple[int, ...]:
    """The target states that the head fuses, as our numbers: i is the input of layer i.

    width: of a state.
    """
    config = checkpoint.config
    found = config.get("eagle_aux_hidden_state_layer_ids")
    eagle = config.get("eagle_config")
    if not found and eagle:
        found = eagle.get("eagle_aux_hidden_state_layer_ids")
        if found:  # written for SGLang, which counts outputs
            found = [layer + 1 for layer in found]
    if not found:
        found = default_layers(target["num_layers"])
    layers = tuple(found)
    fc = checkpoint.weights.get("fc.weight")  # [h, f*h]
    if fc is not None:
        count, rest = divmod(fc.shape[1], width)
        if rest or count != len(layers):
            raise UserError(
                f"{checkpoint.where}: fc takes {count} target states, but config.json names {list(layers)}"
            )
    if max(layers) > target["num_layers"] or min(layers) < 0:
        raise UserError(
            f"{checkpoint.where} reads layers {list(layers)}, but {target['name']!r} has {target['num_layers']}"
        )
    return layers
