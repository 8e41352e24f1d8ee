"""Combined drafting: the union of trees, and that the budget holds."""

from __future__ import annotations

import pytest
import torch

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.combined import CombinedDrafter, alone, match_spec, merge
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.drafters.registry import load_drafter
from drafttrain.inference import generate
from tests.drafters.helpers import make_batch, make_drafter, paths


def test_merging_unites_paths_and_shares_beginnings():
    first = TokenTree(torch.tensor([5, 6, 7]), [-1, 0, -1], torch.tensor([0.5, 0.3, 0.2]).log())
    second = TokenTree(torch.tensor([5, 8, 9]), [-1, 0, 1], torch.tensor([0.6, 0.4, 0.1]).log())
    both = merge(first, second, 9)
    assert paths(both) == paths(first) | paths(second)
    assert len(both) == 5 and all(parent < node for node, parent in enumerate(both.parents))
    assert both.log_probs.exp().tolist() == pytest.approx([0.6, 0.3, 0.2, 0.4, 0.1])
    assert both.matched == {3, 4}  # node 0 is in both trees
    assert both.part([0, 2, 3]).matched == {2} and both.with_probes([5, 9], [-1, 0], 9)[
        0
    ].matched == {3, 4}


def test_the_likeliest_nodes_of_both_trees_share_the_budget():
    first = TokenTree(torch.tensor([5, 6, 7]), [-1, 0, -1], torch.tensor([0.5, 0.3, 0.2]).log())
    second = TokenTree(torch.tensor([5, 8, 9]), [-1, 0, 1], torch.tensor([0.6, 0.4, 0.1]).log())
    merged = merge(first, second, 3)
    assert paths(merged) == {(5,), (5, 6), (5, 8)} and merged.matched == {2}
    assert alone(second, TreeSpec.parse("dynamic:2,2,3")).matched == {0, 1, 2}


class Fixed(Drafter):
    """A drafter whose every session proposes the same tree; counts how often it is asked."""

    def __init__(self, tree: TokenTree):
        self.tree = tree
        self.kind = "fixed"
        self.feature_layers = ()
        self.asked = 0

    def start(self, prompt_ids, max_length):
        return None

    def propose_all(self, sessions, spec, samplers):
        self.asked += len(sessions)
        return [self.tree] * len(sessions)


@pytest.mark.parametrize(
    ("chance", "text", "asked", "want"),
    [
        (0.9, "dynamic:2,2,4", 0, {(1,), (1, 2)}),  # a sure match is drafted alone
        (0.9, "dynamic:1,2,1@match=2", 0, {(1,), (1, 2)}),
        (0.6, "dynamic:1,2,1@match=2", 1, {(1,)}),
        (0.6, "dynamic:2,2,4", 1, {(1,), (1, 2), (5,)}),
        (0.6, "chain:2", 0, {(1,), (1, 2)}),
        (0.4, "chain:2", 1, {(5,)}),  # no room for both
        (0.6, "fanout:2x1@sample", 0, {(1,), (1, 2)}),
    ],
)
def test_the_likelihood_of_a_match_decides_who_drafts(chance, text, asked, want):
    main = Fixed(TokenTree(torch.tensor([5]), [-1], torch.tensor([0.3]).log()))
    side = Fixed(TokenTree(torch.tensor([1, 2]), [-1, 0], torch.tensor([chance, chance / 2]).log()))
    drafter = CombinedDrafter(main, side)
    session = drafter.start(torch.tensor([1]), 9)
    tree = drafter.propose_all([session], TreeSpec.parse(text), [None])[0]
    assert (main.asked, paths(tree)) == (asked, want)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("dynamic:2,2,2", 2),
        ("dynamic:2,2,2@match=9", 4),
        ("dynamic:2,2,4", 4),
        ("chain:6@match=9", 6),
    ],
)
def test_beyond_the_trees_size_a_match_keeps_what_is_likely(text, kept):
    chances = torch.tensor([0.9, 0.8, 0.5, 0.2, 0.09, 0.05, 0.04])
    match = TokenTree(torch.arange(7), list(range(-1, 6)), chances.log())
    spec = TreeSpec.parse(text)
    found = alone(match.part(list(range(min(7, match_spec(spec).budget)))), spec)
    assert found.tokens.tolist() == list(range(kept)) and found.parents == list(range(-1, kept - 1))


@pytest.mark.thorough
def test_combined_drafting_keeps_the_budget_and_the_output(target):
    drafter = CombinedDrafter(make_drafter(target), NgramDrafter(min_n=2))
    prompt = make_batch((9,)).input_ids[0].repeat(3)
    plain = generate(target, None, prompt, max_new_tokens=40, eos_ids=()).tokens
    for text in ("dynamic:4,3,8", "dynamic:2,2,2@match=11", "chain:3", "fanout:2x2", "chain:1"):
        spec = TreeSpec.parse(text)
        assert (
            generate(target, drafter, prompt, max_new_tokens=40, spec=spec, eos_ids=()).tokens
            == plain
        )
        session = drafter.start(prompt, 100)
        features = target.forward(prompt[None], drafter.feature_layers).features[0]
        session.extend(prompt[1:], features[:-1])
        assert 0 < len(session.propose(spec)) <= spec.most


def test_a_sum_of_names_loads_both(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path)
    drafter = load_drafter(f"{tmp_path}+ngram", target)
    assert isinstance(drafter, CombinedDrafter) and drafter.kind == "eagle3+ngram"
