from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
)

from drafttrain.errors import UserError
from drafttrain.inference.verify import argmax_at
from drafttrain.ops.sampling import (
    SamplingParams,
    argmax,
    draw_distinct,
    pick,
    probabilities,
    sample,
    top_log_probs,
)
from tests.ops.transformers_sampling import transformers_says


def reachable(logits, params):
    """[n, v] bool, the tokens that `sample` gives for a fine grid of uniforms."""
    grid = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1]
    found = torch.zeros(logits.shape, dtype=torch.bool)
    for row, scores in enumerate(logits):
        found[row, sample(scores.expand(len(grid), -1), params, grid)] = True
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.3, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 20, 10_000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.4, 1.0])
def test_the_same_tokens_as_transformers(temperature, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(16, 2500, generator=generator)
    logits[:4] = logits[:4].round()  # ties
    logits[4:8] = logits[4:8].bfloat16().float()  # ties among the unlikely
    logits[8:12] *= 0.1  # more tokens in a nucleus than are looked at first
    history = torch.randint(0, 2500, (16, 30), generator=generator)
    params = SamplingParams(temperature, top_k, top_p, min_p, 1.2)
    want = transformers_says(logits, params, history)
    scores = RepetitionPenaltyLogitsProcessor(1.2)(history, logits)
    got = probabilities(scores, params)
    assert torch.equal((got > 0).sum(-1), (want > 0).sum(-1))
    torch.testing.assert_close(got.sort(-1).values, want.sort(-1).values, rtol=2e-5, atol=1e-8)
    # Where a nucleus ends among equals, transformers' unstable sort decides which of them stay; all else is the same.
    edge = scores.masked_fill(want == 0, float("inf")).amin(-1, keepdim=True)
    torch.testing.assert_close(got[scores != edge], want[scores != edge], rtol=2e-5, atol=1e-8)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scale=st.floats(0.5, 6),
    temperature=st.floats(0.2, 2),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.5),
    ties=st.booleans(),
)
def test_the_fast_sampler_reaches_the_same_tokens(
    seed, scale, temperature, top_k, top_p, min_p, ties
):
    logits = scale * torch.randn(2, 40, generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if ties else logits
    params = SamplingParams(temperature, top_k, top_p, min_p)
    probs = probabilities(logits, params)
    got = reachable(logits, params)
    assert not (got & (probs == 0)).any()
    assert got[probs > 1 / 4000].all()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "params", [SamplingParams(1.0), SamplingParams(0.9, 30), SamplingParams(1.2, 0, 0.8, 0.05)]
)
def test_the_fast_sampler_follows_the_same_distribution(params):
    count = 20_000
    logits = 2 * torch.randn(1, 3000, generator=torch.Generator().manual_seed(4))
    probs = probabilities(logits, params)[0].double()
    uniforms = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    drawn = torch.cat(
        [sample(logits.expand(4000, -1), params, part) for part in uniforms.split(4000)]
    )
    # The rarest tokens share a bin.
    bins = probs.argsort(descending=True).argsort().clamp_max(20)
    seen = torch.bincount(bins[drawn], minlength=21)
    want = torch.zeros(21, dtype=torch.float64).index_add_(0, bins, probs / probs.sum() * count)
    assert seen[want == 0].sum() == 0
    assert chisquare(seen[want > 0], want[want > 0]).pvalue > 1e-3


def test_half_precision_logits_are_warped_in_float32():
    logits = torch.randn(3, 40).bfloat16()
    params = SamplingParams(0.7, 10, 0.8, 0.1)
    assert torch.equal(probabilities(logits, params), probabilities(logits.float(), params))


