"""EAGLE-1: the contract in its own options, the frozen head, the regression and the noise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from drafttrain.batch import anchors_by_depth
from drafttrain.errors import UserError
from drafttrain.losses import StoredTopK
from tests.conftest import make_target
from tests.drafters.helpers import make_batch, run_step
from tests.drafters.layer_kinds import (
    check_closed_form_start,
    check_packed_rows,
    check_parity,
    make_kind,
)

KEPT = torch.arange(40, 240)
EVERYTHING = {"num_hidden_layers": 2, "qk_norm": True, "attention_bias": True, "sliding_window": 6}


@pytest.mark.thorough
@pytest.mark.parametrize("kept", [KEPT, None], ids=["pruned", "whole"])
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_both_halves_are_one_forward(target, kept, options):
    check_parity(
        lambda: make_kind("eagle1", target, kept, shake=True, ttt_steps=4, **options), target
    )


def test_packed_rows(target):
    check_packed_rows(make_kind("eagle1", target, KEPT, shake=True, ttt_steps=2), target)


def test_the_loss_is_regression_and_divergence(target):
    weights = {"regression": 0.7, "token_weight": 0.3}
    drafter = make_kind("eagle1", target, KEPT, shake=True, **weights)
    batch = make_batch()
    states = []
    step = drafter.step
    drafter.step = lambda *args: states.append(step(*args)) or states[-1]
    out = run_step(drafter, target, batch)
    anchors = anchors_by_depth(batch.response_mask, 1)[0]
    truth = target.forward(batch.input_ids, ()).last_hidden.flatten(0, 1)[anchors + 1]
    distance = F.smooth_l1_loss(states[0], truth, reduction="none").mean(-1).mean()
    divergence = out.metrics["loss"][0] / out.metrics["count"][0]
    torch.testing.assert_close(out.loss, 0.7 * distance + 0.3 * divergence, rtol=1e-4, atol=1e-5)


def test_noise_follows_the_length_of_each_conversation(target):
    drafter = make_kind("eagle1", target, feature_noise=0.25)
    batch = make_batch((41, 17))
    features = torch.zeros(40 + 16, target.hidden_size)
    noise = drafter.first_state(features, batch).abs()
    for part, length in ((noise[:40], 41), (noise[40:], 17)):
        bound = 0.25 * 512 / length
        assert 0.95 * bound < part.max() <= bound
    assert torch.equal(drafter.eval().first_state(features, batch), features)


def test_the_head_is_the_targets_scaled_as_the_target_scales_it():
    target = make_target()
    target.logit_scale = 0.5
    for kept in (KEPT, torch.arange(target.vocab_size)):
        drafter = make_kind("eagle1", target, kept)
        assert not [name for name in drafter.state_dict() if "head" in name or "embed" in name]
        state = torch.randn(3, target.hidden_size)
        torch.testing.assert_close(drafter.logits(state), target.head(state)[:, kept])
        torch.testing.assert_close(
            F.linear(state, drafter.head.weight), target.head(state)[:, kept]
        )


@pytest.mark.thorough
def test_the_closed_form_start_explains_states_and_beats_copied_weights():
    target = make_target(hidden=32)
    drafter = make_kind("eagle1", target, feature_noise=0.0)
    check_closed_form_start(drafter, target)


def test_what_cannot_work_is_said(target):
    drafter = make_kind("eagle1", target)
    rows = StoredTopK(*(torch.zeros(1, 1) for _ in range(2)), torch.zeros(1), torch.zeros(1))
    with pytest.raises(
        UserError, match=r"regression=1.0: the data's features hold likeliest tokens but no states"
    ):
        drafter.other_loss(
            torch.zeros(1, 32), rows, torch.zeros(1, dtype=torch.long), torch.ones(1)
        )
    target.softcap = 30.0
    with pytest.raises(UserError, match="caps its logits"):
        drafter.bind(target)
