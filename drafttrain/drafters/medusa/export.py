"""Medusa heads as vLLM's MedusaModel.

Its weights are `blocks.{i}.layers.{j}` and `lm_heads.{i}`, or one `lm_head` for all. Source: vLLM 0.32 models/medusa.py.
"""

from __future__ import annotations

from drafttrain.drafters.form import Form, Weight, head_weight
from drafttrain.drafters.medusa.model import Medusa
from drafttrain.drafters.shipping import Exported, ExportRequest, Format, Shipping
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.weights import dtype_name


class MedusaShipping(Shipping[Medusa]):
    """vLLM alone; our own format goes to the Hub too."""

    description = "{num_heads} Medusa heads (arXiv 2401.10774), {parameters} parameters, {kept}"
    formats = {"vllm": Format("MedusaModel", ("vLLM",))}
    drafter_class = Medusa
    engine_keys = {
        "hidden_size": "hidden_size",
        "vocab_size": "vocab_size",
        "num_heads": "num_heads",
        "num_hidden_layers": "blocks",
        "original_lm_head": "shared_head",
    }
    depth_key = "num_heads"
    serving = {"vLLM": {"method": "medusa"}}
    verifiable = {"vllm": "vllm"}
    architectures = ("MedusaModel",)
    published_keys = {*engine_keys, "medusa_fc_bias", "token_map"}  # tensors tell biases
    reads = "Medusa heads without biases (MedusaModel)"

    def engine_config(self, drafter: Medusa, form: str, request: ExportRequest) -> Json:
        """Keeps as many heads as tokens are to be drafted, of which vLLM drafts one per head.

        Raises:
            UserError: more tokens than heads.
        """
        config = drafter.config
        if request.depth > config.num_heads:
            raise UserError(
                f"speculative-tokens={request.depth}, but the drafter has {config.num_heads} heads, one per token; ask for fewer"
            )
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_heads": request.depth,
            "num_hidden_layers": config.blocks,
            "original_lm_head": config.shared_head,
            "medusa_fc_bias": False,
            "dtype": dtype_name(request.dtype),
        }

    def form(self, drafter: Medusa, config: Json) -> Form:
        def head(i: int) -> Weight:
            return head_weight(f"lm_heads.{i}.weight", drafter.kept_ids, config["vocab_size"])

        form: Form = {}
        if config["original_lm_head"]:
            form["lm_head.weight"] = head(0)
        for i in range(config["num_heads"]):
            for j in range(config["num_hidden_layers"]):
                form[f"blocks.{i}.layers.{j}.weight"] = Weight(f"blocks.{i}.{j}.linear.weight")
            if not config["original_lm_head"]:
                form[f"lm_heads.{i}.weight"] = head(i)
        return form

    def published(self, checkpoint: Exported, target: Json) -> Exported:
        """Rows beyond the target's tokens are padding; a bias of zeros is none."""
        v = target["vocab_size"]
        what = ""
        if checkpoint.config.get("token_map") is not None:
            what = "a token_map"
        found = {}
        for name, value in checkpoint.weights.items():
            if name.endswith(".bias"):
                if value.any():
                    what = f"{name}, a bias"
                    break
            elif name.startswith("lm_head"):
                found[name] = value[:v]
            else:
                found[name] = value
        if what:
            raise UserError(
                f"{checkpoint.where} has {what}, which our Medusa heads have not; train new ones from its target"
            )
        keys = {
            "hidden_size": target["hidden_size"],
            "num_heads": 5,
            "num_hidden_layers": 1,
        }
        keys |= checkpoint.config
        keys["vocab_size"] = v
        keys["original_lm_head"] = bool(keys.get("original_lm_head"))
        return Exported(checkpoint.where, keys, found)


SHIPPING = MedusaShipping()
