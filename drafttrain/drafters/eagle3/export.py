"""EAGLE-3 heads: see hub/eagle3_formats.py for the two forms, hub/engine_eagle3.py for the engines' arithmetic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafttrain.drafters.eagle3.model import Eagle3
from drafttrain.drafters.shipping import Format, Request, Shipping
from drafttrain.drafters.trained import Trained, architectures_of
from drafttrain.export.serving_recipes import public_name
from drafttrain.formats.eagle3_formats import FLAT, SPECULATORS, default_layers, obstacles, read_eagle3, write_eagle3
from drafttrain.formats.verify_eagle3 import compare_steps
from drafttrain.hub.upload import write_clean_json


class Eagle3Shipping(Shipping):
    """In the root of a repository lies the flat form with our own keys in its config, in speculators/ the other."""

    formats = {
        "vllm": Format("EAGLE-3 in speculators' form", ("vLLM",)),
        "sglang": Format("EAGLE-3 as LlamaForCausalLMEagle3", ("SGLang", "TensorRT-LLM, Triton", "vLLM")),
    }
    verifiable = {"vllm": "vllm"}
    in_root = ("vllm", "sglang")
    reads = "EAGLE-3 heads in speculators' form or as LlamaForCausalLMEagle3"

    def line(self, trained: Trained, parameters: str) -> str:
        config = trained.config
        layers = config.get("num_hidden_layers", 1)
        many = "one decoder layer" if layers == 1 else f"{layers} decoder layers"
        features = ", ".join(map(str, config.get("feature_layers", [])))
        return (
            f"an EAGLE-3 head (arXiv 2503.01840), {many} over the target's states {features}, {parameters} parameters, "
            f"{config.get('draft_vocab_size', 0):,} of its {config.get('vocab_size', 0):,} tokens"
        )

    def refusals(self, trained: Trained, form: str) -> list[str]:
        if form not in self.formats:
            return [
                "an EAGLE-3 head reads the target's states and is no language model of its own, as a draft_model is"
            ]
        return obstacles(trained.load(), form)

    def write(self, trained: Trained, form: str, request: Request) -> list[Path]:
        head: Any = trained.load()
        _write(head, SPECULATORS if form == "vllm" else FLAT, request)
        return [request.output / "config.json", request.output / "model.safetensors"]

    def check(self, trained: Trained, exported: Path) -> dict[str, Any]:
        return compare_steps(trained.load(), exported)

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, Any]]:
        layers = tuple(trained.config.get("feature_layers", ()))
        tensorrt: dict[str, Any] = {"decoding_type": "Eagle3"}
        if layers != default_layers(trained.target.get("num_layers", 0)):
            tensorrt["eagle3_layers_to_capture"] = [layer - 1 for layer in layers]
        return {
            "vLLM": {"method": "eagle3"},
            "SGLang": {"speculative-algorithm": "EAGLE3"},
            "TensorRT-LLM, Triton": tensorrt,
        }

    def publish(self, trained: Trained, request: Request) -> list[tuple[str, str]]:
        head: Any = trained.load()
        folder, target = request.output, {**trained.target, "name": request.target}
        config = head.config
        config.target = target
        if reasons := obstacles(head, "vllm"):
            print(f"in drafttrain's own format only: {'; '.join(reasons)}")
            head.to(request.dtype).save_pretrained(folder)
            return [("model.safetensors", "the head, for drafttrain; no engine can express it, see below")]
        own = {key: value for key, value in config.to_diff_dict().items() if value not in (None, 0) and key != "dtype"}
        _write(head, SPECULATORS, replace(request, output=folder / "speculators"))
        _write(head, FLAT, request)
        described = json.loads((folder / "config.json").read_text())
        write_clean_json(folder / "config.json", {**own, **described, "drafter_kind": trained.kind, "target": target})
        engines = "vLLM and drafttrain" if obstacles(head, "sglang") else "vLLM, SGLang, TensorRT-LLM and drafttrain"
        return [
            ("model.safetensors", f"the head as {described['architectures'][0]}, for {engines}"),
            ("speculators/model.safetensors", "the head in speculators' form, for vLLM and speculators"),
        ]

    def recognises(self, config: Mapping[str, Any]) -> bool:
        if "speculators_model_type" in config:
            return config["speculators_model_type"] == "eagle3"
        return any("Eagle3" in name for name in config.get("architectures") or [])

    def read(self, folder: Path, target: dict[str, Any], allow_pickle: bool = False) -> Eagle3:
        return read_eagle3(folder, target, allow_pickle)


def _write(head: Eagle3, form: str, request: Request) -> None:
    write_eagle3(
        head,
        request.output,
        form,
        dtype=request.dtype,
        speculative_tokens=request.depth,
        target_name=public_name(request.target) if request.target else "",
        target_architectures=architectures_of(request.target),
    )


SHIPPING = Eagle3Shipping()
