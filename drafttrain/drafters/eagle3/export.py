"""EAGLE-3 heads in the two checkpoint forms that engines load, written and read.

    ours              speculators                               LlamaForCausalLMEagle3 (flat)
    read by           vLLM, speculators                         SGLang, TensorRT-LLM, vLLM, and ours (see hub/push.py)
    midlayer.*        layers.0.*                                midlayer.*
    layers.1.*        layers.1.*                                the same, and a copy of input_layernorm as hidden_norm, the
                                                                name under which SGLang reads it
    kept_ids [d]      d2t [d] int64 = kept_ids - arange(d), t2d [v] bool; both left out when the whole vocabulary is kept,
                      because vLLM then knows no such parameter
    (latent attention: both in the flat form, as Eagle3DeepseekV2ForCausalLM)
    config keys       LAYER_KEYS in transformer_layer_config,   all in one config, flags that are false left out: SpecForge
                      HEAD_KEYS in the config                   takes `norm_output: false` for a head without last norm

The embedding stays out: engines share the target's, as we do. llama.cpp's form is in
drafters/gguf_heads.py. Sources: vLLM 0.32 models/{llama,qwen3}_eagle3.py and
transformers_utils/configs/speculators; SGLang 0.5.5 to 0.5.23 srt/models/llama_eagle3.py;
TensorRT-LLM _torch/models/modeling_speculative.py (main after 1.2.1); speculators models/eagle3.
"""

from __future__ import annotations

from collections.abc import Mapping

from drafttrain.drafters.common.configs import LATENT_KEYS
from drafttrain.drafters.common.llama_layers import layer_keys, set_features, unsupported_by_llama
from drafttrain.drafters.eagle3.model import Eagle3, Eagle3Config
from drafttrain.drafters.eagle3.reading import (
    FIXED_KEYS,
    HEAD_KEYS,
    PUBLISHED_KEYS,
    Head,
    check_embedding,
    default_layers,
    foreign_head,
    head_fields,
    published_head,
)
from drafttrain.drafters.form import Form, kept_tables
from drafttrain.drafters.gguf_heads import RELEASE, GgufHeads
from drafttrain.drafters.shipping import (
    EngineSettings,
    Exported,
    ExportRequest,
    Format,
    Shipping,
    Trained,
)
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.engines import ENGINES, EngineRelease, engine_of
from drafttrain.formats.public_names import public_name, write_clean_json
from drafttrain.formats.weights import (
    architectures_in,
    dtype_name,
    write_checkpoint,
)
from drafttrain.formats.write_gguf import ROPES
from drafttrain.target.loading import architectures_of

# -- unsupported features --------------------------------------------------------------------------


# First release with windows, norms of features and output, several layers, any number of features.
_SGLANG_ANY_HEAD = "0.5.12"
_SGLANG_LATENT = "0.5.23"  # the release that was read; earlier ones may have latent attention too
_NOT_IN_LLAMA = (
    "attention_bias", "mlp_bias", "qk_norm", "fc_norm", "norm_before_fc", "norm_output", "image_embeds",
)  # fmt: skip


def unsupported_features(drafter: Eagle3, engine: EngineRelease) -> list[str]:
    """The features of this head that an engine does not support, one reason each; empty if none."""
    config: Eagle3Config = drafter.config  # type: ignore[assignment]
    vllm = engine.name == "vLLM"
    sglang = engine.name == "SGLang"
    old = sglang and engine.before(_SGLANG_ANY_HEAD)
    windows = vllm or (sglang and not old)
    latent = vllm or (sglang and not engine.before(_SGLANG_LATENT))
    found = unsupported_by_llama(config, windows=windows, partial=vllm, latent=latent)
    if config.hidden_size != config.target_hidden_size:
        found.append(
            f"hidden_size={config.hidden_size} differs from the target's {config.target_hidden_size}: the engine concatenates "
            "the target's embedding and the state and needs both of one width"
        )
    if config.image_embeds:
        found.append("image_embeds: engines embed an image's placeholders as tokens")
    layers = list(config.feature_layers)
    if layers != sorted(set(layers)):
        found.append(
            f"feature_layers={layers}: the engine collects target states in ascending order, each once"
        )
    if config.kv_lora_rank:
        return found + _unsupported_latent(config, engine.name)
    if vllm:
        lacks = "with qk_norm: vLLM's class for normed queries and keys (Qwen3) has"
        if config.qk_norm and config.mlp_bias:
            found.append(f"mlp_bias {lacks} an MLP without bias")
        if config.qk_norm and config.attention_bias:
            found.append(f"attention_bias {lacks} no o_proj bias")
        return found

    if config.norm_before_fc:
        found.append(f"norm_before_fc: tried with vLLM alone, not with {engine.name}")
    silently = f"{engine.name} ignores it silently and would compute something else"
    # What the Llama classes of these engines do not read.
    ignored = ["qk_norm", "norm_before_residual"]
    if sglang:
        ignored += ["attention_bias", "mlp_bias"]
    found += set_features(config, dict.fromkeys(ignored, silently))
    newer = ""
    if old:
        newer = f"; supported since {engine.name} {_SGLANG_ANY_HEAD}"
        found += set_features(config, dict.fromkeys(("fc_norm", "norm_output"), silently + newer))
        if len(layers) != 3:
            found.append(f"{len(layers)} feature layers: the engine's fc takes three{newer}")
    count = config.num_hidden_layers
    if count != 1 and (old or not sglang):
        found.append(f"num_hidden_layers={count}: the engine loads one layer of this form{newer}")
    return found


