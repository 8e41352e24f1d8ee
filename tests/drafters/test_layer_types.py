"""Block drafters whose layers differ in window, direction and sinks, as published ones do."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from drafttrain.drafters.dflash.model import DFlash, DFlashConfig
from drafttrain.ops.path_attention import Spans
from tests.drafters.block_kinds import MIXED, begun, block_states, shaken
from tests.drafters.helpers import make_batch
from tests.ops.textbook_blocks import textbook


@torch.no_grad()
def test_each_layer_sees_what_its_type_says(target):
    """A block as decoding computes it, against each layer's softmax under a dense mask."""
    drafter = shaken(DFlash, target, **MIXED, causal="sliding", attention_sink_bias=True)
    features = torch.randn(20, drafter.fc.in_features)
    context = drafter.fuse(features)
    tables = drafter.rotary.tables(torch.arange(20), torch.float32)
    spans = Spans(*torch.tensor([[0], [19], [0]]))

    def attend(layer, form, query, key, value):
        own = layer.self_attn
        base = own.keys_values(context, tables)
        return textbook(query, (key, value, own.attention_sink_bias), base, spans, *form)

    forms = [(6, True), (6, True), (0, False)]  # window, causal
    attends = [partial(attend, *pair) for pair in zip(drafter.layers, forms, strict=True)]
    wanted = drafter.run(drafter.embed(torch.tensor([5])), torch.tensor([20]), attends)[0]
    torch.testing.assert_close(block_states(drafter, features, 5), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("types", [None, ["sliding_attention", "full_attention"]])
def test_a_window_bounds_the_cache_only_where_every_layer_has_it(target, types):
    drafter = shaken(DFlash, target, sliding_window=7, layer_types=types)
    session = begun(drafter, target, make_batch((60,)).input_ids[0])
    assert (session.cache.base > 0) == (types is None)


def test_files_without_layer_types_have_one_window():
    old = DFlashConfig(vocab_size=300, sliding_window=9, causal=True).to_dict()
    del old["layer_types"], old["attention_sink_bias"]
    read = DFlashConfig(**old)
    assert read.windows == (9, 9) and read.causal_layers == (True, True)
