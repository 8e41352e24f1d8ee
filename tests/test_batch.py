from __future__ import annotations

import torch

from drafttrain.batch import Proposal, TokenTree


def test_pruning_keeps_a_well_formed_tree():
    proposal = Proposal(torch.rand(4, 6), [0, 1, 2, 0, -1, 3])
    tree = TokenTree(torch.arange(6), [-1, 0, 1, -1, 3, 2], torch.arange(6.0), proposal)
    assert tree.prune(9) is tree
    cut = tree.prune(2)
    assert (cut.tokens.tolist(), cut.parents, cut.log_probs.tolist()) == (
        [0, 1, 3, 4],
        [-1, 0, -1, 2],
        [0, 1, 3, 4],
    )
    assert cut.proposal.rows == [0, 1, 0, -1] and cut.proposal.probs is proposal.probs
    assert len(tree.prune(0)) == 0


def test_probes_share_what_is_drafted_and_are_no_drafts():
    tree = TokenTree(torch.tensor([4, 5, 6]), [-1, 0, 0], torch.tensor([0.6, 0.3, 0.2]).log())
    whole, nodes = tree.with_probes([4, 7, 5, 8, 9], [-1, 0, 0, 2, 1], depth=2)
    assert (
        whole.tokens.tolist() == [4, 5, 6, 7]
        and whole.parents == [-1, 0, 0, 0]
        and whole.probes == 1
    )
    assert nodes == [0, 3, 1, -1, -1]  # two lie deeper
    deep, _ = tree.with_probes([7, 8, 9], [-1, 0, 1], depth=9)
    assert deep.drafted_depth == 2 and max(deep.depths) == 3 and len(deep.drafts()) == 3
    assert deep.prune(2).probes == 2 and deep.part([0, 1, 2]).probes == 0


def test_best_nodes_form_a_tree_and_prefer_the_first_of_equals():
    scores = [-1.0, -0.5, -1.0, -0.5, -2.0, -1.0]
    assert TokenTree.best_nodes(scores, 3) == [0, 1, 3]
    assert TokenTree.best_nodes(scores, 9) == list(range(6))
    assert TokenTree.best_nodes([], 3) == TokenTree.best_nodes(scores, 0) == []
    tree = TokenTree.likeliest(
        3, [4, 5, 6, 7], [-1, 0, -1, 2], [-0.5, -3.0, -1.0, -1.0], torch.device("cpu")
    )
    assert (tree.tokens.tolist(), tree.parents, tree.log_probs.tolist()) == (
        [4, 6, 7],
        [-1, -1, 1],
        [-0.5, -1, -1],
    )
