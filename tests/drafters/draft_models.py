"""Draft models that are made from a target's layers."""

from __future__ import annotations

import torch

from drafttrain.drafters.draft_model.model import DraftModel

SHAPES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
BEGINNINGS = {
    "layers": ("target", {"layers": [0, 2]}),
    "shared": ("target", {"layers": [0, 3], "embedding": "shared"}),
    "random": ("random", {"config": {**SHAPES, "initializer_range": 0.2}}),
    "lora": ("target", {"layers": [0, 2], "lora": {"r": 4, "alpha": 8}}),
}


def make_drafter(target, name="layers", loss="kl"):
    torch.manual_seed(1)
    init, options = BEGINNINGS[name]
    drafter = DraftModel.begin(target, init, options, loss)
    drafter.bind(target)
    return drafter
