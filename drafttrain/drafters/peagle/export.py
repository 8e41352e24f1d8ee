"""P-EAGLE heads in speculators' form, which vLLM loads.

The form is EAGLE-3's with `mask_hidden` and `mask_token_id`.

Sources: vLLM 0.32 transformers_utils/configs/speculators/algos.py (update_peagle) and
models/llama_eagle3.py; SpecForge 0.2 modeling/draft/peagle.py; verl-SpeCo 0.1 models/peagle.
"""

from __future__ import annotations

from collections.abc import Mapping

from drafttrain.drafters.common.llama_layers import set_features
from drafttrain.drafters.eagle3.export import Eagle3Files, unsupported_features
from drafttrain.drafters.peagle.model import PEagle
from drafttrain.drafters.shipping import Exported, ExportRequest, Format, Trained
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.engines import EngineRelease
from drafttrain.formats.weights import architectures_in

# Keys of the mask token, in the order in which vLLM looks for it.
_MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")


class PEagleShipping(Eagle3Files[PEagle]):
    """vLLM alone; our own format goes to the Hub too."""

    description = (
        "a P-EAGLE head, which drafts {ttt_steps} tokens in one pass over the target's states {features}, {parameters} "
        "parameters, {kept}"
    )
    formats = {"vllm": Format("P-EAGLE in speculators' form", ("vLLM",))}
    verifiable = {"vllm": "vllm"}
    drafter_class = PEagle
    published_keys = {*Eagle3Files.published_keys, "num_draft_layers"}
    reads = "P-EAGLE heads (speculators' form, PEagleDraftModel, LlamaForCausalLMPeagle, parallel_drafting)"
    serving = {"vLLM": {"method": "eagle3", "parallel_drafting": True}}

    def lacking(self, trained: Trained, form: str, engine: EngineRelease) -> list[str]:
        head = self.load(trained)
        silently = "the engine does not read it for P-EAGLE and would compute something else"
        lacks = dict.fromkeys(("fc_norm", "norm_before_fc"), silently)
        return unsupported_features(head, engine) + set_features(head.config, lacks)

    def engine_config(self, drafter: PEagle, form: str, request: ExportRequest) -> Json:
        described = super().engine_config(drafter, form, request)
        described["speculators_config"]["algorithm"] = "peagle"
        described["architectures"] = ["PEagleSpeculator"]
        described["speculators_model_type"] = "peagle"
        described["mask_token_id"] = drafter.config.mask_token_id
        return described

    def recognizes(self, config: Mapping[str, object]) -> bool:
        if config.get("speculators_model_type") == "peagle" or config.get("parallel_drafting"):
            return True
        if config.get("ptd_token_id") is not None:
            return True
        return any("PEagle" in name for name in architectures_in(config))

    def published(self, checkpoint: Exported, target: Json) -> Exported:
        config = checkpoint.config
        masks = [config[key] for key in _MASK_KEYS if config.get(key) is not None]
        if not masks:
            raise UserError(f"{checkpoint.where}: config.json has no mask_token_id; it is needed")
        config = {**config, "mask_token_id": masks[0]}
        layers = config.get("num_draft_layers")
        if layers is not None:  # verl-SpeCo's number; its num_hidden_layers may be the target's
            config["num_hidden_layers"] = layers
        return super().published(checkpoint._replace(config=config), target)

    def more_fields(self, original: PEagle, export: Exported) -> Json:
        return {"mask_token_id": export.config["mask_token_id"]}


SHIPPING = PEagleShipping()
