"""EAGLE-3 heads in the two checkpoint forms that engines load, written and read.

    ours              speculators                               LlamaForCausalLMEagle3 (flat)
    read by           vLLM, speculators                         SGLang, TensorRT-LLM, vLLM, and ours (see hub/push.py)
    midlayer.*        layers.0.*                                midlayer.*
    layers.1.*        layers.1.*                                the same, and a copy of input_layernorm as hidden_norm, the
                                                                name under which SGLang reads it
    kept_ids [d]      d2t [d] int64 = kept_ids - arange(d), t2d [v] bool; both left out when the whole vocabulary is kept,
                      because vLLM then knows no such parameter
    config keys       LAYER_KEYS in transformer_layer_config,   all in one config, flags that are false left out: SpecForge
                      HEAD_KEYS in the config                   takes `norm_output: false` for a head without last norm

The embedding stays out: engines share the target's, as we do. llama.cpp's form is in drafters/gguf_heads.py. Sources: vLLM 0.32
models/{llama,qwen3}_eagle3.py and transformers_utils/configs/speculators; SGLang 0.5.5 to 0.5.23 srt/models/llama_eagle3.py;
TensorRT-LLM _torch/models/modeling_speculative.py (main after 1.2.1); speculators models/eagle3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from drafttrain.drafters.common.llama_layers import LAYER_KEYS, layer_keys, unsupported_by_llama
from drafttrain.drafters.eagle3.model import Eagle3, Eagle3Config
from drafttrain.drafters.gguf_heads import RELEASE, GgufHeads
from drafttrain.drafters.shipping import ENGINES, Engine, Exported, ExportRequest, Format, Shipping, Trained, engine_of
from drafttrain.errors import UserError
from drafttrain.files import Json, violation
from drafttrain.formats.public_names import public_name, write_clean_json
from drafttrain.formats.weights import (
    check_kept_ids,
    check_names,
    dtype_name,
    read_config,
    read_weights,
    write_checkpoint,
)
from drafttrain.formats.write_gguf import ROPES
from drafttrain.target import architectures_of, resolve_target
from drafttrain.target.loading import check_finite, read_embedding

# Keys beyond a decoder layer's, and the default where a checkpoint lacks one. Fields without a key of one value: qk_norm (a
# model type), sliding_window (with layer types), rope, feature_layers.
HEAD_KEYS: Json = {
    "draft_vocab_size": 0,
    "target_hidden_size": 0,
    "norm_before_residual": False,
    "fc_norm": False,
    "norm_output": False,
}
Head = TypeVar("Head", bound=Eagle3)


class _PublishedLayer(TypedDict, total=False):
    """Keys of a decoder layer that a published config.json may hold; sizes and flags are checked by `Eagle3Config`."""

    layer_types: list[str] | None
    sliding_window: int | None
    rope_parameters: Json | None
    rope_scaling: Json | None
    rope_theta: float | None
    partial_rotary_factor: float | None
    logit_scale: float | None


class _EagleKeys(TypedDict, total=False):
    """SGLang's `eagle_config`."""

    use_aux_hidden_state: bool | None
    norm_before_fc: bool | None
    eagle_aux_hidden_state_layer_ids: list[int] | None


class _Published(_PublishedLayer, total=False):
    """A head's config.json in one of both forms."""

    transformer_layer_config: _PublishedLayer
    eagle_config: _EagleKeys | None
    eagle_aux_hidden_state_layer_ids: list[int] | None
    norm_before_fc: bool | None
    embed_requires_grad: bool | None


# -- unsupported features -------------------------------------------------------------------------------------------


_SGLANG_ANY_HEAD = (
    "0.5.12"  # first release with windows, norms of features and output, several layers, any number of features
)


