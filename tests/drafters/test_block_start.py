"""The closed-form start of blocks: that attention finds the two places it is meant to find, and that it helps."""

from __future__ import annotations

import pytest
import torch

from drafttrain.batch import anchors_by_depth
from drafttrain.drafters.common.starts import block_start, unit
from drafttrain.drafters.dflash.model import DFlash
from drafttrain.drafters.dflash2.model import DFlash2
from drafttrain.drafters.dspark.model import DSpark
from tests.conftest import make_target
from tests.drafters.block_kinds import make_drafter
from tests.drafters.helpers import make_batch, run_step, source_of


def lifelike_target():
    """Embeddings and features with a mean, as trained models have."""
    target = make_target(hidden=32)
    target.model.get_input_embeddings().weight.data += torch.linspace(-0.3, 0.3, 32)
    return target


@pytest.mark.thorough
@pytest.mark.parametrize("mask", [None, 299])
def test_the_block_computes_the_map_it_was_given(mask):
    target = lifelike_target()
    shape = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}  # both maps in full
    drafter = make_drafter(DFlash, target, torch.arange(300), mask_token_id=mask, **shape)
    batches = [make_batch((60, 50), seed=seed) for seed in range(12)]
    source = source_of(target, drafter)
    explained = block_start(drafter, batches, source)
    assert 0.1 < explained <= 1.0
    reads = []
    readout = drafter.readout_of_blocks
    drafter.readout_of_blocks = lambda *args: reads.append(args[0]) or readout(*args)
    run_step(drafter, target, batches[0])
    _, rows, row_of = source(batches[0])
    anchors = anchors_by_depth(batches[0].response_mask, 1)[0]
    wanted = unit(rows.hidden[row_of.flatten()[anchors + 1]])
    _, live, _ = drafter.draw(batches[0].response_mask, 1)
    first = live.nonzero()[:, 1] == 0
    likeness = (unit(reads[0][first]) * wanted).mean()
    assert likeness > 0.85 * explained**0.5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DFlash, {}),
        (DSpark, {"num_key_value_heads": 1}),
        (DFlash2, {"num_hidden_layers": 3, "head_dim": 4}),
    ],
)
def test_the_start_beats_copied_weights_and_every_parameter_still_learns(kind, options):
    target = lifelike_target()
    drafter = make_drafter(kind, target, **options)
    batches = [make_batch((60, 50), seed=seed) for seed in range(8)]
    before = run_step(drafter, target, batches[0])
    drafter.solve_start(batches, source_of(target, drafter))
    step = run_step(drafter, target, batches[0])
    assert step.loss < before.loss
    assert step.metrics["alpha"][0] > before.metrics["alpha"][0]
    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.01)
    for _ in range(3):  # what starts silent wakes up within two steps
        optimizer.zero_grad()
        run_step(drafter, target, batches[0]).loss.backward()
        optimizer.step()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, name
