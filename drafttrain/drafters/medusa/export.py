"""Medusa heads as vLLM's MedusaModel: `blocks.{i}.layers.{j}` and `lm_heads.{i}`, or one `lm_head` for all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from drafttrain.drafters.shipping import Format, Request, Shipping
from drafttrain.drafters.trained import Trained
from drafttrain.errors import UserError
from drafttrain.formats.head_files import compare_heads, save_heads, whole_rows


class MedusaShipping(Shipping):
    formats = {"vllm": Format("MedusaModel", ("vLLM",))}
    verifiable = {"vllm": "vllm"}

    def line(self, trained: Trained, parameters: str) -> str:
        config = trained.config
        return (
            f"{config['num_heads']} Medusa heads (arXiv 2401.10774), {parameters} parameters, "
            f"{config.get('draft_vocab_size', 0):,} of its {config.get('vocab_size', 0):,} tokens"
        )

    def write(self, trained: Trained, form: str, request: Request) -> list[Path]:
        """As many heads as tokens are to be drafted: vLLM drafts one per head, whatever it is told.

        Raises:
            UserError: more tokens than heads, or the output cannot be written.
        """
        drafter = trained.load()
        config, depth = drafter.config, request.depth
        if depth > config.num_heads:
            raise UserError(
                f"speculative-tokens={depth}, but the drafter has {config.num_heads} heads, one per token; ask for no more"
            )
        heads = [whole_rows(head.weight, drafter.kept_ids, config.vocab_size) for head in drafter.lm_heads[:depth]]
        weights = {
            f"blocks.{i}.layers.{j}.weight": block.linear.weight
            for i, blocks in enumerate(drafter.blocks[:depth])
            for j, block in enumerate(blocks)
        }
        weights |= {"lm_head.weight" if config.shared_head else f"lm_heads.{i}.weight": h for i, h in enumerate(heads)}
        described = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_heads": depth,
            "num_hidden_layers": config.blocks,
            "original_lm_head": config.shared_head,
            "medusa_fc_bias": False,
        }
        return save_heads(request.output, weights, described, request.dtype)

    def most_tokens(self, trained: Trained) -> int:
        return trained.config["num_heads"]

    def check(self, trained: Trained, exported: Path) -> dict[str, Any]:
        return compare_heads(trained.load(), exported, steps)

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, Any]]:
        return {"vLLM": {"method": "medusa"}}


def steps(config: dict[str, Any], weights: dict[str, Tensor], hidden: Tensor, tokens: Tensor) -> list[Tensor]:
    """What vLLM computes; see `Engine`."""
    found = []
    for i in range(config["num_heads"]):
        x = hidden
        for j in range(config["num_hidden_layers"]):
            x = x + F.silu(F.linear(x, weights[f"blocks.{i}.layers.{j}.weight"]))
        found.append(F.linear(x, weights["lm_head.weight" if config["original_lm_head"] else f"lm_heads.{i}.weight"]))
    return found


SHIPPING = MedusaShipping()
