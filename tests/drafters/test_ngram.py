from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.errors import UserError
from tests.drafters.helpers import check_tree


def session_after(tokens: list[int], **sizes):
    ids = torch.tensor(tokens)
    session = NgramDrafter(**sizes).start(ids[:-1], 100)
    session.extend(ids[1:], torch.empty(len(tokens) - 1, 0))
    return session


def paths(tree):
    """Each leaf's tokens from the root."""
    tokens = tree.tokens.tolist()
    ways = []
    for i, parent in enumerate(tree.parents):
        ways.append([*(ways[parent] if parent >= 0 else []), tokens[i]])
    return [way for i, way in enumerate(ways) if i not in tree.parents]


def propose(tokens, spec, **sizes):
    return paths(session_after(tokens, **sizes).propose(TreeSpec.parse(spec)))


def test_longest_suffix_goes_before_a_more_recent_short_one():
    assert propose([1, 2, 3, 4, 9, 3, 7, 1, 2, 3], "chain:2") == [[4, 9]]


def test_most_recent_of_equal_length():
    assert propose([1, 2, 5, 1, 2, 6, 8, 1, 2], "chain:2") == [[6, 8]]


def test_a_match_that_runs_into_the_end_repeats():
    assert propose([7, 1, 2, 1, 2], "chain:5") == [[1, 2, 1, 2, 1]]


def test_trees_branch_into_other_continuations():
    tokens = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 8, 8, 1, 2]
    assert propose(tokens, "dynamic:2,4,6", min_n=2) == [[8, 8], [5, 7], [5, 6]]
    assert propose(tokens, "fanout:2x1", min_n=2) == [[8, 8], [5, 7]]
    assert propose(tokens, "dynamic:2,4,3", min_n=2) == [[8, 8], [5]]


def test_nothing_seen_before_drafts_nothing():
    assert propose([1, 2, 3, 4], "chain:3") == []
    assert propose([1, 1, 1], "none") == []


def test_committed_tokens_extend_the_index():
    session = session_after([1, 2, 3, 4])
    session.extend(torch.tensor([1, 2]), torch.empty(2, 0))
    assert paths(session.propose(TreeSpec.parse("chain:2"))) == [[3, 4]]


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=2, max_size=60),
    spec=st.sampled_from(["chain:4", "fanout:3x2x2", "dynamic:5,3,11"]),
)
def test_trees_are_well_formed_and_within_the_spec(tokens, spec):
    spec = TreeSpec.parse(spec)
    tree = session_after(tokens).propose(spec)
    check_tree(tree, spec)


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
    assert [len(p) for p in propose([7, 1, 2, 1, 2], "chain:5@stop=0.25", min_n=2)] == [2]


def test_bad_lengths_are_named():
    with pytest.raises(UserError, match="min_n=3, max_n=2"):
        NgramDrafter(max_n=2, min_n=3)
