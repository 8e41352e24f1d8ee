"""Gradient checkpointing: the same loss and gradients for every kind of decoder layers, in float32 and under autocast."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import make_target
from tests.drafters.helpers import make_batch, run_step
from tests.drafters.layer_kinds import make_kind


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.mark.thorough
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle3", {"num_hidden_layers": 2, "ttt_steps": 3}),
        ("eagle1", {"ttt_steps": 3}),
        ("peagle", {}),
        ("mtp", {"ttt_steps": 3}),
        ("dflash", {"block_size": 4}),
        ("dspark", {"block_size": 4}),
        ("dflash2", {"block_size": 4}),
        ("domino", {"block_size": 4, "gru_hidden_dim": 8, "emb_dim": 8}),
    ],
)
def test_layers_that_are_computed_again_give_the_same_gradients(target, kind, options, autocast):
    results = []
    kept = []
    for checkpointing in (False, True):
        drafter = make_kind(kind, target, **options).train()
        if checkpointing:
            drafter.gradient_checkpointing_enable()
        torch.manual_seed(0)
        saved: dict[int, int] = {}

        def note(x: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with (
            torch.autograd.graph.saved_tensors_hooks(note, lambda x: x),
            torch.autocast("cpu", enabled=autocast),
        ):
            step = run_step(drafter, target, make_batch((40, 30)))
        step.loss.backward()
        kept.append(sum(saved.values()))
        results.append(
            (step.loss.detach(), {name: x.grad for name, x in drafter.named_parameters()})
        )
    (loss, grads), (again, others) = results
    assert torch.equal(loss, again) and kept[1] < 0.8 * kept[0], kept
    for name, grad in grads.items():
        assert grad.abs().sum() > 0, name
        # Under autocast the depths' gradients of a weight are added in another order, in bfloat16.
        assert (grad - others[name]).norm() <= (2e-2 if autocast else 1e-5) * grad.norm(), name
