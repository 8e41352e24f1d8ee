"""EAGLE-3: masks, gradients, and the parity of training with decoding."""

from __future__ import annotations

import pytest
import torch

from drafttrain.batch import anchors_by_depth
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.eagle3.model import Eagle3
from drafttrain.errors import UserError
from drafttrain.states.source import TargetSource
from tests.drafters.helpers import make_batch, make_drafter, step_inputs


def test_anchors_are_nested_and_end_before_the_response_does():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [1, 1, 0, 1, 1, 1, 1]], dtype=torch.bool)
    first, second, third = anchors_by_depth(mask, 3)
    assert first.tolist() == [1, 2, 3, 7 + 2, 7 + 3, 7 + 4]
    assert second.tolist() == [1, 2, 7 + 2, 7 + 3]
    assert third.tolist() == [1, 7 + 2]


def test_gradients_pass_through_all_depths(target):
    """The gradient along a direction is the slope of the loss, to which later depths contribute through earlier ones."""
    drafter = make_drafter(target, ttt_steps=4, depth_decay=1.0)
    batch = make_batch()
    inputs = step_inputs(drafter, target, batch)
    drafter(inputs).loss.backward()
    weight = drafter.fc.weight
    losses = []
    direction = weight.grad / weight.grad.norm()
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * 1e-2 * direction
            losses.append(drafter(inputs).loss)
            weight -= sign * 1e-2 * direction
    torch.testing.assert_close(
        (losses[0] - losses[1]) / 2e-2, weight.grad.norm(), rtol=1e-2, atol=0
    )


def test_untrained_drafter_starts_from_the_target(target):
    drafter = make_drafter(target)
    assert torch.equal(drafter.lm_head.weight, target.head_weight)
    gemma_like = drafter.midlayer.self_attn.q_proj.weight[:, -target.hidden_size :]
    assert torch.equal(gemma_like, target.layers[-1].self_attn.q_proj.weight)


def test_a_frozen_head_stays_the_targets_and_follows_the_recipe_when_it_is_continued(
    target, tmp_path
):
    kept = torch.arange(0, 300, 2)
    options = {"draft_vocab_size": len(kept), "ttt_steps": 2}
    drafter = Eagle3.begin(
        target, "target", {**options, "train_head": False}, "kl", lambda size: kept
    )
    drafter.bind(target)
    source = TargetSource(target, drafter.feature_layers, kept)
    batch = make_batch()
    drafter(
        StepInputs(batch, target.embed(batch.input_ids), *source(batch), total=1.0)
    ).loss.backward()
    assert drafter.lm_head.weight.grad is None and not drafter.lm_head.weight.requires_grad
    assert torch.equal(drafter.lm_head.weight, target.head_weight[kept].float())
    drafter.save_pretrained(tmp_path)
    for trained in (True, False):
        again = Eagle3.begin(target, str(tmp_path), {"train_head": trained}, "kl")
        assert again.lm_head.weight.requires_grad is trained


@pytest.mark.parametrize("size", [0, 300, 301])
def test_a_drafter_of_all_tokens_is_continued_by_each_spelling_of_their_number(
    target, tmp_path, size
):
    Eagle3.begin(target, "target", {}, "kl").save_pretrained(tmp_path)
    again = Eagle3.begin(target, str(tmp_path), {"draft_vocab_size": size}, "kl")
    assert again.config.draft_vocab_size == target.vocab_size == 300
    with pytest.raises(UserError, match=r"draft_vocab_size=299, but the drafter .* has 300"):
        Eagle3.begin(target, str(tmp_path), {"draft_vocab_size": 299}, "kl")


@pytest.mark.parametrize(
    ("init", "options", "message"),
    [
        ("random", {}, "init='random' does not copy; set init=target"),
        ("target", {"hidden_size": 16}, "init='target' does not copy to another hidden_size"),
    ],
)
def test_a_frozen_head_that_is_not_the_targets_is_refused(target, init, options, message):
    with pytest.raises(UserError, match=message):
        Eagle3.begin(
            target, init, {"train_head": False, **options}, "kl", lambda size: torch.arange(10)
        )
