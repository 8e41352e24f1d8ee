"""Options by which drafters hold beyond the length that they were trained at: windows and positions further behind."""

from __future__ import annotations

import pytest
import torch

from drafttrain.batch import Part
from drafttrain.drafters.common.layers import moved
from tests.drafters.helpers import make_batch, run_step
from tests.drafters.layer_kinds import check_parity, make_kind

LAYERED = ["eagle3", "eagle1", "peagle", "mtp"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", LAYERED)
def test_training_and_decoding_see_the_same_window(target, kind):
    check_parity(lambda: make_kind(kind, target, shake=True, ttt_steps=4, sliding_window=6), target)


def test_positions_move_together_and_the_first_four_stay():
    place = torch.cat([torch.arange(n) for n in (40, 3, 25)])
    part = Part(68)
    assert torch.equal(moved(place, 0, part), place)
    offsets = set()
    for _ in range(20):
        long, short, other = (moved(place, 3000, part) - place).split((40, 3, 25))
        assert not long[:4].any() and not short.any() and not other[:4].any()
        assert len(long[4:].unique()) == len(other[4:].unique()) == 1
        offsets |= {int(long[4]), int(other[4])}
    assert len(offsets) > 30 and min(offsets) >= 0 and 1500 < max(offsets) <= 3000


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_distances_to_the_first_tokens_are_all_that_an_offset_changes(target, kind):
    """A window without the first tokens hides them, and rotary embedding sees distances only."""
    options = {"eagle3": {"ttt_steps": 2}, "dflash": {"block_size": 3}}[kind]
    batch = make_batch((40,), start=20)
    losses = {}
    for window in (0, 8):
        for offset in (0, 500):
            drafter = make_kind(
                kind, target, sliding_window=window, position_offset=offset, **options
            )
            torch.manual_seed(0)
            losses[window, offset] = run_step(drafter.train(), target, batch).loss
    torch.testing.assert_close(losses[8, 0], losses[8, 500], rtol=1e-4, atol=1e-5)
    assert abs(losses[0, 0] - losses[0, 500]) > 1e-4
