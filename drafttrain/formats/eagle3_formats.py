"""EAGLE-3 heads in the two checkpoint forms that engines load, there and back.

    ours              speculators                               LlamaForCausalLMEagle3
    read by           vLLM, speculators                         SGLang, TensorRT-LLM, vLLM, and ours (see hub/push.py)
    midlayer.*        layers.0.*                                midlayer.*
    kept_ids [d]      d2t [d] int64 = kept_ids - arange(d), t2d [v] bool; both left out when the whole vocabulary is kept,
                      because vLLM then knows no such parameter
    config fields     KEYS: in the config, or in its transformer_layer_config

The embedding stays out: engines share the target's, as we do. Sources: vLLM 0.32 models/{llama,qwen3}_eagle3.py and
transformers_utils/configs/speculators; SGLang srt/models/llama_eagle3.py; speculators models/eagle3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.drafters.eagle3.model import Eagle3, Eagle3Config
from drafttrain.errors import UserError
from drafttrain.files import write_json
from drafttrain.formats.weights import read_config, read_weights

SPECULATORS, FLAT = "speculators", "LlamaForCausalLMEagle3"


@dataclass(frozen=True)
class Key:
    """A field of Eagle3Config in the engines' configs.

    Attributes:
        name: the key. layer: in speculators' form it belongs to transformer_layer_config.
        default: what engines take where a checkpoint lacks the key; None means that it must be there.
    """

    name: str
    layer: bool = True
    default: Any = None


KEYS = {
    "hidden_size": Key("hidden_size"),
    "intermediate_size": Key("intermediate_size"),
    "num_attention_heads": Key("num_attention_heads"),
    "num_key_value_heads": Key("num_key_value_heads", default=0),
    "head_dim": Key("head_dim", default=0),
    "num_hidden_layers": Key("num_hidden_layers", default=1),
    "hidden_act": Key("hidden_act", default="silu"),
    "rms_norm_eps": Key("rms_norm_eps", default=1e-6),
    "attention_bias": Key("attention_bias", default=False),
    "mlp_bias": Key("mlp_bias", default=False),
    "max_position_embeddings": Key("max_position_embeddings", default=131072),
    "vocab_size": Key("vocab_size"),
    "draft_vocab_size": Key("draft_vocab_size", layer=False, default=0),
    "target_hidden_size": Key("target_hidden_size", layer=False, default=0),
    "norm_before_residual": Key("norm_before_residual", layer=False, default=False),
    "fc_norm": Key("fc_norm", layer=False, default=False),
    "norm_output": Key("norm_output", layer=False, default=False),
}
# Fields without a key of one value: qk_norm (a model type), sliding_window (with layer types), rope, feature_layers.


# -- refusing what a form cannot say --------------------------------------------------------------------------------


def obstacles(drafter: Eagle3, engine: str) -> list[str]:
    """Why an engine cannot run this head, one reason each; empty if it can.

    Args:
        engine: "vllm" or "sglang" (whose rules TensorRT-LLM's loader shares).
    """
    found = []
    config: Any = drafter.config
    layers, activation, window = (
        tuple(config.feature_layers),
        config.hidden_act,
        config.sliding_window,
    )
    if activation != "silu":
        found.append(f"hidden_act={activation!r}: the engine's MLP raises on anything but silu")
    if config.target_hidden_size != config.hidden_size:
        found.append(
            f"hidden_size={config.hidden_size} differs from the target's {config.target_hidden_size}: the engine feeds the "
            "target's embedding beside the state and needs both of one width"
        )
    if layers != tuple(sorted(set(layers))):
        found.append(f"feature_layers={list(layers)}: the engine collects target states in ascending order, each once")
    if config.draft_vocab_size == config.vocab_size and not _in_order(drafter.kept_ids):
        found.append("the whole vocabulary is kept, but in another order, for which the engine has no table")
    if engine == "vllm":
        normed = config.qk_norm
        if normed and config.mlp_bias:
            found.append("mlp_bias with qk_norm: its class for normed queries and keys (Qwen3) has an MLP without bias")
        if normed and config.attention_bias:
            found.append(
                "attention_bias with qk_norm: its class for normed queries and keys (Qwen3) has no o_proj bias"
            )
        return found
    if len(layers) != 3:
        found.append(f"{len(layers)} feature layers: the engine's fc takes three")
    if (count := config.num_hidden_layers) != 1:
        found.append(f"num_hidden_layers={count}: most versions of the engine load one layer only")
    for flag in ("attention_bias", "mlp_bias", "qk_norm", "fc_norm", "norm_output", "norm_before_residual"):
        if getattr(config, flag):
            found.append(f"{flag}: the engine ignores it silently and would compute something else")
    if rope_parameters(config).get("partial_rotary_factor", 1.0) != 1.0:
        found.append("partial_rotary_factor: the engine's layer rotates whole heads")
    if window:
        found.append(f"sliding_window={window}: the engine's layer attends to everything")
    return found


# -- writing --------------------------------------------------------------------------------------------------------


def write_eagle3(
    drafter: Eagle3,
    output: Path,
    form: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    speculative_tokens: int = 3,
    target_name: str = "",
    target_architectures: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Writes config.json and model.safetensors in one of the two forms.

    Args:
        drafter: an EAGLE-3 head of ours.
        form: SPECULATORS or FLAT. A flat head that only vLLM can run gets an architecture that only vLLM knows, so that
            no other engine can load it and ignore what it does not understand.
        dtype: of the weights.
        speculative_tokens, target_name, target_architectures: what speculators' form says of the proposal and the target.
        extra: further config keys, which engines ignore.

    Raises:
        UserError: the form cannot express the head (every reason), or the output cannot be written.
    """
    reasons = obstacles(drafter, "vllm")
    if reasons:
        raise UserError(f"this head cannot be written as {form}: {'; '.join(reasons)}")
    described = (
        _speculators_config(drafter.config, speculative_tokens, target_name, target_architectures)
        if form == SPECULATORS
        else _flat_config(drafter)
    )
    described["torch_dtype"] = str(dtype).removeprefix("torch.")
    try:
        output.mkdir(parents=True, exist_ok=True)
        save_file(_engine_weights(drafter, form, dtype), output / "model.safetensors", metadata={"format": "pt"})
    except OSError as error:
        raise UserError(f"output={str(output)!r} cannot be written ({error.strerror}); choose another place") from error
    write_json(output / "config.json", {**described, **(extra or {})})
    return output


def _in_order(kept: Tensor) -> bool:
    """Whether the kept ids are the vocabulary in its own order."""
    return torch.equal(kept.cpu(), torch.arange(len(kept)))


def _engine_weights(drafter: Eagle3, form: str, dtype: torch.dtype) -> dict[str, Tensor]:
    config, kept = drafter.config, drafter.kept_ids.cpu()
    first = "layers.0." if form == SPECULATORS else "midlayer."
    weights = {
        name.replace("midlayer.", first): value.detach().to(dtype).contiguous().cpu()
        for name, value in drafter.state_dict().items()
        if name != "kept_ids"
    }
    if config.draft_vocab_size != config.vocab_size:
        weights["d2t"] = kept - torch.arange(len(kept))
        weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        weights["t2d"][kept] = True
    return weights


def _layer_keys(config: Any) -> dict[str, Any]:
    """The decoder layer as a config of the Llama family, rope, window and norms of queries and keys included."""
    rope = rope_parameters(config)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    keys = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        **{key.name: getattr(config, ours) for ours, key in KEYS.items() if key.layer},
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
        "num_aux_hidden_states": len(config.feature_layers),
    }
    if scaling["rope_type"] != "default":  # vLLM reads this key last, and null would take rope_parameters away
        keys["rope_scaling"] = scaling
    if window := config.sliding_window:
        keys["sliding_window"] = window
        keys["layer_types"] = ["sliding_attention"] * keys["num_hidden_layers"]
    return keys


