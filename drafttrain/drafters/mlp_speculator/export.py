"""MLP speculators in their published form, MLPSpeculatorPreTrainedModel: `emb`, `proj`, `ln` and `head`, one of each per step.

vLLM 0.32 has the network's class, but nothing in its runner that drafts with it, so no recipe is given; earlier versions did.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from drafttrain.drafters.shipping import Format, Request, Shipping
from drafttrain.drafters.trained import Trained
from drafttrain.formats.head_files import compare_heads, save_heads, whole_rows


class MlpSpeculatorShipping(Shipping):
    formats = {"vllm": Format("MLPSpeculatorPreTrainedModel", ("vLLM",))}

    def line(self, trained: Trained, parameters: str) -> str:
        config = trained.config
        return (
            f"an MLP speculator (arXiv 2404.19124) of {config['n_predict']} steps, {parameters} parameters, "
            f"{config.get('draft_vocab_size', 0):,} of its {config.get('vocab_size', 0):,} tokens"
        )

    def write(self, trained: Trained, form: str, request: Request) -> list[Path]:
        drafter = trained.load()
        config = drafter.config
        heads = [whole_rows(head.weight, drafter.kept_ids, config.vocab_size) for head in drafter.lm_heads]
        weights: dict[str, Tensor] = {}
        for i in range(config.n_predict):  # shared ones too are in the file once per step, as in published checkpoints
            emb, proj, ln = (m[min(i, len(m) - 1)] for m in (drafter.emb, drafter.proj, drafter.ln))
            weights |= {f"emb.{i}.weight": emb.weight, f"proj.{i}.weight": proj.weight}
            weights[f"head.{i}.weight"] = heads[min(i, len(heads) - 1)]
            weights |= {f"ln.{i}.weight": ln.weight, f"ln.{i}.bias": ln.bias}
        described = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": config.vocab_size,
            "emb_dim": config.emb_dim,
            "inner_dim": config.inner_dim,
            "n_predict": config.n_predict,
            "tie_weights": config.tie_weights and config.n_predict > 1,  # of a single step there is nothing to tie
            "scale_input": config.scale_input,
            "top_k_tokens_per_head": [max(1, 5 - i) for i in range(config.n_predict)],
            "n_candidates": 5,
        }
        return save_heads(request.output, weights, described, request.dtype)

    def check(self, trained: Trained, exported: Path) -> dict[str, Any]:
        return compare_heads(trained.load(), exported, steps)


def steps(config: dict[str, Any], weights: dict[str, Tensor], hidden: Tensor, tokens: Tensor) -> list[Tensor]:
    """What engines compute; see `Engine`."""
    n = config["n_predict"]
    state_weight = 0.5 ** (0.5 / n)
    embed_weight = math.sqrt((1 - state_weight**2) * (config["inner_dim"] / 2))
    state = _scaled(hidden) / math.sqrt(2) if config["scale_input"] else hidden
    found = []
    for i in range(n):
        last = min(i, 1) if config["tie_weights"] else i
        first = 0 if config["tie_weights"] else i
        state = F.linear(state, weights[f"proj.{last}.weight"])
        state = state + weights[f"emb.{first}.weight"][tokens[:, i]] * (embed_weight / state_weight)
        state = F.gelu(_scaled(state) * weights[f"ln.{first}.weight"] + weights[f"ln.{first}.bias"])
        found.append(F.linear(state, weights[f"head.{i}.weight"]))
    return found


def _scaled(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


SHIPPING = MlpSpeculatorShipping()
