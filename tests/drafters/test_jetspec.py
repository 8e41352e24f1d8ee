"""JetSpec's blocks: causal, of any length, weighed alike; and the tree that is suggested."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.dflash.model import DFlash
from drafttrain.drafters.jetspec.model import JetSpec
from drafttrain.errors import UserError
from tests.conftest import make_target
from tests.drafters.block_kinds import begun, shaken
from tests.drafters.helpers import make_batch, run_step


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.mark.parametrize(("kind", "same"), [(JetSpec, True), (DFlash, False)])
def test_a_shorter_block_drafts_the_same_tokens(target, kind, same):
    """What an engine does that drafts fewer tokens than a block has; DFlash's masks see deeper ones."""
    prefix = make_batch((9,)).input_ids[0]
    drafters = [shaken(kind, target, block_size=size) for size in (6, 3)]
    drafters[1].load_state_dict(drafters[0].state_dict())
    spec = TreeSpec.parse("fanout:3x2")
    trees = [begun(drafter, target, prefix).propose(spec) for drafter in drafters]
    found = torch.allclose(trees[0].log_probs, trees[1].log_probs, rtol=1e-4, atol=1e-5)
    assert found == same


def test_all_depths_weigh_the_same(target):
    drafter = shaken(JetSpec, target)
    step = run_step(drafter, target, make_batch((12, 9)))
    anchors = step.metrics["count"][0]
    wanted = step.metrics["loss"].sum() / drafter.config.depth / anchors
    torch.testing.assert_close(step.loss, wanted)
    other = shaken(JetSpec, target, weighting="exp", gamma=1.0)
    assert (run_step(other, target, make_batch((12, 9))).loss - wanted).abs() > 1e-4


def test_the_suggested_tree_is_a_tree_of_the_blocks_depth(target):
    drafter = shaken(JetSpec, target, tree_nodes=20)
    text = drafter.suggest_tree([], None)
    assert text == "dynamic:4,7,20"
    tree = begun(drafter, target, make_batch((9,)).input_ids[0]).propose(TreeSpec.parse(text))
    assert len(tree) == 20 and max(tree.depths) <= 4
    assert shaken(JetSpec, target, tree_nodes=0).suggest_tree([], None) is None
    assert shaken(JetSpec, target, tree_nodes=3).suggest_tree([], None) == "dynamic:4,3,3"
    with pytest.raises(UserError, match="tree_nodes=1025 must be a whole number from 0 to 1024"):
        shaken(JetSpec, target, tree_nodes=1025)  # no tree has as many
