from __future__ import annotations

import torch

from drafttrain.batch import Proposal, TokenTree


def test_pruning_keeps_a_well_formed_tree():
    proposal = Proposal(torch.rand(4, 6), [0, 1, 2, 0, -1, 3])
    tree = TokenTree(torch.arange(6), [-1, 0, 1, -1, 3, 2], torch.arange(6.0), proposal)
    assert tree.prune(9) is tree
    cut = tree.prune(2)
    assert (cut.tokens.tolist(), cut.parents, cut.log_probs.tolist()) == ([0, 1, 3, 4], [-1, 0, -1, 2], [0, 1, 3, 4])
    assert cut.proposal.rows == [0, 1, 0, -1] and cut.proposal.probs is proposal.probs
    assert len(tree.prune(0)) == 0
