"""Lookahead: the window is the paper's, its n-grams are the target's own, and nothing of it is ever committed by itself."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.lookahead.model import LookaheadDrafter
from drafttrain.drafters.registry import load_drafter
from drafttrain.errors import UserError
from drafttrain.inference import generate, generate_batch
from drafttrain.inference.engine import Decoder
from tests.conftest import make_target
from tests.inference.fakes import MarkovTarget


def nothing(count: int) -> torch.Tensor:
    return torch.empty(count, 0)


def paths(tokens, parents):
    found = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def test_the_window_is_a_tree_whose_columns_become_ngrams():
    session = LookaheadDrafter(window=3, ngram=4).start(torch.tensor([7, 8]), 99)
    session.extend(torch.tensor([8, 9]), nothing(2))
    session.probe()
    session.rows = [[9, 11, 12], [20, 21, 22], [30, 31, 32]]
    tokens, parents = session.probe()
    assert paths(tokens, parents) == [
        [11], [11, 12],
        [20], [20, 30],
        [11, 21], [11, 21, 31],
        [11, 12, 22], [11, 12, 22, 32],
    ]  # fmt: skip
    session.made = 2
    session.observe(
        [0, 1, 2, 3, 40, 5, 41, 7, -1]
    )  # only what follows the ends of columns counts, and one was not asked
    assert session.rows[:2] == [[20, 21, 22], [30, 31, 32]] and session.rows[2][:2] == [40, 41]
    assert (
        list(session.pool[9]) == [(20, 30, 40)]
        and list(session.pool[11]) == [(21, 31, 41)]
        and 12 not in session.pool
    )
    session.extend(torch.tensor([60, 11]), nothing(2))
    assert session.probe()[0][:2] == [21, 22] and session.rows[0][0] == 11
    assert session.propose(TreeSpec.parse("chain:2")).tokens.tolist() == [21, 31]


def test_the_newest_ngrams_stay_and_what_led_astray_loses_probability():
    session = LookaheadDrafter(window=2, ngram=2, guesses=2).start(torch.tensor([1]), 99)
    for last in (5, 6, 7, 6):
        session._keep([1, last])
    assert list(session.pool[1]) == [(7,), (6,)]
    session.extend(torch.tensor([1]), nothing(1))
    before = session.propose(TreeSpec.parse("fanout:2"))
    assert before.tokens.tolist() == [6, 7]
    session.extend(torch.tensor([1]), nothing(1))
    after = session.propose(TreeSpec.parse("fanout:2"))
    assert after.log_probs[0] < before.log_probs[0]


@pytest.mark.parametrize(("window", "ngram"), [(2, 2), (5, 4), (4, 6)])
def test_ngrams_are_the_targets_own(window, ngram):
    """Where the next token depends on the last one only, Jacobi iteration needs no second try: accepted are whole n-grams."""
    target = MarkovTarget(vocab=40, seed=3)
    plain = generate(target, None, [0], max_new_tokens=80).tokens
    spec = TreeSpec.parse(f"chain:{ngram - 1}")
    drafter = LookaheadDrafter(window, ngram)
    got = generate(target, drafter, [0], max_new_tokens=80, spec=spec)
    assert got.tokens == plain
    assert all(accepted <= offered <= ngram - 1 for accepted, offered in got.stats.rounds)
    assert set(got.stats.accepted[-6:-1]) == {ngram - 1}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("lookahead", 3),
        ("lookahead", 24),
        ("ngram+lookahead", 1),
        ("ngram+lookahead", 24),
        ("lookahead:window=3,ngram=3+ngram", 3),
        ("lookahead:window=3,ngram=3+ngram", 24),
    ],
)
def test_probes_reach_no_further_than_the_answer(steady_clock, name, count):
    """The last rounds have no room for the whole window, and the context none for a token more."""
    target = make_target(layers=2, max_position_embeddings=40)
    drafter = load_drafter(name, target)
    prompts = [[5, 6, 5, 6, 5, 6, 5], [9, 3, 1], list(range(16))]
    want = generate_batch(target, None, prompts, max_new_tokens=count, eos_ids=())
    for text in ("dynamic:3,2,6", "chain:3@adapt"):
        spec = TreeSpec.parse(text)
        decoder = Decoder(target, drafter, spec=spec, eos_ids=(), max_rows=2)
        sizes = []
        decoder.observer = lambda row, tree, verdict, logits, sizes=sizes: sizes.append(
            (len(tree), tree.probes)
        )
        made = decoder.generate(prompts, max_new_tokens=count)
        assert [one.tokens for one in made] == [one.tokens for one in want]
        assert all(
            nodes - probes <= spec.budget and probes <= drafter.probes for nodes, probes in sizes
        )
        assert count < 24 or any(probes for _, probes in sizes)


def test_sizes_that_make_no_window_are_refused():
    for options in ({"window": 1}, {"ngram": 1}, {"guesses": 0}):
        with pytest.raises(UserError, match="window and ngram must be at least 2"):
            LookaheadDrafter(**options)