def unsupported_features(drafter: Eagle3, engine: Engine) -> list[str]:
    """The features of this head that an engine does not support, one reason each; empty if none."""
    config: Eagle3Config = drafter.config  # type: ignore[assignment]
    fields, layers = config.to_dict(), list(config.feature_layers)
    unordered = layers != sorted(set(layers))
    checks = {
        f"hidden_size={config.hidden_size} differs from the target's {config.target_hidden_size}: the engine concatenates the "
        "target's embedding and the state and needs both of one width": config.target_hidden_size != config.hidden_size,
        f"feature_layers={layers}: the engine collects target states in ascending order, each once": unordered,
    }
    if engine.name == "vLLM":
        lacks = "with qk_norm: vLLM's class for normed queries and keys (Qwen3) has"
        checks |= {
            f"mlp_bias {lacks} an MLP without bias": config.qk_norm and config.mlp_bias,
            f"attention_bias {lacks} no o_proj bias": config.qk_norm and config.attention_bias,
        }
        reasons = unsupported_by_llama(config, windows=True, partial=True)
    else:
        sglang, count = engine.name == "SGLang", config.num_hidden_layers
        old = sglang and engine.before(_SGLANG_ANY_HEAD)
        ignored = ["qk_norm", "norm_before_residual"]
        ignored += ["attention_bias", "mlp_bias"] if sglang else []
        ignored += ["fc_norm", "norm_output"] if old else []
        newer = f"; {engine.name} {_SGLANG_ANY_HEAD} does not" if old else ""
        checks |= {
            f"{key}: {engine.name} ignores it silently and would compute something else"
            + (newer if key in ("fc_norm", "norm_output") else ""): fields[key]
            for key in ignored
        }
        checks |= {
            f"{len(layers)} feature layers: the engine's fc takes three{newer}": old and len(layers) != 3,
            f"num_hidden_layers={count}: the engine loads one layer of this form{newer}": count != 1
            and (old or not sglang),
        }
        reasons = unsupported_by_llama(config, windows=sglang and not old)
    return [*reasons, *(reason for reason, found in checks.items() if found)]


# -- writing --------------------------------------------------------------------------------------------------------


def _speculators_config(config: Eagle3Config, head: Json, decoder: Json, request: ExportRequest) -> Json:
    verifier = {
        "name_or_path": public_name(request.target) if request.target else "",
        "architectures": architectures_of(request.target_files),
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": request.depth}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **head,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "transformer_layer_config": decoder,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": verifier,
        },
    }


def _flat_config(config: Eagle3Config, head: Json, decoder: Json, everywhere: bool) -> Json:
    """everywhere: SGLang supports the head too, not vLLM alone."""
    vllm_only = "Eagle3Qwen3ForCausalLM" if config.qk_norm else "Eagle3LlamaForCausalLM"
    said = {key: value for key, value in head.items() if value is not False}
    keys = {"architectures": ["LlamaForCausalLMEagle3" if everywhere else vllm_only], **decoder, **said}
    layers = list(config.feature_layers)
    if tuple(layers) != default_layers(config.target.get("num_layers", 0)):
        # vLLM takes the outer ids as they are and looks there first; SGLang knows the inner ones only and adds one.
        keys["eagle_aux_hidden_state_layer_ids"] = layers
        inner = [layer - 1 for layer in layers]
        keys["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": inner}
    return keys


def default_layers(count: int) -> tuple[int, int, int]:
    """The target states that engines fuse by default, for a target of `count` layers."""
    return 2, count // 2, count - 3


# -- reading --------------------------------------------------------------------------------------------------------


