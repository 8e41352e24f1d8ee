"""EAGLE-3 heads for engines; see eagle3_formats.py for the two forms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from drafttrain.drafters.eagle3 import eagle3_formats as forms
from drafttrain.drafters.eagle3.eagle3_formats import FLAT, SPECULATORS, Head, unsupported_features
from drafttrain.drafters.eagle3.model import Eagle3
from drafttrain.drafters.shipping import Exported, ExportRequest, Format, Shipping, Trained
from drafttrain.files import Json
from drafttrain.formats.public_names import write_clean_json
from drafttrain.formats.weights import write_checkpoint


class Eagle3Files(Shipping[Head]):
    """Kinds in EAGLE-3's checkpoint forms."""

    def engine_config(self, drafter: Head, form: str, request: ExportRequest) -> Json:
        shape = SPECULATORS if form == "vllm" else FLAT
        return forms.engine_config(drafter, shape, request.dtype, request.depth, request.target)

    def engine_weights(self, drafter: Head, config: Json) -> dict[str, Tensor]:
        return forms.engine_weights(drafter, config)

    def drafter_from(self, original: Head, export: Exported) -> Head:
        return forms.make_head(type(original), export.config, export.weights, original.config.target, export.where)

    def drafter_weights(self, original: Head, back: Head, export: Exported) -> dict[str, Tensor]:
        return back.state_dict()  # `make_head` has filled it


class Eagle3Shipping(Eagle3Files[Eagle3]):
    """A repository's root holds the flat form with our own keys in its config, speculators/ the other form."""

    description = (
        "an EAGLE-3 head (arXiv 2503.01840), {layers} over the target's states {features}, {parameters} parameters, "
        "{kept}"
    )
    formats = {
        "vllm": Format("EAGLE-3 in speculators' form", ("vLLM",)),
        "sglang": Format("EAGLE-3 as LlamaForCausalLMEagle3", ("SGLang", "TensorRT-LLM, Triton", "vLLM")),
    }
    verifiable = {"vllm": "vllm"}
    in_root = ("vllm", "sglang")
    reads = "EAGLE-3 heads in speculators' form or as LlamaForCausalLMEagle3"

    def unsupported(self, trained: Trained, form: str) -> list[str]:
        if form not in self.formats:
            return [
                "an EAGLE-3 head reads the target's states and is no language model of its own, as a draft_model is"
            ]
        return unsupported_features(self.load(trained), form)

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, object]]:
        layers = tuple(trained.config.get("feature_layers", ()))
        tensorrt: Json = {"decoding_type": "Eagle3"}
        if layers != forms.default_layers(trained.target.get("num_layers", 0)):
            tensorrt["eagle3_layers_to_capture"] = [layer - 1 for layer in layers]
        return {
            "vLLM": {"method": "eagle3"},
            "SGLang": {"speculative-algorithm": "EAGLE3"},
            "TensorRT-LLM, Triton": tensorrt,
        }

    def publish(self, trained: Trained, request: ExportRequest) -> list[tuple[str, str]]:
        head = self.load(trained)
        folder, target = request.output, {**trained.target, "name": request.target}
        config = head.config
        config.target = target
        if reasons := unsupported_features(head, "vllm"):
            print(f"in drafttrain's own format only: {'; '.join(reasons)}")
            head.to(request.dtype).save_pretrained(folder)  # type: ignore[arg-type]
            return [("model.safetensors", "the head, for drafttrain; no engine supports it, see below")]
        own = {key: value for key, value in config.to_diff_dict().items() if value not in (None, 0) and key != "dtype"}
        for form, place in (("vllm", folder / "speculators"), ("sglang", folder)):
            described = self.engine_config(head, form, request)
            write_checkpoint(place, described, self.engine_weights(head, described), request.dtype)
        write_clean_json(folder / "config.json", {**own, **described, "drafter_kind": trained.kind, "target": target})
        flat_only = unsupported_features(head, "sglang")
        engines = "vLLM and drafttrain" if flat_only else "vLLM, SGLang, TensorRT-LLM and drafttrain"
        return [
            ("model.safetensors", f"the head as {described['architectures'][0]}, for {engines}"),
            ("speculators/model.safetensors", "the head in speculators' form, for vLLM and speculators"),
        ]

    def recognizes(self, config: Mapping[str, object]) -> bool:
        return forms.is_eagle3(config)

    def read(self, folder: Path, target: Json, allow_pickle: bool = False) -> Eagle3:
        return forms.read_eagle3(folder, target, allow_pickle)


SHIPPING = Eagle3Shipping()