def rope_parameters(config: Any) -> dict[str, Any]:
    """The rotary embedding in transformers 5's form: rope_type, rope_theta, and what the type needs."""
    given = dict(config.rope_parameters or {})
    return {"rope_type": "default", "rope_theta": config.rope_theta, **given}


def _speculators_config(config: Any, tokens: int, target_name: str, architectures: Sequence[str]) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **{key.name: getattr(config, ours) for ours, key in KEYS.items() if not key.layer},
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "transformer_layer_config": _layer_keys(config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target_name, "architectures": list(architectures)},
        },
    }


def _flat_config(drafter: Eagle3) -> dict[str, Any]:
    config, architecture = drafter.config, FLAT
    if obstacles(drafter, "sglang"):
        architecture = "Eagle3Qwen3ForCausalLM" if config.qk_norm else "Eagle3LlamaForCausalLM"
    keys = {
        "architectures": [architecture],
        **_layer_keys(config),
        **{key.name: getattr(config, ours) for ours, key in KEYS.items() if not key.layer},
    }
    layers = list(config.feature_layers)
    if tuple(layers) != default_layers(config.target.get("num_layers", 0)):
        # vLLM takes the outer ids as they are and looks there first; SGLang knows the inner ones only and adds one.
        keys["eagle_aux_hidden_state_layer_ids"] = layers
        keys["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
        }
    return keys