def make_head(
    cls: type[Head], config: Json, weights: Mapping[str, Tensor], target: Json, where: str, **more: object
) -> Head:
    """Makes a head from an engine's config and weights.

    Args:
        cls: Eagle3, or a kind with the same checkpoint form. more: further fields of its config. where: names the checkpoint.

    Raises:
        UserError: the config describes what ours cannot compute, or the weights do not fit it.
    """
    try:
        TypeAdapter(_Published).validate_python(config, strict=True)
    except ValidationError as error:
        raise UserError(f"{where}: config.json has {violation(error)}; get an intact copy of it") from error
    found = {name.removeprefix("model.").replace("layers.0.", "midlayer."): w for name, w in weights.items()}
    for name in [name for name in found if re.fullmatch(r"layers\.\d+\.hidden_norm\.weight", name)]:
        ours, norm = name.replace("hidden_norm", "input_layernorm"), found.pop(name)
        if "Eagle3" in str(config.get("architectures")) and not torch.equal(found.setdefault(ours, norm), norm):
            raise UserError(
                f"{where}: {name}, which SGLang reads, and {ours}, which vLLM reads, differ; keep one of them"
            )
    with torch.device("meta"):
        drafter = cls(cls.config_class(**_our_fields(config, found, target, where), **more))
    d, v = drafter.config.draft_vocab_size, drafter.config.vocab_size
    for name in [name for name in found if name.endswith("rotary_emb.inv_freq")]:
        if not torch.allclose(
            found.pop(name).float(), drafter.rotary.frequencies, rtol=1e-2
        ):  # may be stored as bfloat16
            raise UserError(
                f"{where}: {name} is not what config.json's rope_parameters give; ask its author which one holds"
            )
    if "d2t" not in found and d != v:
        raise UserError(f"{where} keeps {d} of {v} tokens, but has no d2t")
    shift = found.pop("d2t", torch.zeros(d, dtype=torch.int64))
    if shift.shape != (d,) or shift.is_floating_point():
        raise UserError(f"{where}: d2t must hold {d} integers, not {list(shift.shape)} {shift.dtype}")
    found["kept_ids"] = kept = shift.long() + torch.arange(d)  # [d] int64
    if (embedding := found.pop("embed_tokens.weight", None)) is not None:
        _check_embedding(embedding, target["name"], where)
    # Some trainers store copies of what belongs to the target, which the head does not compute with.
    for name in ("t2d", "verifier_norm.weight", "verifier_lm_head.weight"):
        found.pop(name, None)
    check_names(found, {name: tuple(value.shape) for name, value in drafter.state_dict().items()}, where)
    check_kept_ids(kept, v, where)
    check_finite(found.items(), where, "get an intact copy of it")
    dtype = found["fc.weight"].dtype
    state = {name: w if name == "kept_ids" else w.to(dtype) for name, w in found.items()}
    drafter.load_state_dict(state, strict=True, assign=True)
    return drafter.eval()


