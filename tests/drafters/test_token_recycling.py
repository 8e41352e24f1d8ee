"""Token Recycling: which predictions are kept and drafted, and that only the target's own tokens are committed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.batch import TokenTree
from drafttrain.drafters.combined import CombinedDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter, untrained
from drafttrain.drafters.token_recycling.model import TokenRecyclingDrafter, TokenRecyclingSession
from drafttrain.errors import UserError
from drafttrain.inference import SamplingParams, generate
from drafttrain.inference.engine import Decoder
from drafttrain.tuning.tune import TuneSettings, search_tree
from tests.conftest import make_target
from tests.drafters.helpers import check_tree, in_threads, make_drafter, paths
from tests.inference.fakes import MarkovTarget

NO_TREE = TokenTree.empty()


def session_after(drafter, tokens):
    session = drafter.start(torch.tensor(tokens), 100)
    session.extend(torch.tensor(tokens[1:]), torch.empty(len(tokens) - 1, 0))
    return session


def tell(session, tokens, *shares):
    """The target predicts these tokens after the root."""
    session.read_predictions(
        NO_TREE, [(list(tokens), list(shares) or [0.5, 0.3, 0.1, 0.1][: len(tokens)])]
    )


def commit(session, *tokens):
    session.extend(torch.tensor(tokens), torch.empty(len(tokens), 0))


def drafted(session, spec="dynamic:4,4,9"):
    return session.propose(TreeSpec.parse(spec))


def test_what_was_predicted_after_these_tokens_is_drafted_again():
    session = session_after(TokenRecyclingDrafter(context=2), [7, 1])
    assert len(drafted(session)) == 0
    tell(session, [2, 3])
    commit(session, 2)
    tell(session, [1, 4])
    commit(session, 1)
    # After 1: 2 and 3; after 2: 1 and 4.
    assert {(2,), (3,), (2, 1), (2, 4), (2, 1, 2)} <= paths(drafted(session))
    assert drafted(session, "chain:3").tokens.tolist() == [2, 1, 2]


def test_the_longest_context_predicts():
    session = session_after(TokenRecyclingDrafter(context=2), [8, 1])
    tell(session, [5])
    commit(session, 9, 1)
    tell(session, [6])
    commit(session, 8, 1)
    assert drafted(session, "chain:1").tokens.tolist() == [5]
    commit(session, 3, 1)
    assert drafted(session, "chain:1").tokens.tolist() == [6], "after 1 alone, the last prediction"


def test_rejected_nodes_teach_too():
    session = session_after(TokenRecyclingDrafter(context=1), [1])
    tree = TokenTree(torch.tensor([2, 3, 4]), [-1, 0, -1])
    session.read_predictions(tree, [([2], [0.9]), ([5], [0.9]), ([6], [0.9]), ([7], [0.9])])
    for last, want in ((1, 2), (2, 5), (3, 6), (4, 7)):
        commit(session, last)
        assert drafted(session, "chain:1").tokens.tolist() == [want]


def test_probabilities_follow_what_was_right():
    right, wrong = (session_after(TokenRecyclingDrafter(context=1), [1]) for _ in range(2))
    for number in range(40):
        tell(right, [2, 3], 0.8, 0.2)
        tell(wrong, [10 + number, 3], 0.8, 0.2)
    first = [drafted(session, "fanout:1").log_probs.exp() for session in (right, wrong)]
    assert first[0].item() > 0.9
    assert len(first[1]) == 0 or first[1].item() < 0.15


@settings(deadline=None)
@given(
    predicted=st.lists(
        st.permutations(range(5)).map(lambda tokens: tokens[:3]), min_size=1, max_size=30
    ),
    spec=st.sampled_from(
        ["chain:4", "fanout:3x2x2", "dynamic:5,3,11", "dynamic:8,2,5@stop=0.2", "paths:0,1,0-0"]
    ),
)
def test_trees_are_well_formed_and_within_the_spec(predicted, spec):
    spec = TreeSpec.parse(spec)
    session = session_after(TokenRecyclingDrafter(min_p=0.0), [1])
    for tokens in predicted:
        tell(session, tokens)
        commit(session, tokens[0])
    tree = drafted(session, str(spec))
    check_tree(tree, spec)
    assert all(score.exp() >= spec.stop for score in tree.log_probs)


def test_predictions_are_remembered_only_where_asked_for():
    for memory, known in ((0, 0), (100, 1)):
        drafter = TokenRecyclingDrafter(memory=memory)
        tell(session_after(drafter, [1, 2]), [3])
        assert len(drafted(session_after(drafter, [1, 2]), "chain:1")) == known


def test_a_memory_is_bounded_and_forgets_the_oldest():
    drafter = TokenRecyclingDrafter(context=1, memory=20)
    session = session_after(drafter, [0])
    for token in range(1, 200):
        tell(session, [token])
        commit(session, token)
    assert sum(map(len, drafter.memory._generations)) <= 20
    assert drafter.memory.find((0,)) is None and drafter.memory.find((198,)) is not None


def test_threads_share_a_memory():
    drafter = TokenRecyclingDrafter(context=2, memory=500, min_p=0.0)

    def serve(number):
        base = 100 * number
        for place in range(300):
            session = session_after(drafter, [base, base + place % 7])
            tell(session, [base, base + 1])
            assert set(drafted(session, "fanout:2").tokens.tolist()) == {base, base + 1}

    in_threads(serve)


def test_a_target_without_history_is_learned_completely():
    """Where the next token depends on the last one only, a cycle that was decoded once is drafted to the tree's full depth."""
    target = MarkovTarget(vocab=40, seed=3)
    plain = generate(target, None, [0], max_new_tokens=80).tokens
    got = generate(
        target, TokenRecyclingDrafter(), [0], max_new_tokens=80, spec=TreeSpec.parse("chain:4")
    )
    assert got.tokens == plain
    assert set(got.stats.accepted[-6:-1]) == {4}


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("token_recycling", 0.9),
        ("token_recycling+ngram", 0.0),
        ("lookahead+token_recycling:width=2", 0.9),
    ],
)
def test_the_text_is_plain_decodings(steady_clock, name, temperature):
    """Alone, beside n-grams and beside probes; on many rows at once; with rounds that draft nothing (@adapt)."""
    target = MarkovTarget(vocab=8, seed=1) if temperature else make_target(layers=2)
    drafter = load_drafter(name, target)
    prompts = [[5, 6, 5, 6, 5, 6, 5], [7, 3, 1], list(range(8))]
    options = {"sampling": SamplingParams(temperature), "eos_ids": ()}
    want = [
        one.tokens for one in Decoder(target, None, **options).generate(prompts, max_new_tokens=28)
    ]
    for text in ("dynamic:3,2,6", "dynamic:6,4,20", "chain:3@adapt"):
        accepted = 0
        for rows in (1, 3):
            decoder = Decoder(target, drafter, spec=TreeSpec.parse(text), max_rows=rows, **options)
            made = decoder.generate(prompts, max_new_tokens=28)
            assert [one.tokens for one in made] == want
            accepted += sum(sum(one.stats.accepted) for one in made)
        assert accepted > 0, text


