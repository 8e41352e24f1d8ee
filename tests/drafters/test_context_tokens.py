"""Tokens of a sequence's text in its drafter's vocabulary: which join, their logits, and each sequence its own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from drafttrain.drafters.common import context_tokens
from drafttrain.drafters.common.context_tokens import ContextTokens, ContextVocabulary
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.inference import SamplingParams, generate, generate_batch
from drafttrain.ops.sampling import Sampler, probabilities
from tests.conftest import make_target
from tests.drafters.layer_kinds import make_kind

KEPT = torch.arange(40, 240)
KINDS = ("eagle3", "peagle", "eagle1", "mtp", "dflash", "dspark", "domino")
OPTIONS = {"extra_vocab_size": 16}


def make_text(target, limit=4, kept=KEPT):
    return ContextVocabulary(target, kept, limit).open(target.head_weight.detach()[kept])


def test_recent_tokens_join_with_the_targets_logits():
    target = make_target()
    text = make_text(target)
    reads = torch.randn(3, target.hidden_size)
    logits = target.head(reads)  # [3, v]
    text.read([1, 50, 2, 3, 1])
    drafted = text.shape(logits[:, KEPT], reads)
    first = text.ids
    assert first[len(KEPT) :].tolist() == [1, 2, 3]
    torch.testing.assert_close(drafted, logits[:, first])

    text.read([4, 5, 6, 60, 5])  # the least recent ones leave: 2, then 3
    assert sorted(text.ids[len(KEPT) :].tolist()) == [1, 4, 5, 6]
    torch.testing.assert_close(text.shape(logits[:, KEPT], reads), logits[:, text.ids])
    assert first[len(KEPT) :].tolist() == [1, 2, 3], "what a tree was drafted with stays"
    text.read(range(40))  # in one piece, longer than the limit
    assert sorted(text.ids[len(KEPT) :].tolist()) == [36, 37, 38, 39]
    torch.testing.assert_close(text.shape(logits[:, KEPT], reads), logits[:, text.ids])


def test_rows_follow_what_training_moved_all_kept_rows_by():
    target = make_target()
    shift = torch.randn(64)[: make_target().hidden_size] * 0.1
    rows = target.head_weight.detach()
    text = ContextVocabulary(target, KEPT, 8).open(1.5 * rows[KEPT] + shift)
    text.read([7])
    reads = torch.randn(2, target.hidden_size)
    torch.testing.assert_close(
        text.shape(reads.new_zeros(2, 200), reads)[:, 200], reads @ (1.5 * rows[7] + shift)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_each_sequence_has_its_own_tokens_and_text_stays_the_targets(kind):
    target = make_target(hidden=64)
    drafter = make_kind(kind, target, KEPT, **OPTIONS).eval()
    drafter.pack()
    # Nothing joins the last one's vocabulary, so that the kernels draft it where they can.
    prompts = [torch.arange(begin, begin + 9) * 3 % target.vocab_size for begin in (0, 4, 80, 20)]
    plain = [generate(target, None, prompt, max_new_tokens=12).tokens for prompt in prompts]
    drafted: list[list[set[int]]] = [[], []]
    for text in ("chain:3", "dynamic:3,3,6"):
        spec = TreeSpec.parse(text)
        sessions = []
        features = [
            target.forward(prompt[None], drafter.feature_layers).features[0] for prompt in prompts
        ]
        for together in (True, False):
            sessions = [drafter.start(prompt[:-1], 32) for prompt in prompts]
            groups = [range(4)] if together else [[0], [1], [2], [3]]
            trees = []
            for rows in groups:
                own = [sessions[row] for row in rows]
                drafter.extend_all(
                    own, [prompts[row][1:] for row in rows], [features[row][:-1] for row in rows]
                )
                trees += drafter.propose_all(own, spec, [None] * len(own))
            drafted[not together] = [set(tree.tokens.tolist()) for tree in trees]
        assert drafted[0] == drafted[1]
        for session, prompt in zip(sessions, prompts, strict=True):
            assert set(session.ids.tolist()) == set(KEPT.tolist()) | set(prompt[1:].tolist())
        out = generate_batch(target, drafter, prompts, max_new_tokens=12, spec=spec)
        assert [one.tokens for one in out] == plain


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_sampled_trees_record_the_distribution_that_they_were_drawn_from(kind):
    target = make_target(hidden=64)
    drafter = make_kind(kind, target, KEPT, **OPTIONS).eval()
    prompt = torch.arange(12)
    features = target.forward(prompt[None], drafter.feature_layers).features[0]
    session = drafter.start(prompt[:-1], 32)
    session.extend(prompt[1:], features[:-1])
    seen = []
    shape = ContextTokens.shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContextTokens, "shape", lambda *args: seen.append(shape(*args)) or seen[-1])
        sampler = Sampler(SamplingParams(0.8), torch.Generator().manual_seed(0))
        tree = session.propose(TreeSpec.parse("chain:2@sample"), sampler)
    q = torch.cat([probabilities(logits, sampler.params) for logits in seen])
    torch.testing.assert_close(tree.proposal.probs, q)
    assert tree.proposal.kept_ids.tolist() == session.ids.tolist() and q.shape[1] == len(
        session.ids
    ) > len(KEPT)


def test_a_head_of_its_own_gets_no_tokens_and_refuses_a_number():
    target = make_target()
    own = torch.randn(len(KEPT), target.hidden_size)
    with pytest.raises(
        UserError, match="extra_vocab_size=8: the drafter's head did not begin as the target's"
    ):
        ContextVocabulary(target, KEPT, 8).open(own)
    with pytest.raises(UserError, match="keeps the whole vocabulary; set 0"):
        make_text(target, 8, kept=torch.arange(target.vocab_size))
    with pytest.raises(UserError, match="extra_vocab_size=8: tokens of the text join on CPUs only"):
        ContextVocabulary(target, KEPT, 8).open(own.to("meta"))
    kind = make_kind("eagle3", target, KEPT, **OPTIONS)
    assert kind.joins_tokens
    kind.uses_text = False
    assert not kind.joins_tokens and kind.start(KEPT[:4], 9).text is None


def test_threads_that_begin_together_find_the_same_head(monkeypatch):
    target = make_target()
    context = ContextVocabulary(target, KEPT, 4)
    head = target.head_weight.detach()[KEPT]
    together = threading.Barrier(2, timeout=20)
    fit = context_tokens._fit
    monkeypatch.setattr(context_tokens, "_fit", lambda *args: (together.wait(), fit(*args))[1])
    with ThreadPoolExecutor(2) as pool:
        opened = list(pool.map(context.open, (head, head)))
    for text in opened:
        text.read([1])
        assert text.ids.tolist() == [*KEPT, 1]