def default_layers(count: int) -> tuple[int, int, int]:
    """The target states that engines fuse unless told otherwise, for a target of `count` layers."""
    return 2, count // 2, count - 3


# -- reading --------------------------------------------------------------------------------------------------------


def form_of(config: Mapping[str, Any], folder: Path) -> str:
    """Which of the two forms a config.json is in.

    Raises:
        UserError: in neither, with what it is instead.
    """
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        if kind != "eagle3":
            raise UserError(f"{str(folder)!r} is a speculator of type {kind!r}; import reads eagle3")
        return SPECULATORS
    architectures = config.get("architectures") or []
    if any("Eagle3" in name for name in architectures):
        return FLAT
    raise UserError(
        f"{str(folder)!r} has architectures={architectures}; import reads EAGLE-3 heads: speculators' form, or "
        "LlamaForCausalLMEagle3"
    )


def read_eagle3(folder: Path, target: dict[str, Any], allow_pickle: bool = False) -> Eagle3:
    """A published head as one of ours, on the CPU in the checkpoint's dtype.

    Args:
        target: identity of its target, see `Target.identity`.

    Raises:
        UserError: another kind of checkpoint, one that computes what ours cannot, missing, unknown or misshaped weights,
            or another target.
    """
    described = read_config(folder)
    form = form_of(described, folder)
    weights = dict(_named_as_ours(read_weights(folder, allow_pickle)))
    fields = _our_fields(described, form, weights, target, folder)
    config = Eagle3Config(**fields)
    with torch.device("meta"):
        drafter = Eagle3(config)
    expected = drafter.state_dict()
    kept = weights.pop("d2t", None)
    if kept is None and config.draft_vocab_size != config.vocab_size:
        raise UserError(
            f"{str(folder)!r} keeps {config.draft_vocab_size} of {config.vocab_size} tokens, but has no d2t"
        )
    order = torch.arange(config.draft_vocab_size)
    weights["kept_ids"] = order if kept is None else kept.long() + order
    # Engines bring the target's embedding, and some trainers store copies of what belongs to the target.
    for name in ("t2d", "embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"):
        weights.pop(name, None)
    check_names(weights, {name: value.shape for name, value in expected.items()}, str(folder))
    if not 0 <= int(weights["kept_ids"].min()) <= int(weights["kept_ids"].max()) < config.vocab_size:
        raise UserError(f"{str(folder)!r}: d2t points outside of the target's {config.vocab_size} tokens")
    dtype = weights["fc.weight"].dtype
    drafter.load_state_dict(
        {k: v if k == "kept_ids" else v.to(dtype) for k, v in weights.items()}, strict=True, assign=True
    )
    return drafter.eval()


def check_names(found: Mapping[str, Tensor], expected: Mapping[str, Sequence[int]], where: str) -> None:
    """Raises UserError unless names and shapes are exactly the expected ones."""
    for word, names in (("lacks", expected.keys() - found.keys()), ("has unknown", found.keys() - expected.keys())):
        if names:
            raise UserError(f"{where} {word} weights: {', '.join(sorted(names)[:5])}")
    for name, shape in expected.items():
        if tuple(found[name].shape) != tuple(shape):
            raise UserError(f"{where}: {name} has shape {list(found[name].shape)}, must be {list(shape)}")