def _check_embedding(embedding: Tensor, target: str, where: str) -> None:
    """Checks that an embedding that comes with a head is the target's, which our heads read: up to its format, by value.

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
    ours, theirs = own[:rows], embedding[:rows]
    same = ours.shape == theirs.shape and any(torch.equal(ours.to(x), theirs.to(x)) for x in (ours.dtype, theirs.dtype))
    if not same:
        raise UserError(
            f"{where} brings an embed_tokens that differs from the target's; ours read the target's, so the head would draft "
            "something else: import a head that shares the target's embedding"
        )


def _check_foreign(config: Json, layer: Json, weights: Mapping[str, Tensor], where: str) -> None:
    """Raises UserError for a checkpoint that computes what no kind of ours computes."""
    eagle, scale = config.get("eagle_config") or {}, layer.get("logit_scale") or 1.0
    norms = config.get("norm_before_fc") or eagle.get("norm_before_fc") or "input_norm.weight" in weights
    embeds, one_state = config.get("embed_requires_grad"), eagle.get("use_aux_hidden_state") is False
    mixed = set(layer.get("layer_types") or []) == {"sliding_attention", "full_attention"}
    checks = {
        "has norm_before_fc, one norm over all features, which no kind of ours has": norms,
        "trained an embedding of its own (embed_requires_grad); ours reads the target's": embeds,
        f"has logit_scale={scale}, a factor on its logits, which no kind of ours has": scale != 1.0,
        "reads one target state (use_aux_hidden_state false), which is EAGLE-1": one_state,
        "mixes layers with and without a window; ours have one for all": mixed,
    }
    if reasons := [reason for reason, found in checks.items() if found]:
        raise UserError(f"{where} {'; it '.join(reasons)}")


def _our_fields(config: Json, weights: Mapping[str, Tensor], target: Json, where: str) -> Json:
    """Arguments of Eagle3Config from an engine's config. Raises UserError for what ours cannot compute."""
    layer = config.get("transformer_layer_config", config)
    _check_foreign(config, layer, weights, where)
    # What vLLM takes for heads in speculators' form that do not say.
    defaults = {**HEAD_KEYS, "norm_before_residual": layer is not config}
    fields: Json = {}
    for keys, place in ((LAYER_KEYS, layer), (defaults, config)):
        for name, default in keys.items():
            fields[name] = default if place.get(name) is None else place[name]
            if fields[name] is None:
                raise UserError(f"{where}: config.json has no {name}; it is needed")
    fields["qk_norm"] = "midlayer.self_attn.q_norm.weight" in weights
    windowed = "sliding_attention" in (layer.get("layer_types") or [])
    fields["sliding_window"] = (layer.get("sliding_window") or 0) if windowed else 0
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    rope.setdefault("rope_theta", layer.get("rope_theta") or 10000.0)
    if layer.get("partial_rotary_factor"):
        rope.setdefault("partial_rotary_factor", layer["partial_rotary_factor"])
    fields |= {"rope_theta": rope["rope_theta"], "rope_parameters": rope}
    if not fields["draft_vocab_size"]:
        fields["draft_vocab_size"] = len(weights["lm_head.weight"]) if "lm_head.weight" in weights else 0
    width = fields["target_hidden_size"] or fields["hidden_size"]
    for key, theirs in (("hidden_size", width), ("vocab_size", fields["vocab_size"])):
        if theirs != target[key]:
            raise UserError(
                f"{where} is for a target with {key}={theirs!r:.80}, but {target['name']!r} has {target[key]}"
            )
    fields["feature_layers"] = _feature_layers(config, width, weights, target, where)
    # A drafter of ours that was published says how it was trained.
    trained = {key: config[key] for key in Eagle3Config.recipe_keys if "drafter_kind" in config and key in config}
    return {**fields, **trained, "target": target}


def _feature_layers(
    config: Json, width: int, weights: Mapping[str, Tensor], target: Json, where: str
) -> tuple[int, ...]:
    """The target states that the head fuses, as our numbers: i is the input of layer i. width: of a state."""
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    inner = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not layers and inner:
        layers = [layer + 1 for layer in inner]  # written for SGLang, which counts outputs
    layers = tuple(layers or default_layers(target["num_layers"]))
    if "fc.weight" in weights:
        count, rest = divmod(weights["fc.weight"].shape[1], width)
        if rest or count != len(layers):
            raise UserError(f"{where}: fc takes {count} target states, but config.json names {list(layers)}")
    if max(layers) > target["num_layers"] or min(layers) < 0:
        raise UserError(f"{where} reads layers {list(layers)}, but {target['name']!r} has {target['num_layers']}")
    return layers


# -- the kind ---------------------------------------------------------------------------------------------------------