@pytest.mark.parametrize("rows", [1, 6, 40])  # 40 rows take torch's way
@pytest.mark.parametrize("vocab", [5, 16, 17, 1000, 4096])
@pytest.mark.parametrize("width", [1, 4, 5])
def test_top_log_probs_are_those_of_sorted_rows(rows, vocab, width):
    logits = 4 * torch.randn(rows, vocab)
    logits[0, vocab // 2 :] = float("-inf")
    values, ids = top_log_probs(logits, width)
    every = logits.double().log_softmax(-1)
    want = every.sort(dim=-1, descending=True, stable=True).values[:, :width].float()
    assert torch.allclose(values, want, atol=2e-6, rtol=1e-6)
    assert torch.allclose(values, every.gather(1, ids).float(), atol=2e-6, rtol=1e-6)
    assert all(len(set(row)) == width for row in ids.tolist())


def test_equal_logits_come_in_the_order_of_their_ids():
    logits = torch.zeros(2, 100)
    logits[:, [7, 40, 90]] = 1.0
    assert top_log_probs(logits, 5)[1].tolist() == [[7, 40, 90, 0, 1]] * 2


@pytest.mark.parametrize("vocab", [3, 256, 700])
def test_argmax_is_the_first_of_equals(vocab):
    logits = torch.randn(20, vocab, generator=torch.Generator().manual_seed(2)).round()
    want = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(argmax(logits), want)
    rows = [7, 0, 19, 7]
    for kind in (
        logits,
        logits.bfloat16(),
        logits.double(),
        torch.cat((logits, logits), 1)[:, :vocab],
    ):
        assert (
            argmax_at(kind, rows) == want[rows].tolist()
        )  # the kernel, and torch where it does not serve


@pytest.mark.parametrize("place", [0, 63, 64, 100, 127, 128, 130, 699])
def test_a_single_highest_logit_is_found_wherever_it_stands(place):
    logits = torch.full((2, 700), -1e4)
    logits[1, place] = -9.9e3
    assert argmax(logits).tolist() == [0, place]
    assert argmax_at(logits, [1]) == [place]
    assert top_log_probs(logits, 3)[1][1].tolist() == [
        place,
        *[i for i in range(4) if i != place][:2],
    ]


@pytest.mark.parametrize("padding", [0, 700])
def test_picks_follow_the_distribution(padding):
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0] + [0.0] * padding)
    uniforms = torch.rand(40_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(pick(probs.expand(40_000, -1), uniforms), minlength=6)
    assert counts[[1, 3, 4]].sum() == 40_000
    assert chisquare(counts[[1, 3, 4]], probs[[1, 3, 4]].double().numpy() * 40_000).pvalue > 1e-3


@pytest.mark.parametrize("uniform", [0.0, 1.0])
def test_the_ends_of_the_unit_interval_never_give_an_impossible_token(uniform):
    uniforms = torch.tensor([uniform], dtype=torch.float64)
    assert pick(torch.tensor([[0.0, 0.4, 0.6, 0.0]]), uniforms).tolist() == [2 if uniform else 1]


def test_distinct_draws_follow_successive_sampling():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05], dtype=torch.float64)
    count = 60_000
    drawn = draw_distinct(probs.expand(count, -1), 2, torch.Generator().manual_seed(3))
    seen = torch.bincount(drawn[:, 0] * 5 + drawn[:, 1], minlength=25).view(5, 5)
    want = (probs[:, None] * probs[None] / (1 - probs[:, None])).double() * count
    want.fill_diagonal_(0)
    assert seen[want == 0].sum() == 0
    assert chisquare(seen[want > 0], want[want > 0]).pvalue > 1e-3


def test_distinct_draws_stop_when_no_token_is_left():
    probs = torch.tensor([[0.0, 0.7, 0.0, 0.3], [0.2, 0.3, 0.4, 0.1], [0.0, 0.0, 1.0, 0.0]])
    drawn = draw_distinct(probs, 4, torch.Generator().manual_seed(0))
    assert sorted(drawn[0].tolist()) == [-1, -1, 1, 3] and drawn[0, 2:].tolist() == [-1, -1]
    assert sorted(drawn[1].tolist()) == [0, 1, 2, 3]
    assert drawn[2].tolist() == [2, -1, -1, -1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be a number from 0 to 1000"),
        ({"temperature": float("nan")}, "temperature=nan must be"),
        ({"top_k": -1}, "top_k=-1 must be a whole number from 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be a number above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5 must be a number above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p=-0.1 must be a number from 0 to 1"),
        ({"min_p": 1.1}, "min_p=1.1 must be a number from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be a number from 0.01"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty=nan must be a number from 0.01"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**values)
