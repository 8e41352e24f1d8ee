"""MLP speculators in their published form, MLPSpeculatorPreTrainedModel: `emb`, `proj`, `ln` and `head`, one of each per step.

vLLM 0.32 has the network's class, but nothing in its runner that drafts with it, so no recipe is given; earlier versions did.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from drafttrain.drafters.mlp_speculator.model import MlpSpeculator, MlpSpeculatorConfig
from drafttrain.drafters.shipping import ExportRequest, Format, Shipping, vocabulary_text
from drafttrain.drafters.trained import Trained
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.weights import Shapes, dtype_name, write_checkpoint
from drafttrain.formats.whole_vocabulary import whole_rows

_OURS = {"head": "lm_heads"}  # the engines' name of a module -> ours, where they differ
_SAME = ("vocab_size", "emb_dim", "inner_dim", "n_predict", "scale_input")


class MlpSpeculatorShipping(Shipping):
    """The published form for older versions of vLLM; our own format goes to the Hub too."""

    formats = {"vllm": Format("MLPSpeculatorPreTrainedModel", ("vLLM",))}

    def line(self, trained: Trained, parameters: str) -> str:
        steps, kept = trained.config["n_predict"], vocabulary_text(trained.config)
        return f"an MLP speculator (arXiv 2404.19124) of {steps} steps, {parameters} parameters, {kept}"

    def write(self, trained: Trained, form: str, request: ExportRequest) -> list[Path]:
        """Writes every step's modules; shared ones are in the file once per step, as in published checkpoints."""
        drafter: MlpSpeculator = trained.load()
        config = drafter.config
        weights: dict[str, Tensor] = {}
        for name in ("emb", "proj", "ln", "head"):
            modules = drafter.get_submodule(_OURS.get(name, name))
            for i in range(config.n_predict):
                for key, value in modules[min(i, len(modules) - 1)].named_parameters():
                    rows = whole_rows(value, drafter.kept_ids, config.vocab_size) if name == "head" else value
                    weights[f"{name}.{i}.{key}"] = rows
        described = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            **{name: value for name, value in config.to_dict().items() if name in _SAME},
            "tie_weights": config.tie_weights and config.n_predict > 1,  # a single step has nothing to tie
            "top_k_tokens_per_head": [max(1, 5 - i) for i in range(config.n_predict)],
            "n_candidates": 5,
            "dtype": dtype_name(request.dtype),
        }
        return write_checkpoint(request.output, described, weights, request.dtype)

    def expected_weights(self, trained: Trained, config: Json) -> Shapes:
        v, width, inner = (config[key] for key in ("vocab_size", "emb_dim", "inner_dim"))
        shapes: Shapes = {}
        for i in range(config["n_predict"]):
            shapes |= {f"emb.{i}.weight": (v, inner), f"proj.{i}.weight": (inner, inner if i else width)}
            shapes |= {f"head.{i}.weight": (v, inner), f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,)}
        return shapes

    def read_back(self, trained: Trained, exported: Path, config: Json, weights: dict[str, Tensor]) -> MlpSpeculator:
        """Takes the kept ids from the original: the export has a row for every token.

        Raises:
            UserError: copies of a module that steps share differ.
        """
        kept = trained.load().kept_ids
        fields = {key: config[key] for key in (*_SAME, "tie_weights")}
        back = MlpSpeculator(MlpSpeculatorConfig(**fields, draft_vocab_size=len(kept), target=trained.target))
        state: dict[str, Tensor] = {"kept_ids": kept}
        for name, value in weights.items():
            module, i, key = name.split(".")
            ours = _OURS.get(module, module)
            own = f"{ours}.{min(int(i), len(back.get_submodule(ours)) - 1)}.{key}"
            value = value[kept] if module == "head" else value
            if own in state and not torch.equal(state[own], value):
                raise UserError(f"{str(exported)!r}: {name} differs from the step that shares it; export again")
            state[own] = value
        back.load_state_dict(state)
        return back

    def checked_depth(self, config: Json) -> int:
        return config["n_predict"]


SHIPPING = MlpSpeculatorShipping()