class Eagle3Files(Shipping[Head]):
    """Kinds in EAGLE-3's checkpoint forms."""

    def engine_config(self, drafter: Head, form: str, request: ExportRequest) -> Json:
        """Writes speculators' form for vllm, the flat form for sglang.

        A flat head that only vLLM can run gets an architecture that only vLLM knows, so that no other engine loads it and
        ignores what it does not understand.

        Raises:
            UserError: the form does not support the head.
        """
        if reasons := unsupported_features(drafter, engine_of("vllm")):
            raise UserError(f"this head cannot be written for {form}: {'; '.join(reasons)}")
        config: Eagle3Config = drafter.config  # type: ignore[assignment]
        decoder = {
            "model_type": "qwen3" if config.qk_norm else "llama",  # norms of queries and keys make it Qwen3's
            **layer_keys(config),
            "num_aux_hidden_states": len(config.feature_layers),
        }
        if window := config.sliding_window:
            decoder |= {"sliding_window": window, "layer_types": ["sliding_attention"] * config.num_hidden_layers}
        fields = config.to_dict()
        head = {name: fields[name] for name in HEAD_KEYS}
        if form == "vllm":
            described = _speculators_config(config, head, decoder, request)
        else:
            described = _flat_config(config, head, decoder, not unsupported_features(drafter, engine_of("sglang")))
        return {**described, "torch_dtype": dtype_name(request.dtype)}

    def engine_names(self, drafter: Head, config: Json) -> dict[str, str]:
        owns = super().engine_names(drafter, config)
        if "transformer_layer_config" in config:
            return {own.replace("midlayer.", "layers.0."): own for own in owns}
        later = (own for own in owns if own.startswith("layers.") and "input_layernorm" in own)
        return {**owns, **{own.replace("input_layernorm", "hidden_norm"): own for own in later}}

    def engine_weights(self, drafter: Head, config: Json) -> dict[str, Tensor]:
        weights, kept, v = super().engine_weights(drafter, config), drafter.kept_ids.cpu(), drafter.config.vocab_size
        if len(kept) != v:
            weights["d2t"] = kept - torch.arange(len(kept))  # [d] int64
            weights["t2d"] = torch.zeros(v, dtype=torch.bool)  # [v]
            weights["t2d"][kept] = True
        return weights

    def drafter_from(self, original: Head, export: Exported) -> Head:
        return make_head(type(original), export.config, export.weights, original.config.target, export.where)

    def drafter_weights(self, original: Head, back: Head, export: Exported) -> dict[str, Tensor]:
        return back.state_dict()  # `make_head` has filled it


