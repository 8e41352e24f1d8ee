"""A prompt that continues the last text: what both share is read once, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from drafttrain.inference import Decoder, SamplingParams
from tests.conftest import make_target
from tests.inference.fakes import ANY, FakeDrafter, family
from tests.inference.turns import NEW, OPENING, TURNS, talk


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "bloom"])
def test_only_new_tokens_are_read(monkeypatch, name):
    """With and without a drafter, also by models whose states cannot go back."""
    target, _ = family(name)
    plain = talk(Decoder(target, None, eos_ids=()))
    read = []
    forward = target.forward
    monkeypatch.setattr(
        target, "forward", lambda ids, *rest: read.append(ids.shape[1]) or forward(ids, *rest)
    )
    kept = talk(Decoder(target, None, eos_ids=(), keep=True))
    assert [answer.tokens for answer in kept] == [answer.tokens for answer in plain]
    text = len(OPENING) + sum(len(turn) for turn in TURNS) + (len(TURNS) + 1) * NEW
    assert sum(read) == text - 1  # every token but the last, once


def test_the_drafter_gets_the_features_of_the_whole_text():
    target, _ = family("llama")
    truth = Decoder(target, None, eos_ids=()).generate([OPENING], max_new_tokens=20)[0].tokens
    drafter = FakeDrafter(truth, 0.7, nodes=9, seed=5, feature_layers=(1, 3))
    decoder = Decoder(target, drafter, spec=ANY, eos_ids=(), keep=True)
    first = decoder.generate([OPENING], max_new_tokens=NEW)[0].tokens
    text = OPENING + first + [7, 8, 7]
    (answer,) = decoder.generate([text], max_new_tokens=NEW)
    read = len(drafter.tokens)  # the last round's are read with the next turn
    assert read > len(text) and drafter.tokens == (text + answer.tokens)[:read]
    want = target.forward(torch.tensor([drafter.tokens[:-1]]), (1, 3)).features[0]
    torch.testing.assert_close(torch.cat(drafter.features), want, atol=1e-4, rtol=1e-4)


def test_another_text_is_read_anew(monkeypatch):
    target, _ = family("llama")
    drafter = FakeDrafter(None, nodes=4)
    for own in (None, drafter):
        decoder = Decoder(target, own, spec=ANY, eos_ids=(), keep=True)
        fresh = Decoder(target, None, eos_ids=())
        (first,) = decoder.generate([OPENING], max_new_tokens=NEW)
        for text in (
            OPENING + first.tokens[:4] + [1, 2, 3],  # a part of the answer, then something else
            OPENING,
            OPENING[:3],
            [44, *OPENING],
            OPENING + first.tokens,
        ):
            (want,) = fresh.generate([text], max_new_tokens=NEW)
            assert decoder.generate([text], max_new_tokens=NEW)[0].tokens == want.tokens
        several = [OPENING, OPENING[2:]]
        wanted = fresh.generate(several, max_new_tokens=NEW)
        found = decoder.generate(several, max_new_tokens=NEW)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]


def test_an_answer_that_was_left_keeps_nothing():
    target, _ = family("llama")
    decoder = Decoder(target, FakeDrafter(None, nodes=4), spec=ANY, eos_ids=(), keep=True)
    rounds = decoder.stream([OPENING], max_new_tokens=NEW)
    _, begun = next(rounds)
    rounds.close()
    text = OPENING + begun + [7]
    (want,) = Decoder(target, None, eos_ids=()).generate([text], max_new_tokens=NEW)
    assert decoder.generate([text], max_new_tokens=NEW)[0].tokens == want.tokens


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"stop": "ab"}, {"eos_ids": range(0, 300, 15)}])
def test_answers_that_end_early_are_continued(options):
    target = make_target().pack()
    text = target.tokenizer("a stop string or a token ends it").input_ids
    warm = {"sampling": SamplingParams(temperature=1.5), "spec": ANY, **options}
    finishes = set()
    for seed in range(3):
        kept = Decoder(target, FakeDrafter(None, nodes=6, vocab=300), keep=True, **warm)
        anew = Decoder(target, None, **warm)
        whole = list(text)
        for _ in range(3):
            (own,) = kept.generate([whole], max_new_tokens=24, seed=seed)
            (other,) = anew.generate([whole], max_new_tokens=24, seed=seed)
            assert own.tokens == other.tokens
            finishes.add(own.stats.finish)
            whole += [*own.tokens, 5]
    if "eos_ids" in options:
        assert finishes == {"eos", "length"}


def test_a_drafter_reads_the_prompt_of_an_answer_that_ends_with_its_first_token():
    target, _ = family("llama")
    drafter = FakeDrafter(None, nodes=4, feature_layers=(1, 3))
    decoder = Decoder(target, drafter, spec=ANY, eos_ids=(), keep=True)
    text = list(OPENING)
    text += [*decoder.generate([text], max_new_tokens=NEW)[0].tokens, 7, 8, 7]
    decoder.eos_ids = frozenset(range(target.vocab_size))
    (ended,) = decoder.generate([text], max_new_tokens=NEW)
    assert ended.stats.finish == "eos" and len(ended.tokens) == 1
    decoder.eos_ids = frozenset()
    text += [*ended.tokens, 5]
    text += decoder.generate([text], max_new_tokens=NEW)[0].tokens
    assert drafter.tokens == text[: len(drafter.tokens)]
    want = target.forward(torch.tensor([drafter.tokens[:-1]]), (1, 3)).features[0]
    torch.testing.assert_close(torch.cat(drafter.features), want, atol=1e-4, rtol=1e-4)