def _unsupported_latent(config: Eagle3Config, engine: str) -> list[str]:
    """What the engines' class for heads with latent attention does not compute."""
    missing = ["mlp_bias", "norm_before_fc"]
    if engine == "SGLang":
        missing.append("norm_before_residual")
    lacks = f"{engine}'s class for heads with latent attention has no such thing"
    found = set_features(config, dict.fromkeys(missing, lacks))
    if not config.q_lora_rank:
        found.append(f"q_lora_rank=0: {engine} joins q_a_proj and kv_a_proj and needs both")
    count = config.num_hidden_layers
    if engine == "SGLang" and count != 1:
        found.append(f"num_hidden_layers={count}: {engine}'s class has one layer")
    return found


# -- writing ---------------------------------------------------------------------------------------


def _speculators_config(
    config: Eagle3Config,
    head: Json,
    decoder: Json,
    request: ExportRequest,
) -> Json:
    """The config in speculators' form, of the keys of the head and of its layers."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **head,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "transformer_layer_config": decoder,
        "speculators_config": speculators_proposal("eagle3", request.depth, request),
    }


def speculators_proposal(algorithm: str, depth: int, request: ExportRequest) -> Json:
    """The key speculators_config: how a drafter of speculators' form drafts, and its target.

    depth: tokens that it drafts per round.
    """
    target = public_name(request.target) if request.target else ""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {
            "name_or_path": target,
            "architectures": architectures_of(request.target_files),
        },
    }


def _flat_config(
    config: Eagle3Config,
    head: Json,
    decoder: Json,
    everywhere: bool,
) -> Json:
    """The config in the flat form. everywhere: SGLang supports the head too, not vLLM alone."""
    if config.kv_lora_rank and everywhere:
        architecture = "Eagle3DeepseekV2ForCausalLM"
    elif config.kv_lora_rank:
        architecture = "Eagle3DeepseekV3ForCausalLM"
    elif everywhere:
        architecture = "LlamaForCausalLMEagle3"
    elif config.qk_norm:
        architecture = "Eagle3Qwen3ForCausalLM"
    else:
        architecture = "Eagle3LlamaForCausalLM"
    keys = {"architectures": [architecture], **decoder}
    for key, value in head.items():
        if value is not False:
            keys[key] = value
    layers = list(config.feature_layers)
    if tuple(layers) != default_layers(config.target.get("num_layers", 0)):
        # vLLM takes the outer ids as they are and looks there first; SGLang knows the inner ones
        # only and adds one.
        keys["eagle_aux_hidden_state_layer_ids"] = layers
        inner = [layer - 1 for layer in layers]
        keys["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": inner,
        }
    return keys


# -- the kind --------------------------------------------------------------------------------------


class Eagle3Files(Shipping[Head]):
    """Kinds in EAGLE-3's checkpoint forms."""

    published_keys = PUBLISHED_KEYS
    fixed_keys = FIXED_KEYS

    def engine_config(self, drafter: Head, form: str, request: ExportRequest) -> Json:
        """Writes speculators' form for vllm, the flat form for sglang.

        A flat head that only vLLM can run gets an architecture that only vLLM knows, so that no
        other engine loads it and ignores what it does not understand.

        Raises:
            UserError: the form does not support the head.
        """
        reasons = unsupported_features(drafter, engine_of("vllm"))
        if reasons:
            raise UserError(f"this head cannot be written for {form}: {'; '.join(reasons)}")
        config: Eagle3Config = drafter.config  # type: ignore[assignment]
        fields = config.to_dict()
        # Norms of queries and keys make a layer Qwen3's.
        decoder: Json = {"model_type": "qwen3" if config.qk_norm else "llama"}
        decoder |= layer_keys(config)
        if config.kv_lora_rank:
            # DeepSeek-V3's type would make vLLM read an MTP module.
            decoder["model_type"] = "deepseek_v2"
            del decoder["head_dim"]  # engines read the rotated part's there
            decoder |= {name: fields[name] or None for name in LATENT_KEYS}
        decoder["num_aux_hidden_states"] = len(config.feature_layers)
        if config.sliding_window:
            decoder["sliding_window"] = config.sliding_window
            decoder["layer_types"] = ["sliding_attention"] * config.num_hidden_layers
        head = {name: fields[name] for name in HEAD_KEYS}
        if form == "vllm" and not config.kv_lora_rank:
            described = _speculators_config(config, head, decoder, request)
        else:
            everywhere = not unsupported_features(drafter, engine_of("sglang"))
            described = _flat_config(config, head, decoder, everywhere)
        return {**described, "torch_dtype": dtype_name(request.dtype)}

    def form(self, drafter: Head, config: Json) -> Form:
        kept = len(drafter.kept_ids)
        form = super().form(drafter, config) | kept_tables(kept, drafter.config.vocab_size)
        if "transformer_layer_config" in config:
            return {name.replace("midlayer.", "layers.0."): own for name, own in form.items()}
        for name in list(form):
            if name.startswith("layers.") and "input_layernorm" in name:
                form[name.replace("input_layernorm", "hidden_norm")] = form[name]
        return form

    def published(self, checkpoint: Exported, target: Json) -> Exported:
        if not self.recognizes(checkpoint.config):
            config = checkpoint.config
            named = config.get("speculators_model_type") or config.get("architectures")
            raise UserError(f"{checkpoint.where} is {named}; import reads {self.reads}")
        return published_head(checkpoint, target)

    def foreign(self, checkpoint: Exported) -> list[str]:
        return foreign_head(checkpoint)

    def drafter_from(self, original: Head, export: Exported) -> Head:
        target = original.config.target
        # Another target's head is refused for its shapes, before this target's files are read.
        fields = head_fields(export, target)
        embedding = export.weights.pop("embed_tokens.weight", None)
        if embedding is not None:
            check_embedding(embedding, target["name"], export.where)
        fields |= self.more_fields(original, export)
        return self.drafter_class(self.drafter_class.config_class(**fields))


