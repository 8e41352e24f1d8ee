"""Training steps of every kind on a pretend GPU: the CPU's loss and gradients, and no more waits than the table allows."""

from __future__ import annotations

import pytest
import torch

from tests.drafters import contract
from tests.gpu.count import budgets, drafter_of, moved, moved_target, training_batch, training_step
from tests.gpu.pretend import PretendGpu

# Gradients in bfloat16 products differ from float32's by a few units of their last place (2^-8), summed over depths.
TOLERANCE = {False: 2e-5, True: 8e-2}


def gradients(drafter):
    return {
        name: x.grad.cpu().float() for name, x in drafter.named_parameters() if x.grad is not None
    }


def compare(kind, gpu_options, autocasts):
    drafter = drafter_of(kind).train()
    batch = training_batch()
    wanted = training_step(drafter, contract.the_target(), batch)
    want = gradients(drafter)
    drafter.zero_grad()
    with PretendGpu(**gpu_options) as gpu:
        target = moved_target()
        batch = batch.to(torch.device("cuda:0"))
        for autocast in autocasts:
            on_gpu = moved(drafter, target).train()
            gpu.reset()
            step = training_step(on_gpu, target, batch, autocast)
            syncs = sum(gpu.syncs.values())
            assert syncs <= budgets()["training"][kind], gpu.syncs
            got = gradients(on_gpu)
            assert got.keys() == want.keys()
            torch.testing.assert_close(
                step.loss.cpu(), wanted.loss, rtol=TOLERANCE[autocast], atol=0
            )
            for name, value in want.items():
                assert (got[name] - value).norm() <= TOLERANCE[autocast] * value.norm() + 1e-7, (
                    name,
                    autocast,
                )
            for (
                name,
                value,
            ) in wanted.metrics.items():  # sums: in bfloat16 a few anchors may agree otherwise
                torch.testing.assert_close(
                    step.metrics[name].cpu(),
                    value,
                    rtol=0.05 if autocast else 1e-4,
                    atol=1e-3 + 2 * autocast,
                )


@pytest.mark.thorough
def test_a_step_has_the_cpus_loss_and_gradients():
    compare("eagle1", {}, (True,))


@pytest.mark.slow
@pytest.mark.parametrize("kind", contract.TRAINED)
def test_a_step_of_every_kind_has_the_cpus_loss_and_gradients(kind):
    compare(kind, {}, (False, True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_the_fused_loss_in_tritons_interpreter_has_the_cpus_gradients(kind):
    compare(kind, {"interpret": True}, (False, True))
