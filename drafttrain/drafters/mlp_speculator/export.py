"""MLP speculators in their published form, MLPSpeculatorPreTrainedModel.

Its weights are `emb`, `proj`, `ln` and `head`, one of each per step.
vLLM 0.32 has the network's class, but nothing in its runner that drafts with it, so no recipe is
given; earlier versions did.
"""

from __future__ import annotations

from torch import nn

from drafttrain.drafters.form import Form, Weight, head_weight
from drafttrain.drafters.mlp_speculator.model import MlpSpeculator
from drafttrain.drafters.shipping import Exported, ExportRequest, Format, Shipping
from drafttrain.files import Json
from drafttrain.formats.weights import dtype_name

# The engines' names, and ours.
_MODULES = {
    "emb": "emb",
    "proj": "proj",
    "ln": "ln",
    "head": "lm_heads",
}
_SAME = ("vocab_size", "emb_dim", "inner_dim", "n_predict", "scale_input")


class MlpSpeculatorShipping(Shipping[MlpSpeculator]):
    """The published form for older versions of vLLM; our own format goes to the Hub too."""

    description = (
        "an MLP speculator (arXiv 2404.19124) of {n_predict} steps, {parameters} parameters, {kept}"
    )
    formats = {"vllm": Format("MLPSpeculatorPreTrainedModel", ("vLLM",))}
    drafter_class = MlpSpeculator
    engine_keys = {key: key for key in (*_SAME, "tie_weights")}
    depth_key = "n_predict"
    architectures = ("MLPSpeculatorPreTrainedModel",)
    published_keys = engine_keys.keys()
    reads = "MLP speculators (MLPSpeculatorPreTrainedModel)"

    def engine_config(
        self,
        drafter: MlpSpeculator,
        form: str,
        request: ExportRequest,
    ) -> Json:
        config = drafter.config
        tied = config.tie_weights
        if config.n_predict == 1:  # a single step has nothing to tie
            tied = False
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            **{name: getattr(config, name) for name in _SAME},
            "tie_weights": tied,
            "top_k_tokens_per_head": [max(1, 5 - i) for i in range(config.n_predict)],
            "n_candidates": 5,
            "dtype": dtype_name(request.dtype),
        }

    def form(self, drafter: MlpSpeculator, config: Json) -> Form:
        """Shared modules are in the file once per step, as in published checkpoints."""
        form: Form = {}
        for name, own in _MODULES.items():
            modules = drafter.get_submodule(own)
            assert isinstance(modules, nn.ModuleList), "one module per step, or one for all"
            for i in range(config["n_predict"]):
                j = min(i, len(modules) - 1)
                for key, _ in modules[j].named_parameters():
                    weight = Weight(f"{own}.{j}.{key}")
                    if name == "head":
                        weight = head_weight(weight.ours, drafter.kept_ids, config["vocab_size"])
                    form[f"{name}.{i}.{key}"] = weight
        return form

    def published(self, checkpoint: Exported, target: Json) -> Exported:
        """Removes the prefix of published names; repeats what a file holds once for all steps."""
        config = checkpoint.config
        found = {}
        for name, value in checkpoint.weights.items():
            found[name.removeprefix("speculator.")] = value
        tied = bool(config.get("tie_weights"))
        if tied:
            for name, value in list(found.items()):
                module, step, part = name.split(".", 2)
                if module == "proj" and step == "0":  # it alone reads another width
                    continue
                for later in range(int(step) + 1, config["n_predict"]):
                    found.setdefault(f"{module}.{later}.{part}", value)
        keys: Json = {
            "scale_input": False,
            "inner_dim": 0,
            "emb_dim": target["hidden_size"],
        }
        keys |= {key: value for key, value in config.items() if value is not None}
        keys["tie_weights"] = tied
        return Exported(checkpoint.where, keys, found)


SHIPPING = MlpSpeculatorShipping()
