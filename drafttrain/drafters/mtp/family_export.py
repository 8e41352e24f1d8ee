"""Modules of the target's own class, written back as the family stores them.

vLLM and SGLang read them with the family's loaders:

    config.json          the target's own, with the number of modules
    model.safetensors    the module's tensors alone, under the names of the target's checkpoint, experts one by one

The engines take embedding and head from the target. Sources: vLLM 0.32 config/speculative.py
(hf_config_override), v1/spec_decode/llm_base_proposer.py (_maybe_share_lm_head); SGLang 0.5.22
configs/model_config.py (is_draft_model).
"""

from __future__ import annotations

import copy
import json

import torch
from torch import Tensor
from transformers import AutoConfig

from drafttrain.drafters.form import Form, Weight
from drafttrain.drafters.mtp.checkpoint_modules import FORMS, norm_offset, swapped
from drafttrain.drafters.mtp.model import MTP, MTPConfig
from drafttrain.drafters.shipping import Exported, ExportRequest, Format, Shipping, Trained
from drafttrain.files import Json
from drafttrain.formats.engines import EngineRelease
from drafttrain.formats.weights import dtype_name
from drafttrain.target import load_shell
from drafttrain.target.own_layer import fill as fill_layer
from drafttrain.target.own_layer import layer_tensors, spec_of

FORMATS = {
    "vllm": Format("a prediction module as the target's family stores it", ("vLLM",)),
    "sglang": Format("a prediction module as the target's family stores it", ("SGLang",)),
}
HEAD_TRAINED = (
    "train_head=true: the engine drafts with the target's head; train with drafter.train_head=false"
)
# Per format, the families whose loader makes a drafter of such a folder, and the config key for its
# number of modules.
_COUNT = "num_nextn_predict_layers"
_FAMILIES = {
    "vllm": {
        "deepseek_v3": _COUNT,
        "glm4_moe": _COUNT,
        "glm4_moe_lite": _COUNT,
        "qwen3_next": _COUNT,
        "exaone_moe": _COUNT,
        "qwen3_5_text": "mtp_num_hidden_layers",
        "qwen3_5_moe_text": "mtp_num_hidden_layers",
    },
    "sglang": {
        "deepseek_v3": _COUNT,
        "glm4_moe": _COUNT,
        "glm4_moe_lite": _COUNT,
        "qwen3_next": _COUNT,
    },
}


class FamilyModuleShipping(Shipping[MTP]):
    """Drafters whose config has a `target_layer`."""

    formats = FORMATS
    serving = {"vLLM": {"method": "mtp"}, "SGLang": {"speculative-algorithm": "NEXTN"}}

    def lacking(self, trained: Trained, form: str, engine: EngineRelease) -> list[str]:
        config: MTPConfig = self.load(trained).config  # type: ignore[assignment]
        found = []
        family = config.target_layer["config"]["model_type"]
        if family not in _FAMILIES[form]:
            found.append(
                f"model_type={family}: the engine reads no such module from a folder of its own"
            )
        if config.train_head:
            found.append(HEAD_TRAINED)
        if config.modules > 1:
            found.append(f"modules={config.modules}: one is written, for all depths")
        return found

    def engine_config(self, drafter: MTP, form: str, request: ExportRequest) -> Json:
        own = load_shell(request.target_files or drafter.config.target["name"]).config
        keys = json.loads(own.to_json_string(use_diff=False))
        # The config's own word for the number of modules may differ; engines read theirs.
        keys[_FAMILIES[form][own.model_type]] = 1
        keys["torch_dtype"] = dtype_name(request.dtype)
        keys["quantization_config"] = None
        return keys

    def form(self, drafter: MTP, config: Json) -> Form:
        """What is around the module's layer, by the names of the target's checkpoint."""
        stored = FORMS[drafter.config.target_layer["form"]]
        place = stored.module.format(n=config["num_hidden_layers"])
        # 1 for families whose norms store their factors minus one, else 0.
        parts = drafter.blocks[0].layer.modules()
        with torch.no_grad():
            shift = norm_offset(next(part for part in parts if "RMSNorm" in type(part).__name__))
        form: Form = {}
        for theirs, ours in stored.names.items():
            own = f"blocks.0.{ours}.weight"
            if ours == "norm":
                own = "norm.weight"
            weight = Weight(own)
            if stored.swapped and ours == "eh_proj":
                weight = Weight(own, there=swapped, back=swapped)
            elif "norm" in ours:
                weight = Weight(own, there=lambda w: w - shift, back=lambda w: w + shift)
            form[f"{place}{theirs}.weight"] = weight
        return form

    def engine_weights(self, drafter: MTP, config: Json) -> dict[str, Tensor]:
        spec = drafter.config.target_layer
        stored = FORMS[spec["form"]]
        place = stored.module.format(n=config["num_hidden_layers"]) + stored.layer
        weights = super().engine_weights(drafter, config)
        for name, weight in layer_tensors(drafter.blocks[0].layer, spec).items():
            weights[place + name] = weight
        return weights

    def drafter_from(self, original: MTP, export: Exported) -> MTP:
        config: MTPConfig = copy.deepcopy(original.config)  # type: ignore[assignment]
        spec = config.target_layer
        own = AutoConfig.for_model(**export.config)
        config.target_layer = {**spec, **spec_of(own, spec["index"])}
        return MTP(config)

    def drafter_weights(
        self,
        original: MTP,
        back: MTP,
        export: Exported,
    ) -> dict[str, Tensor]:
        spec = back.config.target_layer
        stored = FORMS[spec["form"]]
        place = stored.module.format(n=export.config["num_hidden_layers"]) + stored.layer
        around = self.form(back, export.config)
        layer = {}  # tensors of the layer, by the family's names
        for name, weight in export.weights.items():
            if name not in around:
                layer[name.removeprefix(place)] = weight
        state = super().drafter_weights(original, back, export)
        own = back.blocks[0].layer
        fill_layer(own, spec, layer)
        for name, weight in own.state_dict().items():
            state[f"blocks.0.layer.{name}"] = weight
        return state


FAMILY = FamilyModuleShipping()
