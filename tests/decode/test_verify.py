from __future__ import annotations

import pytest
import torch

from drafttrain.batch import TokenTree
from drafttrain.decode.verify import verify_greedy, verify_sampled
from drafttrain.ops.sampling import SamplingParams

#      root
#     /    \
#    3      5        nodes 0, 1
#   / \     |
#  7   3    7        nodes 2, 3, 4
TREE = TokenTree(torch.tensor([3, 5, 7, 3, 7]), [-1, -1, 0, 0, 1])


def choosing(*tokens):
    logits = torch.zeros(len(tokens), 10)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 50.0
    return logits


@pytest.mark.parametrize(
    ("choices", "path", "tokens"),
    [
        ((9, 1, 1, 1, 1, 1), [], [9]),  # never accepted
        ((7, 1, 1, 1, 1, 1), [], [7]),  # a grandchild's token is no child's
        ((3, 9, 1, 1, 1, 1), [0], [3, 9]),
        ((5, 9, 7, 1, 1, 2), [1, 4], [5, 7, 2]),  # all of the second branch
        ((3, 3, 1, 1, 8, 1), [0, 3], [3, 3, 8]),
    ],
)
def test_walks_the_targets_choices(choices, path, tokens):
    for verdict in (
        verify_greedy(TREE, choosing(*choices), ()),
        verify_sampled(TREE, choosing(*choices), (), SamplingParams(1.0), torch.Generator()),
    ):
        assert (verdict.path, verdict.tokens, verdict.ended) == (path, tokens, False)


def test_eos_inside_the_path_cuts_it_and_there_is_no_bonus():
    verdict = verify_greedy(TREE, choosing(3, 7, 1, 1, 1, 1), {3})
    assert (verdict.path, verdict.tokens, verdict.ended) == ([0], [3], True)


def test_eos_as_bonus_ends():
    verdict = verify_greedy(TREE, choosing(3, 9, 1, 1, 1, 1), {9})
    assert (verdict.path, verdict.tokens, verdict.ended) == ([0], [3, 9], True)


def test_an_empty_tree_is_a_plain_step():
    verdict = verify_greedy(TokenTree.empty(), choosing(4), {9})
    assert (verdict.path, verdict.tokens, verdict.ended) == ([], [4], False)
