"""Learning rates by column: the same steps as on inputs of one size, kept by an optimizer's state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from drafttrain.config import load_config
from drafttrain.errors import UserError
from drafttrain.training import arguments, column_rates
from drafttrain.training.column_rates import set_column_rates

SIZES = torch.tensor([0.01, 1.0, 300.0])
INPUTS = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) * SIZES


def setup(recipe: dict[str, object]) -> None:
    config = load_config(recipe, [], arguments.KEYS)
    arguments.check_recipe(config)
    arguments.training_arguments(config)


def fit(
    linear: nn.Linear, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, steps: int
) -> None:
    wanted = (INPUTS / SIZES).sum(1, keepdim=True).expand(-1, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        (linear(inputs) - wanted).square().mean().backward()
        optimizer.step()


def pair() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    linear = nn.Linear(3, 2)
    with torch.no_grad():
        linear.weight.div_(SIZES)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.01, eps=0.0, weight_decay=0.0)
    return linear, optimizer


def test_the_steps_are_those_on_inputs_of_one_size():
    scaled, optimizer = pair()
    set_column_rates(optimizer, scaled.weight, 1 / SIZES)
    fit(scaled, optimizer, INPUTS, 20)
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    fit(
        plain,
        torch.optim.AdamW(plain.parameters(), lr=0.01, eps=0.0, weight_decay=0.0),
        INPUTS / SIZES,
        20,
    )
    torch.testing.assert_close(scaled.weight * SIZES, plain.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scaled.bias, plain.bias, rtol=1e-4, atol=1e-5)


def test_a_restored_optimizer_goes_on_with_the_saved_rates():
    whole, optimizer = pair()
    set_column_rates(optimizer, whole.weight, 1 / SIZES)
    fit(whole, optimizer, INPUTS, 3)
    states = copy.deepcopy((optimizer.state_dict(), whole.state_dict()))
    fit(whole, optimizer, INPUTS, 3)
    resumed, other = pair()
    set_column_rates(
        other, resumed.weight, torch.ones(3)
    )  # as a resumed run, which has solved no start
    other.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    fit(resumed, other, INPUTS, 3)
    assert torch.equal(whole.weight, resumed.weight)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_rates_go_with_the_shipped_files_of_deepspeed(stage):
    recipe = {"target": "t", "data": "d", "output_dir": "o", "feature_rates": True}
    settings = {"deepspeed": f"configs/deepspeed/zero{stage}.json"}
    arguments._check_launch(load_config(recipe, [], []), settings)


def test_flat_shares_of_a_weight_take_the_same_steps(monkeypatch):
    """DeepSpeed's ZeRO: each process steps its share of the flattened weight, with padding."""
    whole, optimizer = pair()
    set_column_rates(optimizer, whole.weight, 1 / SIZES)
    fit(whole, optimizer, INPUTS, 1)
    start, apart = pair()
    fit(start, apart, INPUTS, 1)
    gradient = torch.nn.functional.pad(start.weight.grad.flatten(), (0, 2))
    shares = []
    for rank in range(2):
        monkeypatch.setattr(column_rates.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(column_rates.dist, "get_rank", lambda rank=rank: rank)
        weight = pair()[0].weight
        own = torch.optim.AdamW([weight], lr=0.01, eps=0.0, weight_decay=0.0)
        set_column_rates(own, weight, 1 / SIZES)
        share = torch.nn.functional.pad(weight.detach().flatten(), (0, 2)).chunk(2)[rank].clone()
        share.grad = gradient.chunk(2)[rank].clone()
        own.param_groups[-1]["params"] = [share]
        own.step()
        shares.append(share)
    assert torch.equal(torch.cat(shares)[:6].view(2, 3), whole.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "medusa"}, "kind='medusa' has no weight for them; set it to false"),
        (
            {
                "deepspeed": {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}},
                "use_cpu": True,
            },
            "the optimizer of DeepSpeed's file has one rate for all of a weight",
        ),
    ],
)
def test_rates_that_would_be_ignored_are_refused(options, message):
    recipe = {"target": "t", "data": "d", "output_dir": "o", "feature_rates": True, **options}
    with pytest.raises(UserError, match=message):
        setup(recipe)