def _named_as_ours(weights: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    names = {name: name.removeprefix("model.") for name in weights}
    return [(ours.replace("layers.0.", "midlayer."), weights[name]) for name, ours in names.items()]


def _our_fields(
    described: dict[str, Any], form: str, weights: Mapping[str, Tensor], target: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Arguments of Eagle3Config from an engine's config. Raises UserError for what ours cannot compute."""
    layer = described["transformer_layer_config"] if form == SPECULATORS else described
    where = f"{str(folder)!r}"
    eagle = described.get("eagle_config") or {}
    if described.get("norm_before_fc") or eagle.get("norm_before_fc") or "input_norm.weight" in weights:
        raise UserError(
            f"{where} has norm_before_fc, one norm over all features together, which no kind of ours computes"
        )
    if described.get("embed_requires_grad"):
        raise UserError(f"{where} trained an embedding of its own (embed_requires_grad); ours reads the target's")
    if described.get("parallel_drafting") or "mask_hidden" in weights:
        raise UserError(f"{where} drafts in parallel (P-EAGLE), which is not imported")
    if (scale := layer.get("logit_scale") or 1.0) != 1.0:
        raise UserError(f"{where} has logit_scale={scale}, a factor on its logits, which no kind of ours computes")
    if eagle.get("use_aux_hidden_state") is False:
        raise UserError(f"{where} reads one target state (use_aux_hidden_state false), which is EAGLE-1")
    fields: dict[str, Any] = {}
    for ours, place in KEYS.items():
        value = (layer if place.layer else described).get(place.name)
        if value is None:
            value = place.default
            if ours == "norm_before_residual" and form == SPECULATORS:
                value = True  # what vLLM takes for heads in this form that do not say
        if value is None:
            raise UserError(f"{where}: config.json has no {place.name}; it is needed")
        fields[ours] = value
    fields["qk_norm"] = "midlayer.self_attn.q_norm.weight" in weights
    types = set(layer.get("layer_types") or [])
    if types == {"sliding_attention", "full_attention"}:
        raise UserError(f"{where} mixes layers with and without a window; ours have one for all")
    fields["sliding_window"] = layer.get("sliding_window") or 0 if "sliding_attention" in types else 0
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    rope.setdefault("rope_theta", layer.get("rope_theta") or 10000.0)
    if layer.get("partial_rotary_factor"):
        rope.setdefault("partial_rotary_factor", layer["partial_rotary_factor"])
    fields["rope_theta"] = rope["rope_theta"]
    fields["rope_parameters"] = rope
    if not fields["draft_vocab_size"]:
        fields["draft_vocab_size"] = len(weights["lm_head.weight"]) if "lm_head.weight" in weights else 0
    for key in ("hidden_size", "vocab_size"):
        theirs = fields["target_hidden_size"] or fields["hidden_size"] if key == "hidden_size" else fields[key]
        if theirs != target[key]:
            raise UserError(
                f"{where} was made for a target with {key}={theirs}, but {target['name']!r} has {target[key]}"
            )
    fields["feature_layers"] = _feature_layers(described, fields, weights, target, where)
    fields["target"] = target
    return fields


def _feature_layers(
    described: dict[str, Any], fields: dict[str, Any], weights: Mapping[str, Tensor], target: dict[str, Any], where: str
) -> tuple[int, ...]:
    """Which target states the head fuses, as our numbers: i is the input of layer i."""
    layers = described.get("eagle_aux_hidden_state_layer_ids")
    inner = (described.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not layers and inner:
        layers = [layer + 1 for layer in inner]  # written for SGLang, which counts outputs
    layers = tuple(layers or default_layers(target["num_layers"]))
    if "fc.weight" in weights:
        count, rest = divmod(weights["fc.weight"].shape[1], fields["target_hidden_size"] or fields["hidden_size"])
        if rest or count != len(layers):
            raise UserError(f"{where}: fc takes {count} target states, but config.json names {list(layers)}")
    if max(layers) > target["num_layers"] or min(layers) < 0:
        raise UserError(f"{where} reads layers {list(layers)}, but {target['name']!r} has {target['num_layers']}")
    return layers
