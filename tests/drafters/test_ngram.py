"""Drafting by n-grams of the text; tests/drafters/test_suffix.py tests what drafting by suffixes does as well."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.errors import UserError
from tests.drafters.helpers import paths


def session_after(tokens: list[int], **sizes):
    ids = torch.tensor(tokens)
    session = NgramDrafter(**sizes).start(ids[:-1], 100)
    session.extend(ids[1:], torch.empty(len(tokens) - 1, 0))
    return session


def propose(tokens, spec, **sizes):
    return session_after(tokens, **sizes).propose(TreeSpec.parse(spec))


def test_trees_branch_into_other_continuations():
    tokens = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 8, 8, 1, 2]
    for spec, found in (
        ("dynamic:2,4,6", {(8,), (8, 8), (5,), (5, 7), (5, 6)}),
        ("fanout:2x1", {(8,), (8, 8), (5,), (5, 7)}),
        ("dynamic:2,4,3", {(8,), (8, 8), (5,)}),
    ):
        assert paths(propose(tokens, spec, min_n=2)) == found


def test_committed_tokens_extend_the_index():
    session = session_after([1, 2, 3, 4])
    session.extend(torch.tensor([1, 2]), torch.empty(2, 0))
    assert session.propose(TreeSpec.parse("chain:2")).tokens.tolist() == [3, 4]


def test_a_sequence_learns_how_far_its_matches_can_be_trusted():
    trusted = session_after([1, 2, 3, 4] * 2)
    fooled = session_after([1, 2, 3, 4] * 2)
    features = torch.empty(12, 0)
    trusted.extend(torch.tensor([1, 2, 3, 4] * 3), features)
    fooled.extend(torch.tensor([1, 9, 3, 8, 1, 7, 3, 6, 1, 5, 3, 9]), features)
    spec = TreeSpec.parse("chain:1")
    before, sure, unsure = (
        s.propose(spec).log_probs.exp().item() for s in (session_after([1, 2, 1]), trusted, fooled)
    )
    assert before == pytest.approx(1 / 3)  # a match of one token, about which nothing is known yet
    assert unsure < before < 0.8 < sure < 1


def test_probabilities_never_rise_along_a_path_and_siblings_share_one():
    tree = session_after([1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 8, 8, 1, 2], min_n=2).propose(
        TreeSpec.parse("dynamic:2,4,6")
    )
    chances = tree.log_probs.exp().tolist()
    for node, parent in enumerate(tree.parents):
        siblings = [chances[i] for i in range(len(tree)) if tree.parents[i] == parent]
        assert sum(siblings) <= (chances[parent] if parent >= 0 else 1.0)
        assert parent < 0 or chances[node] < chances[parent]


def test_a_chain_stops_where_the_spec_says():
    assert len(propose([7, 1, 2, 1, 2], "chain:5@stop=0.25", min_n=2)) == 2


def test_bad_lengths_are_named():
    with pytest.raises(UserError, match="min_n=3, max_n=2"):
        NgramDrafter(max_n=2, min_n=3)
