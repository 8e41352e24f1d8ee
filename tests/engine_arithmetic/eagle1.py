"""EAGLE-1 as engines compute it, from the exported files alone, and a drafted chain compared with our drafter's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.eagle1.model import Eagle1
from drafttrain.errors import UserError
from drafttrain.formats.weights import read_weights

_PROMPT = 24
_DEPTH = 4
TOLERANCE = 1e-3  # of states, relative to their size, in float32


class EngineEagle1:
    """An exported head, of transformers' Llama layers, over whole sequences without a cache."""

    def __init__(self, folder: Path):
        described = json.loads((folder / "config.json").read_text())
        keys = {
            key: value
            for key, value in described.items()
            if key not in ("architectures", "model_type", "rope_scaling")
        }
        config = LlamaConfig(**{**keys, "attn_implementation": "eager"})
        weights = read_weights(folder)
        self.dtype = weights["fc.weight"].dtype
        biased = described["architectures"] == ["LlamaForCausalLMEagle"]
        model = nn.Module()
        model.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=biased)
        model.layers = nn.ModuleList(
            LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        first: Any = model.layers[0]
        first.input_layernorm = nn.Identity()
        try:
            model.load_state_dict({name: value.float() for name, value in weights.items()})
        except RuntimeError as error:
            raise UserError(f"{str(folder)!r}: {' '.join(str(error).split())}") from error
        self.model: Any = model.eval()
        self.rotary = LlamaRotaryEmbedding(config)

    def states(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """[t, h] token embeddings and states at positions 0 .. t - 1 -> [t, h]."""
        x = self.model.fc(torch.cat((embeds, hidden), dim=-1))[None]
        tables = self.rotary(x, torch.arange(len(embeds))[None])
        mask = torch.full((len(embeds),) * 2, float("-inf")).triu(1)[None, None]
        for layer in self.model.layers:
            out = layer(x, attention_mask=mask, position_embeddings=tables)
            x = out[0] if isinstance(out, tuple) else out
        return x[0]


@torch.no_grad()
def compare_states(drafter: Eagle1, exported: Path, seed: int = 0) -> dict[str, Any]:
    """Drafts a chain on random inputs both ways, with a random embedding and head in place of the target's.

    Args:
        drafter: ours, on the CPU; its weights are rounded as the exported ones are.

    Returns:
        depth and max_state_difference, relative to the largest entry.

    Raises:
        UserError: the files do not hold what an engine looks for, or the states differ.
    """
    head = EngineEagle1(exported)
    ours = drafter
    ours.to(head.dtype).float().eval()  # type: ignore[arg-type, call-arg]
    h = ours.config.hidden_size
    made = torch.Generator().manual_seed(seed)
    table = torch.randn(64, h, generator=made)
    rows = torch.randn(len(ours.kept_ids), h, generator=made)
    ours.embed = lambda ids: table[ids % len(table)]
    linear = torch.nn.Linear(h, len(rows), bias=False)
    linear.weight.data = rows
    ours.frozen, ours.score = [linear], linear.forward
    states = []
    step = ours.step
    ours.step = lambda *args: states.append(step(*args)) or states[-1]  # type: ignore[func-returns-value, method-assign]
    features = torch.randn(_PROMPT, h, generator=made)
    tokens = torch.randint(ours.config.vocab_size, (_PROMPT + 1,), generator=made)
    session = ours.start(tokens[:_PROMPT], _PROMPT + _DEPTH)
    session.extend(tokens[1:], features)
    tree = session.propose(TreeSpec.parse(f"chain:{_DEPTH}"))
    embeds = ours.embed(torch.cat((tokens[1:], tree.tokens)))
    hidden = features
    worst = 0.0
    size = 0.0
    for k in range(_DEPTH):
        theirs = head.states(embeds[: len(hidden)], hidden)[-1]
        worst = max(worst, float((theirs - states[k][-1]).abs().max()))
        size = max(size, float(theirs.abs().max()))
        hidden = torch.cat((hidden, theirs[None]))
    if not worst <= TOLERANCE * size:
        raise UserError(
            f"{str(exported)!r} computes something else than the drafter (states differ by {worst / size:.3g} of their size); a "
            "flag or weight was lost: export again, and report this if it stays"
        )
    return {"depth": _DEPTH, "max_state_difference": worst / size}
