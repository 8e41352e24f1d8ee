"""P-EAGLE heads in speculators' form, which vLLM loads: EAGLE-3's, with `mask_hidden` and `mask_token_id`.

Sources: vLLM 0.32 transformers_utils/configs/speculators/algos.py (update_peagle) and models/llama_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from drafttrain.drafters.eagle3.eagle3_formats import (
    SPECULATORS,
    expected_weights,
    make_head,
    unsupported_features,
    write_eagle3,
)
from drafttrain.drafters.peagle.model import PEagle
from drafttrain.drafters.shipping import ExportRequest, Format, Shipping, vocabulary_text
from drafttrain.drafters.trained import Trained
from drafttrain.files import Json, write_json
from drafttrain.formats.weights import Shapes, read_config


class PEagleShipping(Shipping):
    """vLLM alone; our own format goes to the Hub too."""

    formats = {"vllm": Format("P-EAGLE in speculators' form", ("vLLM",))}
    verifiable = {"vllm": "vllm"}

    def line(self, trained: Trained, parameters: str) -> str:
        config = trained.config
        features = ", ".join(map(str, config.get("feature_layers", [])))
        return (
            f"a P-EAGLE head, which drafts {config.get('ttt_steps')} tokens in one pass over the target's states {features}, "
            f"{parameters} parameters, {vocabulary_text(config)}"
        )

    def unsupported(self, trained: Trained, form: str) -> list[str]:
        if found := super().unsupported(trained, form):
            return found
        head: PEagle = trained.load()
        found = unsupported_features(head, form)
        if head.config.fc_norm:
            found.append("fc_norm: the engine does not read it for P-EAGLE and would compute something else")
        return found

    def write(self, trained: Trained, form: str, request: ExportRequest) -> list[Path]:
        head: PEagle = trained.load()
        files = write_eagle3(
            head,
            request.output,
            SPECULATORS,
            dtype=request.dtype,
            speculative_tokens=request.depth,
            target_name=request.target,
        )
        described = read_config(request.output)
        described["speculators_config"]["algorithm"] = "peagle"
        own = {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"}
        write_json(files[0], {**described, **own, "mask_token_id": head.config.mask_token_id})
        return files

    def expected_weights(self, trained: Trained, config: Json) -> Shapes:
        shapes = expected_weights(config)
        return shapes | {"mask_hidden": (1, 1, shapes["fc.weight"][1])}

    def read_back(self, trained: Trained, exported: Path, config: Json, weights: dict[str, Tensor]) -> PEagle:
        where, mask = repr(str(exported)), config["mask_token_id"]
        return make_head(PEagle, config, weights, trained.target, where, mask_token_id=mask)

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, object]]:
        return {"vLLM": {"method": "eagle3", "parallel_drafting": True}}


SHIPPING = PEagleShipping()