def test_sessions_read_the_targets_predictions_at_every_node(monkeypatch):
    target = make_target(layers=2)
    seen = []
    logits_of = []
    read = TokenRecyclingSession.read_predictions

    def spy(session, tree, predictions):
        seen.append((session.before, tree, predictions))
        read(session, tree, predictions)

    monkeypatch.setattr(TokenRecyclingSession, "read_predictions", spy)
    drafter = CombinedDrafter(
        make_drafter(target), untrained("token_recycling:context=4,width=3", beside=True)
    )
    decoder = Decoder(
        target, drafter, spec=TreeSpec.parse("dynamic:6,6,40"), eos_ids=()
    )  # more rows than the kernel's top-k
    decoder.observer = lambda index, tree, verdict, logits: logits_of.append(logits.clone())
    prompt = [3, 1, 4, 1, 5]
    made = decoder.generate([prompt], max_new_tokens=30)[0]
    assert len(seen) >= made.stats.target_passes - 1 > 3, (
        "the last round may have no room for a tree"
    )
    text = [*prompt, *made.tokens]
    end = len(prompt)
    for (before, tree, predictions), logits, kept in zip(
        seen, logits_of, made.stats.accepted, strict=False
    ):
        assert before == tuple(text[: end + 1][-4:])
        assert len(predictions) == 1 + len(tree) == len(logits)
        values, ids = logits.topk(3, dim=-1)
        assert [tokens for tokens, _ in predictions] == ids.tolist()
        torch.testing.assert_close(
            torch.tensor([shares for _, shares in predictions]), values.softmax(-1)
        )
        end += kept + 1
    assert any(len(tree) > 32 for _, tree, _ in seen)


def test_a_likely_child_does_not_replace_the_other_drafters_pass():
    class Main(TokenRecyclingDrafter):
        asked = 0

        def propose_all(self, sessions, spec, samplers):
            self.asked += len(sessions)
            return super().propose_all(sessions, spec, samplers)

    for side, asked in (("token_recycling", 1), ("ngram", 0)):
        main = Main()
        session = CombinedDrafter(main, untrained(side)).start(torch.tensor([1, 2] * 9), 99)
        commit(session, *[2, 1] * 8, 2)
        for _ in range(50):
            tell(session, [1], 0.99)
        assert len(drafted(session)) > 0 and main.asked == asked


def test_what_cannot_work_is_refused():
    for options in ({"context": 0}, {"width": 0}, {"memory": -1}, {"min_p": 1.0}):
        with pytest.raises(UserError, match="context must be from 1 to 8, width from 1 to 64"):
            TokenRecyclingDrafter(**options)
    target = make_target(layers=2)
    for name in ("token_recycling", "token_recycling+ngram"):
        with pytest.raises(
            UserError, match="learns from its own rounds, so trees cannot be predicted"
        ):
            search_tree(target, load_drafter(name, target), [[1, 2, 3]], TuneSettings())
