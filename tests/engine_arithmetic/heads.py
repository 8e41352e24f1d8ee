"""Heads over the target's last state as engines compute them, from the exported files alone, compared with our drafters."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.drafters.common.path_heads import PathHeads
from drafttrain.errors import UserError
from drafttrain.formats.weights import read_config, read_weights

TOLERANCE = 1e-3  # of log-probabilities in float32
_ANCHORS = 6

# config, weights in float32, last states [n, h], tokens [n, depths] that the depths read -> logits, a [n, v] per depth
Engine = Callable[[dict[str, Any], dict[str, Tensor], Tensor, Tensor], list[Tensor]]


@torch.no_grad()
def compare_heads(
    drafter: PathHeads, exported: Path, engine: Engine, seed: int = 0
) -> dict[str, Any]:
    """Computes all depths on random states and tokens from the exported files alone, and with our drafter.

    Args:
        drafter: on the CPU; its weights are rounded as the exported ones are. engine: what an engine computes.

    Returns:
        depth, max_log_prob_difference (over the kept tokens), same_tokens: whether both find the same likeliest ones.

    Raises:
        UserError: the files do not hold what an engine looks for, or the outputs differ.
    """
    weights = read_weights(exported)
    ours: Any = drafter
    ours.to(next(iter(weights.values())).dtype).float().eval()
    made = torch.Generator().manual_seed(seed)
    hidden = torch.randn(_ANCHORS, ours.config.hidden_size, generator=made)
    tokens = torch.randint(ours.config.vocab_size, (_ANCHORS, ours.depths), generator=made)
    try:
        theirs = engine(
            read_config(exported), {name: w.float() for name, w in weights.items()}, hidden, tokens
        )
    except (KeyError, RuntimeError) as error:
        raise UserError(
            f"{str(exported)!r} lacks what an engine looks for, or in another shape ({error}); export anew"
        ) from error
    worst = 0.0
    same = 0 < len(theirs) <= ours.depths
    state = ours.enter(hidden, tokens[:, 0])
    for k, logits in enumerate(theirs):
        state = ours.advance(state, tokens[:, k], k) if k else state
        own = ours.logits(state, k)
        gap = own.log_softmax(-1) - logits[:, ours.kept_ids].log_softmax(-1)
        worst = max(worst, gap.abs().max().item())
        same = same and bool((ours.kept_ids[own.argmax(-1)] == logits.argmax(-1)).all())
    if not same or not worst <= TOLERANCE:
        raise UserError(
            f"{str(exported)!r} computes something else than the drafter (log-probabilities differ by {worst:.3g}, same "
            f"tokens: {same}); a flag or weight was lost: export anew, and report this if it stays"
        )
    return {"depth": len(theirs), "max_log_prob_difference": worst, "same_tokens": same}


def medusa_steps(
    config: dict[str, Any], weights: dict[str, Tensor], hidden: Tensor, tokens: Tensor
) -> list[Tensor]:
    """What vLLM computes; see `Engine`."""
    found = []
    for i in range(config["num_heads"]):
        x = hidden
        for j in range(config["num_hidden_layers"]):
            x = x + F.silu(F.linear(x, weights[f"blocks.{i}.layers.{j}.weight"]))
        found.append(
            F.linear(
                x,
                weights["lm_head.weight" if config["original_lm_head"] else f"lm_heads.{i}.weight"],
            )
        )
    return found


def mlp_steps(
    config: dict[str, Any], weights: dict[str, Tensor], hidden: Tensor, tokens: Tensor
) -> list[Tensor]:
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


ENGINES: dict[str, Engine] = {"medusa": medusa_steps, "mlp_speculator": mlp_steps}
