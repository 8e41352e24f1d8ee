"""Prediction modules in the layouts of Qwen3-Next, Qwen3.5, DeepSeek-V3 and GLM-4.x-MoE: read, run, trained, decoded, written."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.drafters.mtp.model import MTP
from drafttrain.errors import UserError
from drafttrain.target import Target, load_shell
from drafttrain.target.own_layer import OwnLayer, causal
from tests.drafters.layer_kinds import check_lossless, check_parity, check_round_trip, check_trees
from tests.drafters.native_families import FAMILIES, H, VOCAB, reference, write_checkpoint
from tests.drafters.test_eagle3 import make_batch, run_step

ALL = torch.arange(VOCAB)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_module_computes_what_is_published(name, tmp_path):
    """All tensors of the real layout are read, and the first depth gives the reference's states."""
    tensors = write_checkpoint(name, tmp_path)
    shell = load_shell(str(tmp_path), "float32", weights=True)
    drafter = MTP.native(shell, ALL, {}).eval()
    assert isinstance(drafter.blocks[0].layer, OwnLayer)
    generator = torch.Generator().manual_seed(2)
    embeds, states = torch.randn(2, 9, H, generator=generator)
    positions = torch.arange(9) + 20
    with torch.no_grad():
        ours = drafter.step(drafter.fuse(states), embeds, positions, [causal])
        last = drafter.step(drafter.fuse(states), embeds, positions, [lambda q, k, v: causal_rows(q, k, v)], torch.tensor([8]))
    torch.testing.assert_close(ours, reference(name, tensors, embeds, states, positions), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, ours[8:], rtol=1e-4, atol=1e-5)


def causal_rows(query, key, value):
    """Attention of the last token only."""
    padded = torch.cat((query.new_zeros(len(key) - len(query), *query.shape[1:]), query))
    return causal(padded, key, value)[-len(query) :]