class Eagle3Shipping(GgufHeads[Eagle3], Eagle3Files[Eagle3]):
    """How EAGLE-3 heads are shipped.

    A repository's root holds the flat form with our own keys in its config, speculators/ the other
    form.
    """

    description = (
        "an EAGLE-3 head (arXiv 2503.01840), {layers} over the target's states {features}, {parameters} parameters, "
        "{kept}"
    )
    formats = {
        "vllm": Format("EAGLE-3 in speculators' form", ("vLLM",)),
        "sglang": Format(
            "EAGLE-3 as LlamaForCausalLMEagle3", ("SGLang", "TensorRT-LLM, Triton", "vLLM")
        ),
        "gguf": Format("EAGLE-3 as GGUF file", ("llama.cpp",)),
    }
    verifiable = {"vllm": "vllm", "llama.cpp": "gguf"}
    small_layers = {"vllm": ("float8", "nvfp4")}
    drafter_class = Eagle3
    in_root = ("vllm", "sglang", "gguf")
    gguf_arch = "eagle3"
    gguf_ropes = ROPES
    gguf_names = {
        "fc.weight": "fc.weight",
        "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    }
    reads = "EAGLE-3 heads in speculators' form or as LlamaForCausalLMEagle3"
    no_format = "an EAGLE-3 head reads the target's states and is not a language model of its own, as a draft_model is"

    def lacking(self, trained: Trained, form: str, engine: EngineRelease) -> list[str]:
        if form == "gguf":
            return super().lacking(trained, form, engine)
        return unsupported_features(self.load(trained), engine)

    def gguf_keys(self, drafter: Eagle3) -> Json:
        config = drafter.config
        layers = list(config.feature_layers)
        return {
            "target_layers": layers,
            "extract_layers": layers,  # the key's name in earlier releases
            "target_hidden_size": config.target_hidden_size,
            "norm_before_residual": config.norm_before_residual,
        }

    def gguf_unsupported(self, drafter: Eagle3) -> list[str]:
        config: Eagle3Config = drafter.config  # type: ignore[assignment]
        lacks = f"llama.cpp {RELEASE}"
        found = unsupported_by_llama(config)
        layers = config.feature_layers
        if len(layers) != 3:
            found.append(f"{len(layers)} feature layers: {lacks} takes three")
        count = config.num_hidden_layers
        if count != 1:
            found.append(f"num_hidden_layers={count}: {lacks} computes one layer")
        if config.hidden_size != config.target_hidden_size:
            found.append(
                f"hidden_size={config.hidden_size} differs from the target's {config.target_hidden_size}: {lacks} reads the "
                "target's embedding"
            )
        none = dict.fromkeys(_NOT_IN_LLAMA, f"{lacks} has no such thing in its eagle3 model")
        found += set_features(config, none)
        return found + super().gguf_unsupported(drafter)

    def options(self, trained: Trained) -> EngineSettings:
        sglang: Json = {"speculative-algorithm": "EAGLE3"}
        window = trained.config.get("sliding_window")
        if window:  # SGLang counts the keys before a token, ours the token too
            sglang["speculative-draft-window-size"] = max(window - 1, 1)
        tensorrt: Json = {"decoding_type": "Eagle3"}
        layers = tuple(trained.config.get("feature_layers", ()))
        if layers != default_layers(trained.target.get("num_layers", 0)):
            tensorrt["eagle3_layers_to_capture"] = [layer - 1 for layer in layers]
        return {
            "vLLM": {"method": "eagle3"},
            "SGLang": sglang,
            "TensorRT-LLM, Triton": tensorrt,
            "llama.cpp": {"spec-type": "draft-eagle3"},
        }

    def publish(self, trained: Trained, request: ExportRequest) -> list[tuple[str, str]]:
        head = self.load(trained)
        folder = request.output
        target = {**trained.target, "name": request.target}
        config = head.config
        config.target = target
        reasons = unsupported_features(head, engine_of("vllm"))
        if reasons:
            print(f"in drafttrain's own format only: {'; '.join(reasons)}")
            head.to(request.dtype).save_pretrained(folder)  # type: ignore[arg-type]
            whom = "the head, for drafttrain; other engines do not support it, see below"
            return [("model.safetensors", whom), *self.publish_gguf(trained, request)]

        # Both forms; the root's config.json holds our own keys too.
        places = [("vllm", folder / "speculators"), ("sglang", folder)]
        if config.kv_lora_rank:  # has one form
            del places[0]
        for form, place in places:
            described = self.engine_config(head, form, request)
            weights = self.engine_weights(head, described)
            write_checkpoint(place, described, weights, request.dtype)
        keys = {}
        for key, value in config.to_diff_dict().items():
            if value not in (None, 0) and key != "dtype":
                keys[key] = value
        keys |= described
        keys["drafter_kind"] = trained.kind
        keys["target"] = target
        write_clean_json(folder / "config.json", keys)

        engines = []  # that load the flat form
        for name in ("vLLM", "SGLang", "TensorRT-LLM, Triton"):
            if not unsupported_features(head, ENGINES[name]):
                engines.append(name)
        flat = (
            f"the head as {described['architectures'][0]}, for {', '.join(engines)} and drafttrain"
        )
        other = "the head in speculators' form, for vLLM and speculators"
        files = [("model.safetensors", flat)]
        if not config.kv_lora_rank:
            files.append(("speculators/model.safetensors", other))
        return files + self.publish_gguf(trained, request)

    def recognizes(self, config: Mapping[str, object]) -> bool:
        """Whether a published checkpoint's config.json is of this kind.

        The authors' own heads are named as a language model of one layer, with a draft vocabulary.
        """
        if "speculators_model_type" in config:
            return config["speculators_model_type"] == "eagle3"
        if config.get("parallel_drafting") or config.get("ptd_token_id") is not None:
            return False  # P-EAGLE
        names = architectures_in(config)
        if names == ["LlamaForCausalLM"]:
            return "draft_vocab_size" in config
        return any("Eagle3" in name for name in names)


SHIPPING = Eagle3Shipping()
