"""Medusa heads as vLLM's MedusaModel: `blocks.{i}.layers.{j}` and `lm_heads.{i}`, or one `lm_head` for all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from drafttrain.drafters.medusa.model import Medusa, MedusaConfig
from drafttrain.drafters.shipping import ExportRequest, Format, Shipping, vocabulary_text
from drafttrain.drafters.trained import Trained
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.weights import Shapes, dtype_name, write_checkpoint
from drafttrain.formats.whole_vocabulary import whole_rows


class MedusaShipping(Shipping):
    """vLLM alone; our own format goes to the Hub too."""

    formats = {"vllm": Format("MedusaModel", ("vLLM",))}
    verifiable = {"vllm": "vllm"}

    def line(self, trained: Trained, parameters: str) -> str:
        heads = trained.config["num_heads"]
        return f"{heads} Medusa heads (arXiv 2401.10774), {parameters} parameters, {vocabulary_text(trained.config)}"

    def write(self, trained: Trained, form: str, request: ExportRequest) -> list[Path]:
        """Writes as many heads as tokens are to be drafted: vLLM drafts one per head, whatever its config says.

        Raises:
            UserError: more tokens than heads, or the output cannot be written.
        """
        drafter: Medusa = trained.load()
        config, depth = drafter.config, request.depth
        if depth > config.num_heads:
            raise UserError(
                f"speculative-tokens={depth}, but the drafter has {config.num_heads} heads, one per token; ask for no more"
            )
        weights: dict[str, Tensor] = {
            f"blocks.{i}.layers.{j}.weight": block.linear.weight
            for i, blocks in enumerate(drafter.blocks[:depth])
            for j, block in enumerate(blocks)
        }
        for i, head in enumerate(drafter.lm_heads[:depth]):
            weights[_head(config.shared_head, i)] = whole_rows(head.weight, drafter.kept_ids, config.vocab_size)
        described = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_heads": depth,
            "num_hidden_layers": config.blocks,
            "original_lm_head": config.shared_head,
            "medusa_fc_bias": False,
            "dtype": dtype_name(request.dtype),
        }
        return write_checkpoint(request.output, described, weights, request.dtype)

    def expected_weights(self, trained: Trained, config: Json) -> Shapes:
        h, v, heads = config["hidden_size"], config["vocab_size"], range(config["num_heads"])
        shapes: Shapes = {
            f"blocks.{i}.layers.{j}.weight": (h, h) for i in heads for j in range(config["num_hidden_layers"])
        }
        return shapes | {_head(config["original_lm_head"], i): (v, h) for i in heads}

    def read_back(self, trained: Trained, exported: Path, config: Json, weights: dict[str, Tensor]) -> Medusa:
        """Takes the kept ids from the original: the export has a row for every token."""
        kept = trained.load().kept_ids
        fields = {key: config[key] for key in ("hidden_size", "vocab_size", "num_heads")}
        back = Medusa(
            MedusaConfig(
                **fields,
                blocks=config["num_hidden_layers"],
                shared_head=config["original_lm_head"],
                draft_vocab_size=len(kept),
                target=trained.target,
            )
        )
        state: dict[str, Tensor] = {"kept_ids": kept}
        for i, blocks in enumerate(back.blocks):
            state |= {
                f"blocks.{i}.{j}.linear.weight": weights[f"blocks.{i}.layers.{j}.weight"] for j in range(len(blocks))
            }
        for i in range(len(back.lm_heads)):
            state[f"lm_heads.{i}.weight"] = weights[_head(config["original_lm_head"], i)][kept]
        back.load_state_dict(state)
        return back

    def checked_depth(self, config: Json) -> int:
        return config["num_heads"]

    def most_tokens(self, trained: Trained) -> int:
        return trained.config["num_heads"]

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, object]]:
        return {"vLLM": {"method": "medusa"}}


def _head(shared: bool, i: int) -> str:
    return "lm_head.weight" if shared else f"lm_heads.{i}.weight"


SHIPPING = MedusaShipping()
