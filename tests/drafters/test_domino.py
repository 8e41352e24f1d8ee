"""Domino's correction against torch's own GRU, and the share of the block's own loss over a training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from drafttrain.drafters.common.rows import HostPlaces
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.dflash.model import DFlash
from drafttrain.drafters.domino.model import Domino
from tests.conftest import make_target
from tests.drafters.block_kinds import begun, shaken
from tests.drafters.helpers import make_batch, run_step

SIZES = {"gru_hidden_dim": 24, "emb_dim": 12}


@pytest.fixture(scope="module")
def target():
    return make_target()


def published(drafter):
    """The head as publishers build it, with our weights under their names."""
    config = drafter.config
    gru = nn.GRU(config.hidden_size, config.gru_hidden_dim, batch_first=True, bias=False)
    width = config.hidden_size + config.gru_hidden_dim
    project = nn.Sequential(
        nn.Linear(width, config.emb_dim, bias=False),
        nn.SiLU(),
        nn.Linear(config.emb_dim, config.draft_vocab_size, bias=False),
    )
    with torch.no_grad():
        gru.weight_ih_l0.copy_(drafter.gru.reads.weight)
        gru.weight_hh_l0.copy_(drafter.gru.keeps.weight)
        project[0].weight.copy_(drafter.correction_in.weight)
        project[2].weight.copy_(drafter.correction_out.weight)
    return gru, project


@pytest.mark.parametrize("prefix", [0, 1, 2])
@torch.no_grad()
def test_a_node_is_corrected_by_the_whole_path_above_it(target, prefix):
    options = {**SIZES, "pure_draft_prefix_len": prefix}
    drafter = shaken(Domino, target, **options)
    gru, project = published(drafter)
    prompt = make_batch((9,)).input_ids[0]
    spec = TreeSpec.parse("fanout:3x2x2x1")
    tree = begun(drafter, target, prompt).propose(spec)

    # The block's own states and logits, from a DFlash drafter with the same backbone.
    plain = shaken(DFlash, target)
    plain.load_state_dict(drafter.state_dict(), strict=False)
    session = begun(plain, target, prompt)
    first, ask = plain.draft(session.root, HostPlaces([session], 4), None)
    own = [first, *(ask(SimpleNamespace(depth=depth)) for depth in (1, 2, 3))]

    corrections = []
    for node, parent in enumerate(tree.parents):
        path = []
        above = parent
        while above >= 0:
            path.insert(0, int(tree.tokens[above]))
            above = tree.parents[above]
        depth = len(path)
        logits = own[depth].logits[0]
        states, _ = gru(target.embed(torch.tensor([[int(prompt[-1]), *path]])))
        delta = project(torch.cat((own[depth].reads[0], states[0, -1])))
        if depth >= prefix:
            logits = logits + delta
        corrections.append(float(delta.abs().max()))
        wanted = logits.log_softmax(-1)[drafter.kept_ids == tree.tokens[node]]
        if parent >= 0:
            wanted = wanted + tree.log_probs[parent]
        torch.testing.assert_close(tree.log_probs[node], wanted[0], rtol=1e-4, atol=1e-5)
    assert min(corrections) > 1e-2, "a correction that is not there would pass"


def test_training_moves_from_the_blocks_own_loss_to_the_corrected_one(target):
    drafter = shaken(Domino, target, lambda_base_decay_ratio=0.5, **SIZES).train()
    batch = make_batch((12, 9))
    plain = shaken(DFlash, target).train()
    plain.load_state_dict(drafter.state_dict(), strict=False)
    own = run_step(plain, target, batch).loss

    losses = []
    for progress in (0.0, 0.25, 0.5, 1.0):
        drafter.zero_grad()
        drafter.progress = progress
        step = run_step(drafter, target, batch)
        step.loss.backward()
        losses.append(step.loss.detach())
        learns = bool(drafter.correction_out.weight.grad.any())
        assert learns == (progress > 0)
    first, middle, last, end = losses
    torch.testing.assert_close(first, own.detach())
    torch.testing.assert_close(middle, (first + last) / 2)
    torch.testing.assert_close(last, end)
    assert (last - first).abs() > 1e-4
    drafter.progress = 0.0  # a measurement between the steps is of what is drafted
    torch.testing.assert_close(run_step(drafter.eval(), target, batch).loss, last)
