"""Block drafters whose layers differ in window, direction and sinks, as published ones do."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.dflash.model import DFlash, DFlashConfig
from drafttrain.errors import UserError
from drafttrain.ops.path_attention import Spans
from drafttrain.ops.tree_cache import TreeCache
from tests.drafters.block_kinds import MIXED, begun, block_states, make_drafter, shaken
from tests.drafters.helpers import make_batch
from tests.ops.test_block_attention import textbook

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("causal", "one_way"), [(False, "   "), (True, "ccc"), ("sliding", "cc ")], ids=str
)
@torch.no_grad()
def test_each_layer_sees_what_its_type_says(target, causal, one_way):
    """A block as decoding computes it, against each layer's softmax under a dense mask."""
    drafter = shaken(DFlash, target, **MIXED, causal=causal, attention_sink_bias=True)
    features = torch.randn(20, drafter.fc.in_features, generator=torch.Generator().manual_seed(0))
    context = drafter.fuse(features)
    tables = drafter.rotary.tables(torch.arange(20), torch.float32)
    spans = Spans(*torch.tensor([[0], [19], [0]]))
    attends = []
    for layer, window, way in zip(drafter.layers, (6, 6, 0), one_way, strict=True):
        own = layer.self_attn
        base = own.keys_values(context, *tables)

        def attend(query, key, value, base=base, own=own, form=(window, way == "c")):
            return textbook(query, (key, value, own.attention_sink_bias), base, spans, *form)

        attends.append(attend)
    wanted = drafter.run(drafter.embed(torch.tensor([5])), torch.tensor([20]), attends)[0]
    torch.testing.assert_close(block_states(drafter, features, 5), wanted, rtol=1e-4, atol=1e-5)


def test_a_run_continues_with_the_layers_that_it_has(target, tmp_path):
    make_drafter(DFlash, target, torch.arange(300), **MIXED).save_pretrained(tmp_path)
    later = DFlash.begin(target, str(tmp_path), {"gamma": 2.0}, "kl")
    assert later.config.windows == (6, 6, 0) and later.config.gamma == 2.0


@pytest.mark.parametrize("types", [None, [SLIDING, FULL]])
def test_a_window_bounds_the_cache_only_where_every_layer_has_it(monkeypatch, target, types):
    drafter = shaken(DFlash, target, sliding_window=7, layer_types=types)
    prefix = make_batch((60,)).input_ids[0]
    spec = TreeSpec.parse("chain:4")
    session = begun(drafter, target, prefix)
    tree = session.propose(spec)
    assert (session.cache.base > 0) == (types is None)
    monkeypatch.setattr(TreeCache, "trim", lambda cache: None)
    torch.testing.assert_close(
        tree.log_probs, begun(drafter, target, prefix).propose(spec).log_probs
    )


def test_files_without_layer_types_have_one_window():
    old = DFlashConfig(vocab_size=300, sliding_window=9, causal=True).to_dict()
    del old["layer_types"], old["attention_sink_bias"]
    read = DFlashConfig(**old)
    assert read.windows == (9, 9) and read.causal_layers == (True, True)
    same = DFlashConfig(**{**old, "layer_types": [SLIDING] * 2, "causal": "sliding"})
    assert same.layer_types is None and same.causal is True


def test_types_that_do_not_fit_are_one_line(target):
    with pytest.raises(UserError, match="do not fit num_hidden_layers=2 and sliding_window=0"):
        DFlashConfig.for_target(target, layer_types=[FULL, SLIDING])
