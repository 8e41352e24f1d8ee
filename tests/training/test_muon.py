"""Muon for a drafter's matrices: which weights it steps, how, and what a checkpoint keeps of it."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch

from drafttrain.config import TrainConfig
from drafttrain.errors import UserError
from drafttrain.training.acceleration import optimizer_of
from drafttrain.training.arguments import training_arguments
from drafttrain.tuning.plan_memory import Memory
from tests.drafters.helpers import make_drafter
from tests.tuning.settings import SETTING

RATE = 0.02


def arguments_of(tmp_path, feature_rates=False, **keys):
    """TrainingArguments of a recipe with these keys."""
    recipe = TrainConfig(
        target="t",
        data="d",
        output_dir=str(tmp_path / "run"),
        feature_rates=feature_rates,
        trainer={"use_cpu": True, "learning_rate": RATE, "weight_decay": 0.0, **keys},
    )
    return training_arguments(recipe)


def trained(target, tmp_path, **keys):
    """A drafter and its optimizer, with a gradient on every trained weight."""
    drafter = make_drafter(target)
    optimizer = optimizer_of(drafter, arguments_of(tmp_path, **keys), None)
    generator = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    return drafter, optimizer


def test_a_plan_counts_the_states_that_training_holds(target, tmp_path):
    _, optimizer = trained(target, tmp_path, optim="muon")
    optimizer.step()
    held = sum(
        value.nbytes
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    )
    memory = Memory(target.model.config, "kl", make_drafter)
    setting = replace(SETTING, rows=1, length=16, prompt=2, muon=True)
    assert memory.parts(setting)["optimizer"] == held


def test_matrices_are_stepped_alike_in_all_directions_and_other_weights_as_by_adamw(
    target, tmp_path
):
    drafter, muon = trained(target, tmp_path, optim="muon")
    same, adamw = trained(target, tmp_path, optim="adamw_torch")
    before = copy.deepcopy(drafter.state_dict())
    muon.step()
    adamw.step()
    after = drafter.state_dict()
    others = same.state_dict()

    step = after["fc.weight"] - before["fc.weight"]
    sizes = torch.linalg.svdvals(step)
    # Five Newton-Schulz iterations bring singular values near one, not to it.
    assert sizes.max() < 2.5 * sizes.min()
    gradient = torch.linalg.svdvals(drafter.fc.weight.grad)
    assert gradient.max() > 5 * gradient.min()
    # As large as AdamW's steps, so that one learning rate serves both.
    assert 0.1 * RATE < step.square().mean().sqrt() < RATE
    for name in ("norm.weight", "lm_head.weight"):
        assert torch.equal(after[name], others[name])
    assert not torch.equal(after["fc.weight"], others["fc.weight"])


def test_a_restored_optimizer_goes_on_as_the_old_one(target, tmp_path):
    drafter, optimizer = trained(target, tmp_path, optim="muon")
    optimizer.step()
    again, restored = trained(target, tmp_path, optim="muon")
    again.load_state_dict(drafter.state_dict())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in (*optimizer.param_groups, *restored.param_groups):
        group["lr"] = RATE / 2  # what a schedule changes counts for both parts
    optimizer.step()
    restored.step()
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "optim='muon' steps whole matrices"),
        ({"optim_args": "a=1"}, "optim_args='a=1': optim='muon' has no such options"),
        ({"feature_rates": True}, "feature_rates=true: Muon makes the steps"),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path, keys, said):
    with pytest.raises(UserError, match=re.escape(said)):
        arguments_of(tmp_path, optim="muon", **keys)
