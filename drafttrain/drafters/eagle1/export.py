"""EAGLE-1 heads as vLLM and SGLang load them: `fc`, then a Llama without embedding and head.

    vLLM    architectures ["EagleLlamaForCausalLM"], fc.weight, layers.{i}.*
    SGLang  architectures ["LlamaForCausalLMEagle"], the same and fc.bias, which its class has: zeros where ours has none
    verl    architectures ["LlamaForCausalLMEagle1"], with a norm of layer 0's input and a last norm (import only)
    paper   architectures ["LlamaForCausalLM"], the same, an embedding that is the target's, and mostly fc.bias (import only)

Layer 0 has no input_layernorm in either, and there is no last norm. Embedding and head are the
target's, which both engines share with a head that brings none. They draft over the whole
vocabulary, whatever was kept.

Sources: vLLM 0.32 models/llama_eagle.py and transformers_utils/configs/eagle.py; SGLang 0.5.5 to
0.5.23 srt/models/llama_eagle.py; verl-SpeCo 0.1 models/eagle1; SafeAILab/EAGLE model/cnets1.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from drafttrain.drafters.common.llama_layers import (
    ENGINE_KEYS,
    LAYER_KEYS,
    layer_keys,
    set_features,
    unsupported_by_llama,
)
from drafttrain.drafters.common.rows import JointSession
from drafttrain.drafters.eagle1.model import Eagle1, Eagle1Config
from drafttrain.drafters.eagle3.reading import check_embedding, published_layer
from drafttrain.drafters.form import Form
from drafttrain.drafters.published_keys import LAYER_FORMS, windows_of
from drafttrain.drafters.read_back import RandomTarget, draft_chains
from drafttrain.drafters.shipping import (
    Exported,
    ExportRequest,
    Format,
    Shipping,
    Trained,
)
from drafttrain.errors import UserError
from drafttrain.files import Json, value_of
from drafttrain.formats.engines import EngineRelease
from drafttrain.formats.weights import architectures_in, dtype_name

_NORMED = "LlamaForCausalLMEagle1"  # verl-SpeCo's class, with two norms that engines lack
_ARCHITECTURES = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}

# What the engines' classes do not compute.
_LACKS = {
    "qk_norm": "the engine's class is a Llama, which norms no queries and keys",
    "normed_layers": "the engine's class norms neither the first layer's input nor the last output",
}
_LACKS_IN = {
    "vllm": {"fc_bias": "vLLM's class has no bias in fc, and would leave it out"},
    "sglang": {"mlp_bias": "the engine's MLP has none"},
}


class Eagle1Shipping(Shipping[Eagle1]):
    """How EAGLE-1 heads are shipped: an engine's form in a folder of its name, ours in the root."""

    description = "an EAGLE-1 head (arXiv 2401.15077), {layers} over the target's last state, {parameters} parameters"
    formats = {
        "vllm": Format("EAGLE as EagleLlamaForCausalLM", ("vLLM",)),
        "sglang": Format("EAGLE as LlamaForCausalLMEagle", ("SGLang",)),
    }
    verifiable = {"vllm": "vllm"}
    drafter_class = Eagle1
    # An engine drafts over the whole vocabulary, by the target's head.
    engine_keys = ENGINE_KEYS
    architectures = tuple(_ARCHITECTURES.values())
    published_keys = {*LAYER_KEYS, *LAYER_FORMS, "draft_num_hidden_layers", "target_hidden_size"}
    reads = (
        "EAGLE-1 heads (EagleLlamaForCausalLM, LlamaForCausalLMEagle, LlamaForCausalLMEagle1, the authors' one-layer "
        "LlamaForCausalLM)"
    )
    serving = {"vLLM": {"method": "eagle"}, "SGLang": {"speculative-algorithm": "EAGLE"}}

    def lacking(self, trained: Trained, form: str, engine: EngineRelease) -> list[str]:
        config: Eagle1Config = self.load(trained).config  # type: ignore[assignment]
        found = unsupported_by_llama(config)
        return found + set_features(config, {**_LACKS, **_LACKS_IN[form]})

    def engine_config(self, drafter: Eagle1, form: str, request: ExportRequest) -> Json:
        config: Eagle1Config = drafter.config  # type: ignore[assignment]
        return {
            "architectures": [_ARCHITECTURES[form]],
            "model_type": "llama",
            **layer_keys(config),
            "torch_dtype": dtype_name(request.dtype),
        }

    def form(self, drafter: Eagle1, config: Json) -> Form:
        form = super().form(drafter, config)
        if config["architectures"] == [_ARCHITECTURES["sglang"]] and "fc.bias" not in form:
            form["fc.bias"] = torch.zeros(config["hidden_size"])
        return form

    def more_fields(self, original: Eagle1, export: Exported) -> Json:
        if isinstance(original, Eagle1):
            config = original.config
            return {"fc_bias": config.fc_bias, "normed_layers": config.normed_layers}
        normed = bool(export.config.get("normed_layers", False))
        return {"fc_bias": "fc.bias" in export.weights, "normed_layers": normed}

    def foreign(self, checkpoint: Exported) -> list[str]:
        reasons = windows_of(checkpoint.config)
        if "sliding_attention" in value_of(checkpoint.config, "layer_types", []):
            reasons.append("has layers with a window (layer_types)")
        width = value_of(checkpoint.config, "target_hidden_size", 0)
        if width not in (0, value_of(checkpoint.config, "hidden_size", 0)):
            reasons.append(
                f"reads states of another width than its own (target_hidden_size={width})"
            )
        return reasons

    def recognizes(self, config: Mapping[str, object]) -> bool:
        if super().recognizes(config) or _NORMED in architectures_in(config):
            return True
        # The authors' own heads; those with a draft vocabulary are EAGLE-3's.
        llama = config.get("architectures") == ["LlamaForCausalLM"]
        return llama and config.get("num_hidden_layers") == 1 and "draft_vocab_size" not in config

    def published(self, checkpoint: Exported, target: Json) -> Exported:
        where = checkpoint.where
        found = {}
        for name, weight in checkpoint.weights.items():
            if not name.endswith("rotary_emb.inv_freq"):
                found[name.removeprefix("model.")] = weight
        if "fc.weight" not in found:
            raise UserError(
                f"{where} has no fc.weight: a language model needs no import; pass it as a drafter"
            )
        table = found.pop("embed_tokens.weight", None)
        if table is not None:
            check_embedding(table, target["name"], where)
        found.pop("lm_head.weight", None)  # engines draft with the target's head too
        bias = found.get("fc.bias")
        if bias is not None and not bias.any():
            del found["fc.bias"]

        keys = published_layer(checkpoint.config)
        keys["num_hidden_layers"] = value_of(
            checkpoint.config, "draft_num_hidden_layers", keys["num_hidden_layers"]
        )
        keys["normed_layers"] = _NORMED in architectures_in(checkpoint.config)
        form = "sglang" if "fc.bias" in found else "vllm"
        keys["architectures"] = [_ARCHITECTURES[form]]
        return Exported(where, keys, found)

    def compare(
        self,
        original: Eagle1,
        back: Eagle1,
        dtype: torch.dtype,
        depth: int,
        where: str,
    ) -> Json:
        """As the base class, and compares the first drafted states.

        Returns:
            Also max_state_difference, relative to the state's largest entry.
        """
        found = super().compare(original, back, dtype, depth, where)
        target = RandomTarget(original)
        states = []
        for drafter in (original, back):
            session, _ = draft_chains(drafter, target, depth)
            assert isinstance(session, JointSession), "trained kinds have such sessions"
            states.append(session.root[:, 0])  # [1, h]
        ours, theirs = states
        difference = float((ours - theirs).abs().max() / ours.abs().max())
        return {**found, "max_state_difference": difference}


SHIPPING = Eagle1Shipping()
