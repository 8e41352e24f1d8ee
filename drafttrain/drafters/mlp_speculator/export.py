"""MLP speculators in their published form, MLPSpeculatorPreTrainedModel: `emb`, `proj`, `ln` and
`head`, one of each per step.

vLLM 0.32 has the network's class, but nothing in its runner that drafts with it, so no recipe is
given; earlier versions did.
"""

from __future__ import annotations

from torch import Tensor, nn

from drafttrain.drafters.mlp_speculator.model import MlpSpeculator, MlpSpeculatorConfig
from drafttrain.drafters.shipping import Exported, ExportRequest, Format, Published, Shipping
from drafttrain.files import Json
from drafttrain.formats.weights import dtype_name

_MODULES = {
    "emb": "emb",
    "proj": "proj",
    "ln": "ln",
    "head": "lm_heads",
}  # the engines' names -> ours
_SAME = ("vocab_size", "emb_dim", "inner_dim", "n_predict", "scale_input")


class MlpSpeculatorShipping(Shipping[MlpSpeculator]):
    """The published form for older versions of vLLM; our own format goes to the Hub too."""

    description = (
        "an MLP speculator (arXiv 2404.19124) of {n_predict} steps, {parameters} parameters, {kept}"
    )
    formats = {"vllm": Format("MLPSpeculatorPreTrainedModel", ("vLLM",))}
    full_rows = ("lm_heads.",)
    depth_key = "n_predict"
    architectures = ("MLPSpeculatorPreTrainedModel",)
    reads = "MLP speculators (MLPSpeculatorPreTrainedModel)"

    def engine_config(self, drafter: MlpSpeculator, form: str, request: ExportRequest) -> Json:
        config = drafter.config
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            **{name: value for name, value in config.to_dict().items() if name in _SAME},
            "tie_weights": config.tie_weights
            and config.n_predict > 1,  # a single step has nothing to tie
            "top_k_tokens_per_head": [max(1, 5 - i) for i in range(config.n_predict)],
            "n_candidates": 5,
            "dtype": dtype_name(request.dtype),
        }

    def engine_names(self, drafter: MlpSpeculator, config: Json) -> dict[str, str]:
        """Shared modules are in the file once per step, as in published checkpoints."""
        names: dict[str, str] = {}
        for name, own in _MODULES.items():
            modules = drafter.get_submodule(own)
            assert isinstance(modules, nn.ModuleList), "one module per step, or one for all"
            for i in range(config["n_predict"]):
                j = min(i, len(modules) - 1)
                names |= {
                    f"{name}.{i}.{key}": f"{own}.{j}.{key}"
                    for key, _ in modules[j].named_parameters()
                }
        return names

    def drafter_from(self, original: MlpSpeculator, export: Exported) -> MlpSpeculator:
        fields = {key: export.config[key] for key in (*_SAME, "tie_weights")}
        kept = len(original.kept_ids)
        return MlpSpeculator(
            MlpSpeculatorConfig(**fields, draft_vocab_size=kept, target=original.config.target)
        )

    def published(
        self,
        config: Json,
        weights: dict[str, Tensor],
        target: Json,
        where: str,
    ) -> Published:
        """Takes the prefix of published names away, and fills in what a file holds once for all
        steps.
        """
        found = {name.removeprefix("speculator."): value for name, value in weights.items()}
        steps = config["n_predict"]
        tied = bool(config.get("tie_weights"))
        for name in list(found) if tied else ():
            module, step, part = name.split(".", 2)
            for later in range(
                int(step) + 1, steps
            ):  # the first projection alone reads another width
                if not (module == "proj" and step == "0"):
                    found.setdefault(f"{module}.{later}.{part}", found[name])
        defaults = {"scale_input": False, "inner_dim": 0, "emb_dim": target["hidden_size"]}
        keys = {
            **defaults,
            **{key: value for key, value in config.items() if value is not None},
            "tie_weights": tied,
        }
        return Published({**keys, "hidden_size": keys["emb_dim"]}, found)


SHIPPING = MlpSpeculatorShipping()
