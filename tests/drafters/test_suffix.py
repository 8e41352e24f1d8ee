"""Drafting by suffixes: where a copy with changes goes on, earlier answers, a corpus, and probabilities that are learned."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.drafters.common.ngram_table import NgramTable
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.drafters.registry import decoding_settings, load_drafter
from drafttrain.drafters.suffix import model as module
from drafttrain.drafters.suffix.model import SuffixDrafter
from drafttrain.errors import UserError
from drafttrain.files import is_hub_id
from tests.drafters.helpers import check_tree, in_threads, paths


def session_after(drafter, prompt, answer=()):
    session = drafter.start(torch.tensor(prompt), 100)
    ids = torch.tensor([*prompt[1:], *answer])
    session.extend(ids, torch.empty(len(ids), 0))
    return session


def propose(tokens, spec, answer=(), **options):
    return session_after(SuffixDrafter(**{"min_p": 0.0, **options}), tokens, answer).propose(
        TreeSpec.parse(spec)
    )


def stored(tmp_path, documents, fingerprint=""):
    NgramTable.build(documents).save(tmp_path / "store.safetensors", fingerprint)
    return str(tmp_path / "store.safetensors")


@pytest.mark.parametrize("drafter", [SuffixDrafter(min_p=0.0), NgramDrafter()], ids=repr)
@pytest.mark.parametrize(
    ("tokens", "spec", "drafted"),
    [
        # The longest occurrence goes first, and then the most recent one.
        ([1, 2, 3, 4, 9, 3, 7, 1, 2, 3], "chain:2", [4, 9]),
        ([1, 2, 5, 1, 2, 6, 8, 1, 2], "chain:2", [6, 8]),
        # A match that reaches the end repeats.
        ([7, 1, 2, 1, 2], "chain:5", [1, 2, 1, 2, 1]),
        # Nothing was seen before, or nothing is asked for.
        ([1, 2, 3, 4], "chain:3", []),
        ([1, 1, 1], "none", []),
    ],
)
def test_matches_of_a_text(drafter, tokens, spec, drafted):
    tree = session_after(drafter, tokens).propose(TreeSpec.parse(spec))
    assert tree.tokens.tolist() == drafted


def test_the_longest_occurrence_is_told_beyond_what_the_index_looks_up():
    """Six tokens agree before the first 7, and five, as many as are looked up, before the second."""
    text = [9, 1, 2, 3, 4, 5, 7, 8, 1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5]
    assert propose(text, "chain:1").tokens.tolist() == [7]


def test_trees_branch_into_other_continuations():
    tree = propose([1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 8, 8, 1, 2], "dynamic:2,4,6", min_n=2)
    assert {(8, 8), (5, 7), (5, 6)} <= paths(tree)
    assert len(propose([1, 2, 3, 2], "chain:3", min_n=2)) == 0


def test_a_copy_goes_on_behind_a_change():
    """Token 40 replaces 14 of the copied line. Behind it, 15 goes on although nothing of the text agrees yet."""
    prompt = [1, 2, 10, 11, 12, 13, 14, 15, 16, 17, 3]
    assert propose(prompt, "chain:2", [10, 11, 12, 13, 40]).tokens.tolist() == [15, 16]
    # 20 followed most recently by 90; the one near the copied place by 17.
    prompt = [10, 11, 12, 13, 14, 20, 17, 3, 3, 3, *range(50, 80), 20, 90]
    assert propose(prompt, "chain:1", [10, 11, 12, 13, 40, 20]).tokens.tolist() == [17]


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=2, max_size=60),
    begin=st.integers(1, 60),
    spec=st.sampled_from(
        ["chain:4", "fanout:3x2x2", "dynamic:5,3,11", "dynamic:8,2,5@stop=0.2", "paths:0,1,0-0"]
    ),
)
def test_trees_are_well_formed_and_within_the_spec(tokens, begin, spec):
    spec = TreeSpec.parse(spec)
    for drafter in (SuffixDrafter(memory=50, min_p=0.0), NgramDrafter()):
        tree = session_after(drafter, tokens[:begin], tokens[begin:]).propose(spec)
        check_tree(tree, spec)
        assert tree.log_probs is None or all(score.exp() >= spec.stop for score in tree.log_probs)


def test_long_matches_draft_deep_and_short_ones_little():
    text = list(range(10, 42))
    tree = propose([*text, 5], "dynamic:31,4,31@stop=0.3", [*text[:12]])
    assert tree.tokens.tolist()[:4] == text[12:16] and tree.drafted_depth > 4
    assert len(propose([*text, 5], "dynamic:31,4,31@stop=0.3", [text[3]])) <= 2


def test_probabilities_follow_what_was_right():
    right = session_after(SuffixDrafter(), [1, 2, 3, 4], [1, 2, 3, 4] * 5)
    wrong = session_after(SuffixDrafter(), [1, 2, 3, 4], [1, 5, 1, 6, 1, 7, 1, 8, 1, 9, 1])
    first = TreeSpec.parse("chain:1")
    assert right.propose(first).log_probs.exp().item() > 0.9
    assert len(wrong.propose(first)) == 0 or wrong.propose(first).log_probs.exp().item() < 0.25


def test_answers_are_remembered_only_where_asked_for():
    for memory, known in ((0, []), (100, [7, 8])):
        drafter = SuffixDrafter(memory=memory, min_p=0.0)
        session_after(drafter, [1, 2, 3], [4, 5, 6, 7, 8])
        assert (
            session_after(drafter, [9, 5, 6]).propose(TreeSpec.parse("chain:2")).tokens.tolist()
            == known
        )
        # Prompts are not remembered.
        assert len(session_after(drafter, [9, 1, 2]).propose(TreeSpec.parse("chain:2"))) == 0


def test_the_memory_is_bounded_and_lets_texts_go():
    class Text(list):
        """A list that can be referred to weakly."""

    memory = module._Memory(8)
    gone = []
    for number in range(6):
        text = Text([number, number])
        for token in (1, 2, 3, 4):
            memory.add(text, token)
        gone.append(weakref.ref(text))
    del text
    assert [text() is None for text in gone] == [True, True, True, True, False, False]
    counted = module._Index((1,))
    for _ in range(1000):
        counted.add([7])
    assert max(map(len, counted._places.values())) <= 4 * module._PLACES


def test_threads_share_a_memory():
    """Each token of an answer follows the one before it in memory too, whatever other threads add in between."""
    drafter = SuffixDrafter(memory=10_000, min_p=0.0)

    def serve(number):
        base = 1000 * (number + 1)
        for _ in range(20):
            session_after(drafter, [base, base], list(range(base, base + 20)))
            session = session_after(drafter, [9, base + 3, base + 4])
            tree = session.propose(TreeSpec.parse("chain:3"))
            assert tree.tokens.tolist() == [base + 5, base + 6, base + 7]

    in_threads(serve)


def test_a_corpus_fills_what_the_sequence_does_not_know(tmp_path):
    file = stored(tmp_path, [[1, 2, 3, 4], [1, 2, 3, 5], [9, 2, 3, 5], [7, 7, 7]])
    assert paths(propose([8, 2], "chain:2", file=file)) == {(3,), (3, 5)}
    assert propose([9, 2, 3], "fanout:2", file=file).tokens.tolist() == [5, 4]
    # What the sequence itself has shown goes first.
    assert (
        propose([1, 2, 3, 6, 8, 1, 2, 3, 6, 1, 2, 3], "fanout:2", file=file).tokens.tolist()[0] == 6
    )
    assert len(propose([8, 6], "dynamic:3,3,8", file=file)) == 0


def test_the_file_of_a_kind_is_no_hub_id():
    """`eval` looks for the drafter's decoding.json, of which a kind without weights has none."""
    assert not is_hub_id("suffix:runs/store.safetensors")
    assert decoding_settings("suffix:runs/store.safetensors") == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("min_n=0", "min_n=0, memory=0, min_p=0.02: min_n must be at least 1"),
        ("memory=-1", "memory=-1"),
        ("min_p=1.0", "below 1"),
        ("window=3", "'window' is not an option of suffix; there are file, memory, min_n, min_p"),
        ("/no/file", "'/no/file' cannot be read"),
    ],
)
def test_bad_options_are_named(target, options, message):
    with pytest.raises(UserError, match=message):
        load_drafter(f"suffix:{options}", target)
