from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from drafttrain.errors import UserError
from drafttrain.ops.sampling import SamplingParams, draw, probabilities


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 20, 10_000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1.0])
def test_the_same_tokens_as_transformers(temperature, top_k, top_p):
    logits = 3 * torch.randn(16, 500, generator=torch.Generator().manual_seed(1))
    logits[:4] = logits[:4].round()  # ties
    want = logits
    if temperature != 1:
        want = TemperatureLogitsWarper(temperature)(None, want)
    if top_k:
        want = TopKLogitsWarper(top_k)(None, want)
    if top_p < 1:
        want = TopPLogitsWarper(top_p)(None, want)
    got = probabilities(logits, SamplingParams(temperature, top_k, top_p))
    assert torch.equal(got > 0, want.softmax(-1) > 0)
    torch.testing.assert_close(got, want.softmax(-1))


def test_half_precision_logits_are_warped_in_float32():
    logits = torch.randn(3, 40).bfloat16()
    params = SamplingParams(0.7, 10, 0.8)
    assert torch.equal(probabilities(logits, params), probabilities(logits.float(), params))


def test_draws_follow_the_distribution():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    drawn = draw(probs.expand(40_000, 6), torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn, minlength=6)
    assert counts[[0, 2, 5]].sum() == 0
    assert chisquare(counts[[1, 3, 4]], probs[[1, 3, 4]].double().numpy() * 40_000).pvalue > 1e-3


@pytest.mark.parametrize("uniform", [0.0, 1.0])
def test_the_ends_of_the_unit_interval_never_give_an_impossible_token(monkeypatch, uniform):
    monkeypatch.setattr(torch, "rand", lambda *shape, **kw: torch.full(shape[0], uniform, dtype=torch.float64))
    drawn = draw(torch.tensor([[0.0, 0.4, 0.6, 0.0]]), torch.Generator())
    assert drawn.tolist() == [2 if uniform else 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be 0"),
        ({"temperature": float("nan")}, "temperature=nan must be"),
        ({"top_k": -1}, "top_k=-1 must be 0"),
        ({"top_k": -2}, "top_k=-2 must be 0"),
        ({"top_p": 1.2}, "top_p=1.2 must be above 0 and at most 1"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**values)
