"""`later_depths_from`: until that share of the training a step is one of the first depth alone."""

from __future__ import annotations

import pytest
import torch

from tests.drafters.helpers import make_batch, run_step
from tests.drafters.layer_kinds import make_kind

KINDS = {
    "eagle3": {"ttt_steps": 3, "depth_share": 0.5},
    "eagle1": {"ttt_steps": 2, "feature_noise": 0.0, "regression": 0.0, "token_weight": 1.0},
    "mtp": {"modules": 2, "ttt_steps": 3},
    "peagle": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_early_steps_train_the_first_depth_alone(target, kind):
    drafter = make_kind(
        kind, target, torch.arange(40, 240), later_depths_from=0.5, **KINDS[kind]
    ).train()
    batch = make_batch((30, 25))

    def step(progress: float):
        drafter.zero_grad()
        drafter.progress = progress
        return run_step(drafter, target, batch)

    late = step(0.5)
    early = step(0.4)
    early.loss.backward()
    assert (late.metrics["count"] > 0).all()
    assert early.metrics["count"].tolist() == [
        late.metrics["count"][0],
        *[0] * (drafter.config.ttt_steps - 1),
    ]
    torch.testing.assert_close(early.loss * early.metrics["count"][0], early.metrics["loss"][0])
    assert all(
        parameter.grad is not None for parameter in drafter.parameters()
    )  # DDP waits for each
    drafter.eval()
    assert (step(0.0).metrics["count"] > 0).all()  # held-out acceptance is of all depths