class Eagle3Shipping(GgufHeads[Eagle3], Eagle3Files[Eagle3]):
    """A repository's root holds the flat form with our own keys in its config, speculators/ the other form."""

    description = (
        "an EAGLE-3 head (arXiv 2503.01840), {layers} over the target's states {features}, {parameters} parameters, "
        "{kept}"
    )
    formats = {
        "vllm": Format("EAGLE-3 in speculators' form", ("vLLM",)),
        "sglang": Format("EAGLE-3 as LlamaForCausalLMEagle3", ("SGLang", "TensorRT-LLM, Triton", "vLLM")),
        "gguf": Format("EAGLE-3 as GGUF file", ("llama.cpp",)),
    }
    verifiable = {"vllm": "vllm", "llama.cpp": "gguf"}
    in_root = ("vllm", "sglang", "gguf")
    gguf_arch = "eagle3"
    gguf_ropes = ROPES
    gguf_names = {"fc.weight": "fc.weight", "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight"}
    reads = "EAGLE-3 heads in speculators' form or as LlamaForCausalLMEagle3"
    no_format = "an EAGLE-3 head reads the target's states and is no language model of its own, as a draft_model is"

    def unsupported(self, trained: Trained, form: str, engine: Engine | None = None) -> list[str]:
        engine = engine or engine_of(form)
        found = super().unsupported(trained, form, engine)
        return found if form == "gguf" else found or unsupported_features(self.load(trained), engine)

    def gguf_keys(self, drafter: Eagle3) -> Json:
        config, layers = drafter.config, list(drafter.config.feature_layers)
        return {
            "target_layers": layers,
            "extract_layers": layers,  # the key's name in earlier releases
            "target_hidden_size": config.target_hidden_size,
            "norm_before_residual": config.norm_before_residual,
        }

    def gguf_fields(self, keys: Json, like: Eagle3) -> Json:
        fields = {key: keys[key] for key in ("target_hidden_size", "norm_before_residual")}
        return {**fields, "feature_layers": tuple(keys["target_layers"])}

    def gguf_unsupported(self, drafter: Eagle3) -> list[str]:
        config: Eagle3Config = drafter.config  # type: ignore[assignment]
        lacks = f"llama.cpp {RELEASE}"
        layers, count = config.feature_layers, config.num_hidden_layers
        ignored = ("attention_bias", "mlp_bias", "qk_norm", "fc_norm", "norm_output")
        checks = {
            f"{len(layers)} feature layers: {lacks} takes three": len(layers) != 3,
            f"num_hidden_layers={count}: {lacks} computes one layer": count != 1,
            f"hidden_size={config.hidden_size} differs from the target's {config.target_hidden_size}: {lacks} reads the "
            "target's embedding": config.hidden_size != config.target_hidden_size,
        } | {f"{key}: {lacks} has no such thing in its eagle3 model": getattr(config, key) for key in ignored}
        found = [reason for reason, unsupported in checks.items() if unsupported]
        return [*unsupported_by_llama(config), *found, *super().gguf_unsupported(drafter)]

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, object]]:
        layers = tuple(trained.config.get("feature_layers", ()))
        size = trained.config.get("sliding_window") or 0
        # SGLang counts the keys before a token, ours the token too.
        window = {"speculative-draft-window-size": max(size - 1, 1)} if size else {}
        tensorrt: Json = {"decoding_type": "Eagle3"}
        if layers != default_layers(trained.target.get("num_layers", 0)):
            tensorrt["eagle3_layers_to_capture"] = [layer - 1 for layer in layers]
        return {
            "vLLM": {"method": "eagle3"},
            "SGLang": {"speculative-algorithm": "EAGLE3", **window},
            "TensorRT-LLM, Triton": tensorrt,
            "llama.cpp": {"spec-type": "draft-eagle3"},
        }

    def publish(self, trained: Trained, request: ExportRequest) -> list[tuple[str, str]]:
        head = self.load(trained)
        folder, target = request.output, {**trained.target, "name": request.target}
        config = head.config
        config.target = target
        if reasons := unsupported_features(head, engine_of("vllm")):
            print(f"in drafttrain's own format only: {'; '.join(reasons)}")
            head.to(request.dtype).save_pretrained(folder)  # type: ignore[arg-type]
            whom = "the head, for drafttrain; other engines do not support it, see below"
            return [("model.safetensors", whom), *self.publish_gguf(trained, request)]
        own = {key: value for key, value in config.to_diff_dict().items() if value not in (None, 0) and key != "dtype"}
        for form, place in (("vllm", folder / "speculators"), ("sglang", folder)):
            described = self.engine_config(head, form, request)
            write_checkpoint(place, described, self.engine_weights(head, described), request.dtype)
        write_clean_json(folder / "config.json", {**own, **described, "drafter_kind": trained.kind, "target": target})
        flat = [
            name for name in ("vLLM", "SGLang", "TensorRT-LLM, Triton") if not unsupported_features(head, ENGINES[name])
        ]
        engines = f"{', '.join(flat)} and drafttrain"
        return [
            ("model.safetensors", f"the head as {described['architectures'][0]}, for {engines}"),
            ("speculators/model.safetensors", "the head in speculators' form, for vLLM and speculators"),
            *self.publish_gguf(trained, request),
        ]

    def recognizes(self, config: Mapping[str, object]) -> bool:
        if "speculators_model_type" in config:
            return config["speculators_model_type"] == "eagle3"
        architectures = config.get("architectures")
        return isinstance(architectures, list) and any("Eagle3" in str(name) for name in architectures)

    def read(self, folder: Path, target: Json, allow_pickle: bool = False) -> Eagle3:
        config = read_config(folder)
        if not self.recognizes(config):
            kind = config.get("speculators_model_type") or config.get("architectures")
            raise UserError(f"{str(folder)!r} is {kind}; import reads {self.reads}")
        weights = read_weights(folder, allow_pickle)
        if config.get("parallel_drafting") or "mask_hidden" in weights:
            raise UserError(f"{str(folder)!r} drafts in parallel (P-EAGLE), which is not imported")
        return make_head(Eagle3, config, weights, target, repr(str(folder)))


SHIPPING = Eagle3Shipping()
