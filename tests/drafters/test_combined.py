"""Combined drafting: the union of trees, and that the budget holds."""

from __future__ import annotations

import torch

from drafttrain.batch import TokenTree
from drafttrain.decode import generate
from drafttrain.drafters.base import TreeSpec, load_drafter
from drafttrain.drafters.combined import CombinedDrafter, merge
from drafttrain.drafters.ngram import NgramDrafter
from tests.drafters.test_eagle3 import make_batch, make_drafter


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for parent, token in zip(tree.parents, tree.tokens.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def test_merging_unites_paths_and_shares_beginnings():
    first = TokenTree(torch.tensor([5, 6, 7]), [-1, 0, -1])
    second = TokenTree(torch.tensor([5, 8, 9]), [-1, 0, 1])
    both = merge(first, second)
    assert paths(both) == paths(first) | paths(second)
    assert len(both) == 5 and all(parent < node for node, parent in enumerate(both.parents))


def test_combined_drafting_keeps_the_budget_and_the_output(target):
    drafter = CombinedDrafter(make_drafter(target), NgramDrafter(min_n=2))
    prompt = make_batch((9,)).input_ids[0].repeat(3)
    plain = generate(target, None, prompt, max_new_tokens=40, eos_ids=()).tokens
    for text in ("dynamic:4,3,8", "chain:3", "fanout:2x2", "chain:1"):
        spec = TreeSpec.parse(text)
        assert generate(target, drafter, prompt, max_new_tokens=40, spec=spec, eos_ids=()).tokens == plain
        session = drafter.start(prompt, 100)
        features = target.forward(prompt[None], drafter.feature_layers).features[0]
        session.extend(prompt[1:], features[:-1])
        assert 0 < len(session.propose(spec)) <= spec.budget


def test_a_sum_of_names_loads_both(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path)
    drafter = load_drafter(f"{tmp_path}+ngram", target)
    assert isinstance(drafter, CombinedDrafter) and drafter.kind == "eagle3+ngram"
