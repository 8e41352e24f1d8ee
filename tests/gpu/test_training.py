"""Training steps of every kind on a GPU: the CPU's loss and gradients. Pretend GPUs also count waits, which a table bounds."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.conftest import has_gpu
from tests.drafters import contract
from tests.gpu.count import budgets, drafter_of, moved, moved_target, training_batch, training_step
from tests.gpu.pretend import PretendGpu

# Gradients in bfloat16 products differ from float32's by a few units of their last place (2^-8), summed over depths.
# A real GPU sums in an order of its own, and its target is wider (contract.the_target).
TOLERANCE = {False: 1e-3, True: 0.2} if has_gpu() else {False: 2e-5, True: 8e-2}


def gradients(drafter):
    return {
        name: x.grad.cpu().float() for name, x in drafter.named_parameters() if x.grad is not None
    }


def compare(kind, autocasts, opened):
    """Loss, gradients and metrics on the CPU in float32 and on a GPU, which `opened` opens.

    A pretend GPU also counts the waits.
    """
    drafter = drafter_of(kind).train()
    if has_gpu() and kind == "eagle1":
        drafter.config.feature_noise = 0.0  # a real GPU draws other numbers
    batch = training_batch()
    wanted = training_step(drafter, contract.the_target(), batch)
    want = gradients(drafter)
    drafter.zero_grad()
    with opened as gpu:
        target = moved_target()
        batch = batch.to(torch.device("cuda:0"))
        for autocast in autocasts:
            on_gpu = moved(drafter, target).train()
            if isinstance(gpu, PretendGpu):
                gpu.reset()
            step = training_step(on_gpu, target, batch, autocast)
            if isinstance(gpu, PretendGpu):
                assert sum(gpu.syncs.values()) <= budgets()["training"][kind], gpu.syncs
            got = gradients(on_gpu)
            assert got.keys() == want.keys()
            torch.testing.assert_close(
                step.loss.cpu(), wanted.loss, rtol=TOLERANCE[autocast], atol=0
            )
            for name, value in want.items():
                off = (got[name] - value).norm()
                assert off <= TOLERANCE[autocast] * value.norm() + 1e-7, (name, autocast)
            for name, value in wanted.metrics.items():
                # Sums: in bfloat16 a few anchors may agree otherwise.
                torch.testing.assert_close(
                    step.metrics[name].cpu(),
                    value,
                    rtol=0.05 if autocast else 5 * TOLERANCE[False],
                    atol=1e-3 + 2 * autocast,
                )


def a_gpu():
    """The machine's own, or a pretend one."""
    return contextlib.nullcontext() if has_gpu() else PretendGpu()


@pytest.mark.thorough
@pytest.mark.any_gpu
def test_a_step_has_the_cpus_loss_and_gradients():
    compare("eagle1", (True,), a_gpu())


@pytest.mark.slow
@pytest.mark.any_gpu
@pytest.mark.parametrize("kind", contract.TRAINED)
def test_a_step_of_every_kind_has_the_cpus_loss_and_gradients(kind):
    compare(kind, (False, True), a_gpu())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_the_fused_loss_in_tritons_interpreter_has_the_cpus_gradients(kind):
    compare(kind, (False, True), PretendGpu(interpret=True))
