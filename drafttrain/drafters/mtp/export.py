"""One-module MTP drafters as vLLM loads them: as the module of a MiMo checkpoint.

    ours          MiMo, below model.mtp_layers.0.
    enorm         token_layernorm
    hnorm         hidden_layernorm
    eh_proj       input_proj, which reads the state before the embedding: its halves change places
    layer.*       *, a Qwen2 layer: queries, keys and values have biases, here zero
    norm          final_layernorm

vLLM takes any folder whose config names MiMoForCausalLM for such a module. It gives the module the
shapes of the target's layers (by the target's config, which `--hf-overrides` tells the number of
modules) and the target's embedding and head, so the target need not be MiMo. It drafts over the
whole vocabulary, whatever was kept, and reads a zero embedding at position 0.

Sources: vLLM 0.32 models/mimo_mtp.py, config/speculative.py (hf_config_override),
v1/spec_decode/llm_base_proposer.py;
speculators 0.9 models/mtp (import only).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from drafttrain.drafters.common.llama_layers import (
    ENGINE_KEYS,
    LAYER_KEYS,
    layer_keys,
    set_features,
    unsupported_by_llama,
)
from drafttrain.drafters.eagle3.reading import published_layer
from drafttrain.drafters.form import Form, Weight
from drafttrain.drafters.mtp.checkpoint_modules import MIMO, swapped
from drafttrain.drafters.mtp.family_export import FAMILY, FORMATS, HEAD_TRAINED
from drafttrain.drafters.mtp.model import MTP, MTPConfig
from drafttrain.drafters.published_keys import LAYER_FORMS, Fixed, windows_of
from drafttrain.drafters.shipping import (
    TARGET_OVERRIDES,
    EngineSettings,
    Exported,
    ExportRequest,
    Format,
    Shipping,
    Trained,
)
from drafttrain.errors import UserError
from drafttrain.files import Json, value_of
from drafttrain.formats.engines import EngineRelease
from drafttrain.formats.weights import dtype_name
from drafttrain.target import load_shell

_SHAPE = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
)
# What the engine's layer does not compute.
_LACKS = {
    "qk_norm": "the engine's layer norms no queries and keys",
    "attention_bias": "the engine's layer has no o_proj bias",
    "mlp_bias": "the engine's MLP has none",
}
_BIASED = ("q_proj", "k_proj", "v_proj")
# Layers of speculators' modules that a `DraftLayer` computes.
_PLAIN_LAYERS = ("qwen3",)
# Copies of the target's tensors in speculators' files.
_TARGETS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
    "t2d",
    "d2t",
)


class MTPShipping(Shipping[MTP]):
    """How MTP drafters are shipped.

    Plain layers are written as MiMo's, for vLLM alone; layers of the target's class as the family's
    own (FAMILY).
    """

    formats = {
        **FORMATS,
        "vllm": Format("a prediction module as MiMo's, or as the target family's own", ("vLLM",)),
    }
    verifiable = {"vllm": "vllm"}
    drafter_class = MTP
    # An engine drafts over the whole vocabulary, by the target's head.
    engine_keys = ENGINE_KEYS
    serving = {"vLLM": {"method": "mtp", TARGET_OVERRIDES: {"num_nextn_predict_layers": 1}}}
    tiny = {"train_head": False, "num_key_value_heads": 2}
    published_keys = {*LAYER_KEYS, *LAYER_FORMS}
    fixed_keys = {"num_nextn_predict_layers": Fixed((1,))}
    reads = "speculators' MTP modules (speculators_model_type mtp) with a Qwen3 layer"
    no_format = (
        "the engine reads prediction modules out of the target's own checkpoint, for families that come with one; train an "
        "eagle1 or eagle3 drafter for serving there"
    )

    def line(self, trained: Trained, parameters: str) -> str:
        modules = trained.config.get("modules", 1)
        many = "a multi-token prediction module"
        if modules != 1:
            many = f"{modules} multi-token prediction modules"
        return f"{many} (arXiv 2412.19437), {parameters} parameters"

    def unsupported(
        self,
        trained: Trained,
        form: str,
        engine: EngineRelease | None = None,
    ) -> list[str]:
        if trained.config.get("target_layer"):
            return FAMILY.unsupported(trained, form, engine)
        found = super().unsupported(trained, form, engine)
        if found:
            return found
        if form not in self.verifiable.values():
            return [self.no_format]
        config: MTPConfig = self.load(trained).config  # type: ignore[assignment]
        found = unsupported_by_llama(config)
        if config.train_head:
            found.append(HEAD_TRAINED)
        if config.modules > 1:
            found.append(f"modules={config.modules}: the engine's class runs one for all depths")
        return found + set_features(config, _LACKS)

    def write(self, trained: Trained, form: str, request: ExportRequest) -> list[Path]:
        """As the base class.

        Raises:
            UserError: also for layers of another shape than the target's, which the engine reads.
        """
        if trained.config.get("target_layer"):
            return FAMILY.write(trained, form, request)
        target = load_shell(request.target_of(trained))
        ours = vars(self.load(trained).config)
        theirs = vars(MTPConfig.for_target(target))
        wrong = []
        for key in _SHAPE:
            if ours[key] != theirs[key]:
                wrong.append(f"{key}={ours[key]} (there {theirs[key]})")
        if target.embed_scale != 1.0:
            wrong.append(f"embeddings times {target.embed_scale:g}")
        if wrong:
            raise UserError(
                f"this drafter cannot be written for vLLM, which gives it the layers of target {target.name!r}: "
                f"{', '.join(wrong)}; train it without these drafter.* keys"
            )
        return super().write(trained, form, request)

    def check(self, trained: Trained, exported: Path) -> Json:
        if trained.config.get("target_layer"):
            return FAMILY.check(trained, exported)
        return super().check(trained, exported)

    def options(self, trained: Trained) -> EngineSettings:
        if trained.config.get("target_layer"):
            return FAMILY.serving
        return self.serving

    def engine_config(self, drafter: MTP, form: str, request: ExportRequest) -> Json:
        config: MTPConfig = drafter.config  # type: ignore[assignment]
        return {
            **layer_keys(config),
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            "num_nextn_predict_layers": 1,
            "torch_dtype": dtype_name(request.dtype),
        }

    def form(self, drafter: MTP, config: Json) -> Form:
        place = MIMO.module.format(n=0)
        around = {ours: name for name, ours in MIMO.names.items()}
        shapes = {name: value.shape for name, value in drafter.state_dict().items()}
        form: Form = {}
        for own in super().form(drafter, config):
            stem, _, part = own.removeprefix("blocks.0.").rpartition(".")
            theirs = around.get(stem, stem.removeprefix("layer."))
            form[f"{place}{theirs}.{part}"] = Weight(own)
            if stem == "eh_proj":
                form[f"{place}{theirs}.{part}"] = Weight(own, there=swapped, back=swapped)
            elif stem.endswith(_BIASED):
                form[f"{place}{theirs}.bias"] = torch.zeros(shapes[own][0])
        return form

    def more_fields(self, original: MTP, export: Exported) -> Json:
        normed = f"{MIMO.module.format(n=0)}self_attn.q_norm.weight" in export.weights
        return {"train_head": False, "qk_norm": normed}

    def recognizes(self, config: Mapping[str, object]) -> bool:
        return config.get("speculators_model_type") == "mtp"

    def foreign(self, checkpoint: Exported) -> list[str]:
        layer = value_of(checkpoint.config, "transformer_layer_config", {})
        reasons = windows_of(layer)
        kind = value_of(layer, "model_type", "")
        if kind not in _PLAIN_LAYERS:
            reasons.append(
                f"has layers of model_type={kind!r}; ours are {' or '.join(_PLAIN_LAYERS)}'s"
            )
        return reasons

    def published(self, checkpoint: Exported, target: Json) -> Exported:
        """speculators' module as MiMo's, whose names it has but for the place and the halves' order."""
        layer = checkpoint.config["transformer_layer_config"]
        place = MIMO.module.format(n=0)
        found = {}
        for name, weight in checkpoint.weights.items():
            if name in _TARGETS:
                continue
            own = name.replace("mtp_layers.0.", place, 1)
            found[own] = weight
            if own.endswith("input_proj.weight"):
                found[own] = swapped(weight)
            elif own.endswith(tuple(f"{name}.weight" for name in _BIASED)):
                bias = own.removesuffix("weight") + "bias"
                found.setdefault(bias, torch.zeros(len(weight), dtype=weight.dtype))
        keys = published_layer(layer)
        keys["num_hidden_layers"] = 1  # the config's number is the target's
        return Exported(checkpoint.where, keys, found)


SHIPPING = MTPShipping()
