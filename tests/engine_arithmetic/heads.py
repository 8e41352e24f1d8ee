"""MLP speculators as engines compute them, from the exported files alone: no engine drafts with them on a CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.drafters.mlp_speculator.model import MlpSpeculator
from drafttrain.formats.weights import read_config, read_weights

_ANCHORS = 6


@torch.no_grad()
def largest_difference(drafter: MlpSpeculator, exported: Path) -> float:
    """Of log-probabilities of kept tokens, on random states and tokens; infinite where another token leads.

    Args:
        drafter: on the CPU; its weights are rounded as the exported ones are.
    """
    weights = read_weights(exported)
    ours: Any = drafter
    ours.to(next(iter(weights.values())).dtype).float().eval()
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(_ANCHORS, ours.config.hidden_size, generator=made)
    tokens = torch.randint(ours.config.vocab_size, (_ANCHORS, ours.depths), generator=made)
    rounded = {name: weight.float() for name, weight in weights.items()}
    worst = 0.0
    state = ours.enter(hidden, tokens[:, 0])
    for k, logits in enumerate(mlp_steps(read_config(exported), rounded, hidden, tokens)):
        if k:
            state = ours.advance(state, tokens[:, k], k)
        own = ours.logits(state, k)
        if not torch.equal(ours.kept_ids[own.argmax(-1)], logits.argmax(-1)):
            return math.inf
        gap = own.log_softmax(-1) - logits[:, ours.kept_ids].log_softmax(-1)
        worst = max(worst, gap.abs().max().item())
    return worst


def mlp_steps(
    config: dict[str, Any], weights: dict[str, Tensor], hidden: Tensor, tokens: Tensor
) -> list[Tensor]:
    """Logits [n, v] of each step, from last states [n, h] and the tokens [n, steps] that the steps read."""
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
