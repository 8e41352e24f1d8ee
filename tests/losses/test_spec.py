"""How losses are written."""

from __future__ import annotations

import pytest

from drafttrain.errors import UserError
from drafttrain.losses.spec import Loss, Term, parse_loss


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("kl", [Term("kl")]),
        ("js", [Term("js", parameter=0.5)]),
        ("js:0.1@2", [Term("js", parameter=0.1, temperature=2)]),
        ("0.9*kl + 0.1*ce", [Term("kl", 0.9), Term("ce", 0.1)]),
        ("tvd++", [Term("tvd++")]),
        ("2*tvd++@0.6+kl", [Term("tvd++", 2, temperature=0.6), Term("kl")]),
        ("kl+tvd++", [Term("kl"), Term("tvd++")]),
        ("lk_lambda:1+lk_alpha", [Term("lk_lambda", parameter=1), Term("lk_alpha")]),
    ],
)
def test_reading_and_writing(text, terms):
    loss = parse_loss(text)
    assert loss == Loss(tuple(terms))
    assert parse_loss(str(loss)) == loss


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kld", r"loss='kld': 'kld' is not a valid loss; did you mean kl"),
        ("reversekl", r"did you mean reverse_kl"),
        ("xyz", r"choose kl, reverse_kl, js, tv, tvd\+\+, lk_alpha, lk_lambda, ce"),
        ("0.9*kl+", r"ends in \+"),
        ("", r"is not \[WEIGHT\*\]NAME"),
        ("kl+*ce", r"the weight is '', but must be a number"),
        ("-1*kl", r"the weight is '-1'"),
        ("kl:0.5", r"kl takes no parameter; js and lk_lambda do"),
        (
            "js:1",
            r"beta of js is '1', but must be a number from 0.001 to 0.999; its ends are kl and reverse_kl",
        ),
        ("js:x", r"beta of js is 'x'"),
        ("lk_lambda:0", r"the parameter of lk_lambda is '0'"),
        ("kl@0", r"the temperature is '0'"),
        ("kl@nan", r"the temperature is 'nan'"),
        ("js:0.5:2", r"is not \[WEIGHT\*\]NAME"),
    ],
)
def test_each_mistake_is_named(text, message):
    with pytest.raises(UserError, match=message):
        parse_loss(text)
