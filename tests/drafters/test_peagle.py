"""P-EAGLE: the contract, one pass for all depths, and what masked positions know."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.peagle.model import PEagleConfig
from drafttrain.errors import UserError
from tests.conftest import make_target
from tests.drafters.eagle3_options import EVERYTHING
from tests.drafters.helpers import make_batch
from tests.drafters.layer_kinds import (
    check_closed_form_start,
    check_packed_rows,
    check_parity,
    make_kind,
)

KEPT = torch.arange(40, 240)


@pytest.mark.parametrize(
    "options", [{}, {"num_hidden_layers": 2}, EVERYTHING], ids=["plain", "layers", "everything"]
)
def test_both_halves_are_one_forward(target, options):
    check_parity(lambda: make_kind("peagle", target, KEPT, shake=True, **options), target)


def test_packed_rows(target):
    check_packed_rows(make_kind("peagle", target, KEPT, shake=True), target)


def test_all_depths_of_all_sessions_come_from_one_step(target):
    """As many masks per session as a tree has depths below its root."""
    drafter = make_kind("peagle", target, KEPT, shake=True)
    prefix = make_batch((9,)).input_ids[0]
    features = target.forward(prefix[None], drafter.feature_layers).features[0]
    sessions = [drafter.start(prefix[:-1], 32) for _ in range(3)]
    for session, end in zip(sessions, (9, 7, 8), strict=True):
        session.extend(prefix[1:end], features[: end - 1])
    calls = []
    step = drafter.step
    drafter.step = lambda *args: calls.append(len(args[0])) or step(*args)
    spec = TreeSpec.parse("dynamic:5,2,7")
    trees = drafter.propose_all(sessions, spec, [None] * 3)
    assert calls == [3 * 4] and [len(tree) for tree in trees] == [7, 7, 7]
    alone = [session.propose(spec) for session in sessions]
    for together, single in zip(trees, alone, strict=True):
        assert torch.equal(together.tokens, single.tokens) and together.parents == single.parents


def test_later_depths_do_not_know_the_drafted_tokens(target):
    """Other tokens on the path leave a depth's loss as it was, but for the target's own opinion of them."""
    drafter = make_kind("peagle", target, KEPT, shake=True)
    prefix = make_batch((9,)).input_ids[0]
    features = target.forward(prefix[None], drafter.feature_layers).features[0]
    session = drafter.start(prefix[:-1], 32)
    session.extend(prefix[1:], features[:-1])
    tree = session.propose(TreeSpec.parse("fanout:3x2"))
    below = [
        [tree.tokens[i].item() for i, p in enumerate(tree.parents) if p == parent]
        for parent in range(3)
    ]
    assert below[0] == below[1] == below[2]


@pytest.mark.thorough
def test_the_closed_form_start_beats_copied_weights():
    target = make_target(hidden=32)
    check_closed_form_start(make_kind("peagle", target), target, depths=1)


def test_the_mask_is_a_token_of_the_target(target):
    assert PEagleConfig.for_target(target).mask_token_id == target.tokenizer.pad_token_id
    with pytest.raises(
        UserError, match="mask_token_id=300 is not a token of 'tiny', which has 300"
    ):
        PEagleConfig.for_target(target, mask_token_id=300)
    with pytest.raises(UserError, match="ttt_steps=1: the first depth reads no mask"):
        PEagleConfig.for_target(target, ttt_steps=1)
