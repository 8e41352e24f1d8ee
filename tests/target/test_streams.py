"""Targets whose layers hold several streams of states per token."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.inference import generate
from tests.drafters.helpers import make_drafter
from tests.inference.any_family import FAMILIES, VARIANTS, build, wrapped

IDS = torch.tensor([[5, 9, 11, 7, 20], [8, 8, 1, 2, 3]])


def tiny(name):
    torch.manual_seed(0)
    model = build(FAMILIES[name], next(iter(VARIANTS.values())))
    target, reason = wrapped(model, name)
    assert target is not None, reason
    return model, target


def test_a_feature_of_deepseek_v4_is_the_mean_of_its_streams():
    model, target = tiny("deepseek_v4")
    inputs = []
    handle = target.layers[2].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    out = target.forward(IDS, (2,))
    handle.remove()
    (streams,) = inputs
    assert streams.shape == (2, 5, model.config.hc_mult, model.config.hidden_size)
    assert not torch.allclose(streams[:, :, 0], streams[:, :, 1])
    torch.testing.assert_close(out.features, streams.mean(2))


@pytest.mark.thorough
def test_a_head_for_deepseek_v4_drafts_without_changing_the_text():
    model, target = tiny("deepseek_v4")
    drafter = make_drafter(target).eval()
    prompt = IDS[:1]
    plain = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
    response = generate(
        target, drafter, prompt[0].tolist(), max_new_tokens=16, spec=TreeSpec.parse("chain:3")
    )
    assert response.tokens == plain.tolist()


def test_streams_that_no_engine_hands_out_are_refused():
    _, target = tiny("gemma3n_text")
    with pytest.raises(
        UserError, match=r"feature layer 1 of this target holds states of shape \[\d, 2, 5, \d+\]"
    ):
        target.forward(IDS, (1,))
    # Decoding without features works, with packed weights too.
    before = target.forward(IDS, ()).last_hidden
    torch.testing.assert_close(target.pack().forward(IDS, ()).last_hidden, before)
