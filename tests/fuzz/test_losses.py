"""Loss strings: whatever the text, it is a loss of bounded numbers and terms, or refused in one line."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.losses import parse_loss
from drafttrain.losses.spec import NAMES
from tests.fuzz import fuzz, outcome, seeds, wrong_words

ALPHABET = [*NAMES, *"+*:@.0123456789e-", "nan", "inf", "1e400", "1e-320", "\u0663", " ", "_"]
VALID = ("kl", "js:0.5", "lk_lambda:3@0.6", "0.9*kl+0.1*ce", "4*kl@2", "tvd++", "0.5*tvd+++0.5*tv")


def parse(text: str) -> None:
    loss = parse_loss(text)
    numbers = [n for term in loss.terms for n in (term.weight, term.parameter, term.temperature)]
    assert len(loss.terms) <= 64 and all(math.isfinite(n) for n in numbers)
    assert all(term.weight > 0 and term.temperature >= 0.01 for term in loss.terms)
    assert len(parse_loss(str(loss)).terms) == len(loss.terms)


@fuzz(examples=60)
@given(text=st.lists(st.sampled_from(ALPHABET), max_size=12).map("".join))
def test_random_texts(text):
    outcome("loss", "random text", lambda: parse(text))


@fuzz(examples=60)
@given(text=st.sampled_from(VALID), seed=seeds())
def test_mutated_losses(text, seed):
    random = Random(seed)
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(text) + 1)
        text = (
            text[:at]
            + random.choice(ALPHABET) * random.choice((1, 1, 300))
            + text[at + random.randint(0, 3) :]
        )
    outcome("loss", "mutated", lambda: parse(text))


@fuzz(examples=48)
@given(form=st.sampled_from(("{}", "{}*kl", "js:{}", "kl@{}", "kl+{}")), word=wrong_words())
def test_wrong_words(form, word):
    outcome("loss", word[0], lambda: parse(form.format(word[1])))


@pytest.mark.parametrize(
    "text",
    ["nan*kl", "1e-320*kl", "kl@1e-320", "js:0", "js:\u0663", "1e400*kl", "+".join(["kl"] * 5000)],
)
def test_numbers_out_of_range(text):
    assert outcome("loss", "out of range", lambda: parse(text))
