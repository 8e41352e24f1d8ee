"""EAGLE-1 heads as vLLM and SGLang load them: a Llama without embedding, last norm and head, and
`fc` before it.

    vLLM    architectures ["EagleLlamaForCausalLM"], fc.weight, layers.{i}.*
    SGLang  architectures ["LlamaForCausalLMEagle"], the same and fc.bias, which its class has: zeros where ours has none
    paper   architectures ["LlamaForCausalLM"], the same, an embedding that is the target's, and mostly fc.bias (import only)

Layer 0 has no input_layernorm in either. Embedding and head are the target's, which both engines
share with a head that brings none. They draft over the whole vocabulary, whatever was kept.
Sources: vLLM 0.32 models/llama_eagle.py and transformers_utils/configs/eagle.py; SGLang 0.5.5 to
0.5.23 srt/models/llama_eagle.py; SafeAILab/EAGLE model/cnets1.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from drafttrain.drafters.common.layer_model import LayerSession
from drafttrain.drafters.common.llama_layers import LAYER_KEYS, layer_keys, unsupported_by_llama
from drafttrain.drafters.eagle1.model import Eagle1, Eagle1Config
from drafttrain.drafters.eagle3.reading import check_embedding, published_rope
from drafttrain.drafters.read_back import RandomTarget, draft_chains
from drafttrain.drafters.shipping import (
    Exported,
    ExportRequest,
    Format,
    Published,
    Shipping,
    Trained,
)
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.engines import EngineRelease
from drafttrain.formats.weights import dtype_name

_ARCHITECTURES = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}


class Eagle1Shipping(Shipping[Eagle1]):
    """An engine's form each, in a folder of its name; our own in the root."""

    description = "an EAGLE-1 head (arXiv 2401.15077), {layers} over the target's last state, {parameters} parameters"
    formats = {
        "vllm": Format("EAGLE as EagleLlamaForCausalLM", ("vLLM",)),
        "sglang": Format("EAGLE as LlamaForCausalLMEagle", ("SGLang",)),
    }
    verifiable = {"vllm": "vllm"}
    architectures = tuple(_ARCHITECTURES.values())
    reads = "EAGLE-1 heads (EagleLlamaForCausalLM, LlamaForCausalLMEagle, the authors' one-layer LlamaForCausalLM)"
    serving = {"vLLM": {"method": "eagle"}, "SGLang": {"speculative-algorithm": "EAGLE"}}

    def unsupported(
        self,
        trained: Trained,
        form: str,
        engine: EngineRelease | None = None,
    ) -> list[str]:
        if found := super().unsupported(trained, form, engine):
            return found
        config: Eagle1Config = self.load(trained).config  # type: ignore[assignment]
        found = unsupported_by_llama(config)
        if config.qk_norm:
            found.append("qk_norm: the engine's class is a Llama, which norms no queries and keys")
        if config.mlp_bias and form == "sglang":
            found.append("mlp_bias: the engine's MLP has none")
        if config.fc_bias and form == "vllm":
            found.append("fc_bias: vLLM's class has no bias in fc, and would leave it out")
        return found

    def engine_config(self, drafter: Eagle1, form: str, request: ExportRequest) -> Json:
        config: Eagle1Config = drafter.config  # type: ignore[assignment]
        own = {"architectures": [_ARCHITECTURES[form]], "model_type": "llama"}
        return {**own, **layer_keys(config), "torch_dtype": dtype_name(request.dtype)}

    def engine_weights(self, drafter: Eagle1, config: Json) -> dict[str, Tensor]:
        weights = super().engine_weights(drafter, config)
        biased = config["architectures"] == [_ARCHITECTURES["sglang"]]
        if biased:
            return {"fc.bias": torch.zeros(config["hidden_size"]), **weights}
        return weights

    def drafter_from(self, original: Eagle1, export: Exported) -> Eagle1:
        fields = {key: export.config[key] for key in (*LAYER_KEYS, "rope_parameters")}
        fields["fc_bias"] = bool(export.weights.get("fc.bias", torch.zeros(1)).any())
        kept = len(
            original.kept_ids
        )  # an engine drafts over the whole vocabulary, by the target's head
        return Eagle1(Eagle1Config(**fields, draft_vocab_size=kept, target=original.config.target))

    def drafter_weights(
        self,
        original: Eagle1,
        back: Eagle1,
        export: Exported,
    ) -> dict[str, Tensor]:
        if back.config.fc_bias and not getattr(original.config, "fc_bias", True):
            raise UserError(
                f"{export.where} computes something else: fc.bias is not zero; export again"
            )
        return super().drafter_weights(original, back, export)

    def recognizes(self, config: Mapping[str, object]) -> bool:
        original = (
            config.get("architectures") == ["LlamaForCausalLM"]
            and config.get("num_hidden_layers") == 1
        )
        return super().recognizes(config) or (original and "draft_vocab_size" not in config)

    def published(
        self,
        config: Json,
        weights: dict[str, Tensor],
        target: Json,
        where: str,
    ) -> Published:
        found = {name.removeprefix("model."): value for name, value in weights.items()}
        if "fc.weight" not in found:
            raise UserError(
                f"{where} has no fc.weight: a language model needs no import; pass it as a drafter"
            )
        if (table := found.pop("embed_tokens.weight", None)) is not None:
            check_embedding(table, target["name"], where)
        for name in (
            "lm_head.weight",
            *(name for name in found if name.endswith("rotary_emb.inv_freq")),
        ):
            found.pop(name, None)  # engines draft with the target's head too
        if not found.get("fc.bias", torch.ones(1)).any():
            del found["fc.bias"]
        layer = {name: default for name, default in LAYER_KEYS.items() if default is not None}
        own = {key: config[key] for key in LAYER_KEYS if config.get(key) is not None}
        form = _ARCHITECTURES["sglang" if "fc.bias" in found else "vllm"]
        return Published(
            {**layer, **own, "rope_parameters": published_rope(config), "architectures": [form]},
            found,
        )

    def compare(
        self,
        original: Eagle1,
        back: Eagle1,
        dtype: torch.dtype,
        depth: int,
        where: str,
    ) -> Json:
        """As of every kind, and max_state_difference: of the first drafted state, relative to its
        largest entry.
        """
        found = super().compare(original, back, dtype, depth, where)
        target = RandomTarget(original)
        states = []
        for drafter in (original, back):
            session = draft_chains(drafter, target, depth)[0]
            assert isinstance(session, LayerSession), "kinds of decoder layers have such sessions"
            states.append(session.root)  # [1, h]
        ours, theirs = states
        return {
            **found,
            "max_state_difference": float((ours - theirs).abs().max() / ours.abs().max()),
        }


SHIPPING = Eagle1Shipping()
