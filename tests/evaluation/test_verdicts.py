"""Verdicts from made-up figures: every state, and both sides of its boundaries."""

from __future__ import annotations

import json

import numpy as np
import pytest

from drafttrain.evaluation.metrics import accepted_below, intervals, summarize
from drafttrain.evaluation.resampling import draws, ends, student
from drafttrain.evaluation.verdicts import (
    FEWEST,
    LOSES,
    OPEN,
    PAYS,
    against,
    crossover,
    judge,
    outliers,
    prompts_needed,
    verdict_of,
    verdict_on,
)
from tests.evaluation.records import record, results_of, side


def prompt(seconds, accepted=1, question="q", plain=2.1, category="chat"):
    """21 tokens in ten rounds (accepted 1) or twenty (0) against plain decoding's 2.1 s."""
    rounds = [(accepted, 2, 20 // (1 + accepted))]
    found = record(category, side(21, seconds, rounds), side(21, plain, [(0, 0, 20)]))
    return {"question_id": question, "turn": 0, "prompt_tokens": 5, **found}


@pytest.mark.parametrize(
    ("interval", "prompts", "state"),
    [
        ([1.001, 1.4], FEWEST, PAYS),
        ([1.0, 1.4], FEWEST, OPEN),
        ([1.001, 1.4], FEWEST - 1, OPEN),
        ([0.8, 0.999], FEWEST, LOSES),
        ([0.8, 1.0], FEWEST, OPEN),
        ([0.8, 0.999], FEWEST - 1, OPEN),
        (None, 100, OPEN),
    ],
)
def test_states_and_their_boundaries(interval, prompts, state):
    found = judge(1.2, interval, prompts)
    assert found.state == state
    word = {PAYS: "it pays", LOSES: "it does not pay", OPEN: "inconclusive"}[state]
    assert found.advice.startswith(word) and found.text.startswith(
        "1.20x as fast as plain decoding ("
    )
    assert judge(1.2, interval, prompts, accepted=0.0).state == LOSES, (
        "without acceptance nothing can pay"
    )


def test_how_many_prompts_would_do():
    assert (
        prompts_needed([0.9, 1.4], 10) == 38
    )  # in logarithms 0.2209 about 0.1156: 10 * 3.65, and one more
    assert "about 38 would tell" in judge(1.12, [0.9, 1.4], 10).advice
    assert prompts_needed([0.95, 1.0501], 10) is None, "thousands, for nothing"
    assert "too small to matter" in judge(1.0, [0.95, 1.0501], 10).advice
    assert "1 prompt is too few, measure at least 4" in judge(1.5, [1.5, 1.5], 1).advice
    assert "about 4 would tell" in judge(1.5, [1.4, 1.6], 3).advice


def test_that_many_prompts_do_tell():
    """Prompts drawn from one distribution: the number named for a few is about the number that a verdict takes."""
    random = np.random.default_rng(0)
    pool = [prompt(2.1 / speedup) for speedup in np.exp(random.normal(0.12, 0.3, 400))]
    named = []
    for start in range(0, 400, 10):
        figures = summarize(pool[start : start + 10])
        found = verdict_of(figures)
        if found.state == OPEN and (
            needed := prompts_needed(figures["confidence"]["speedup"]["autoregressive"], 10)
        ):
            named.append(needed)
    assert 20 < np.median(named) < 120
    assert verdict_of(summarize(pool[: 2 * int(np.median(named))])).state == PAYS


def test_the_verdict_is_on_the_faster_baseline():
    records = [prompt(1.0) for _ in range(5)]
    for one in records:
        one["sides"]["hf_generate"] = {"tokens": 21, "seconds": 0.9}
        one["sides"]["hf_assisted"] = {"tokens": 21, "seconds": 0.1}  # no plain baseline
    found = verdict_of(summarize(records))
    assert (found.state, found.figures[:38]) == (LOSES, "0.90x as fast as transformers generate")


def test_nothing_drafted_and_no_baseline_have_no_verdict():
    plain = record("a", side(21, 2.0, [(0, 0, 20)]), side(21, 2.1, [(0, 0, 20)]))
    found = verdict_of(summarize([plain] * 6))
    assert (found.state, found.figures) == ("", "") and found.advice.startswith(
        "nothing was drafted"
    )
    alone = {**prompt(1.0), "sides": {"drafter": prompt(1.0)["sides"]["drafter"]}}
    assert verdict_of(summarize([alone] * 6)).advice.startswith("no plain baseline was run")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (1.5, "training adds to n-grams alone"),
        (0.8, "n-grams alone, which need no training, are faster"),
        (1.0, "what training adds to n-grams alone is within noise"),
    ],
)
def test_a_verdict_says_what_training_adds(seconds, words):
    """The drafter takes 1 s of plain decoding's 2.1 s; n-grams alone take other seconds."""
    records = [prompt(1.0) for _ in range(5)]
    for one in records:
        one["sides"]["ngram"] = side(21, seconds, [(0, 5, 20)])
    found = verdict_of(summarize(records))
    assert found.state == PAYS
    assert found.figures.startswith("2.10x as fast as plain decoding (")
    assert f"{seconds:.2f}x as fast as n-grams alone (95 % interval" in found.figures
    assert found.advice == f"it pays here; {words}"


def test_a_verdict_names_categories_only_by_an_interval():
    """Of 4 categories one is fast, one is slow, one is slower by noise and one has too few prompts."""
    seconds = {
        "chat": [1.0] * 20,
        "code": [3.0] * 4,
        "maths": [1.5, 3.2] * 2,
        "qa": [2.2] * 3,
    }
    records = []
    for category, each in seconds.items():
        records += [prompt(value, category=category) for value in each]
    results = results_of(records)
    found = verdict_on(results)
    assert found.state == PAYS
    assert found.advice == (
        "it pays here; by category: it pays in chat, it slows down code, "
        "slower, but within noise or on too few prompts: maths (0.89x), qa (0.95x)"
    )
    alone = results_of(records[:20])
    assert verdict_on(alone).advice == "it pays here", "a single category is all prompts"
    del results["prompts"]
    assert "it pays in" not in verdict_on(results).advice, "no interval holds without the prompts"


def test_intervals_cover_what_they_say():
    """Of lognormal speed-ups on six prompts; plain percentiles cover 85 %."""
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        seconds = random.uniform(0.5, 1.5, 6)
        speedups = np.exp(random.normal(0, 0.25, 6))
        drawn = draws(6, int(random.integers(1 << 30)))
        low, high = ends((seconds * speedups)[drawn].sum(1) / seconds[drawn].sum(1), 6)
        hits += low <= np.exp(0.25**2 / 2) <= high
    assert 0.89 <= hits / 300 <= 0.98


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(3, 3.182), (5, 2.571), (12, 2.179), (1000, 1.962)]
)
def test_students_quantiles(freedom, quantile):
    assert student(0.975, freedom) == pytest.approx(quantile, rel=0.01)


def test_more_comparisons_widen():
    figures = np.random.default_rng(0).normal(size=1000)
    assert ends(figures, 10, 8)[1] > ends(figures, 10)[1] > 1.96


def test_accepted_below_needs_more_than_noise():
    good = [prompt(1.0, 1)] * 6
    bad = [prompt(1.0, 0)] * 6
    assert accepted_below(bad, good, 0.85) and not accepted_below(good, bad, 0.85)
    assert not accepted_below(good, good, 0.85) and not accepted_below(
        bad[:3] + good[:3], good[:3] + bad[:3], 0.85
    )


def test_prompts_of_a_batch_count_once():
    """They share their seconds: eight prompts in two batches are two timings, too few for an interval."""
    each = [prompt(1.0 + 0.1 * number, 1) for number in range(16)]

    def batched(size):
        return [{**record, "batch": i // size, "turn": 0} for i, record in enumerate(each)]

    def width(records):
        low, high = intervals(records, ["autoregressive"])["speedup"]["autoregressive"]
        return high - low

    assert width(batched(1)) == pytest.approx(width(each))
    assert intervals(batched(8), ["autoregressive"])["speedup"]["autoregressive"] is None
    assert intervals(batched(8), ["autoregressive"])["accepted_length"] is not None
    assert width(batched(4)) > width(batched(1))


def cell(speedup, low=None, high=None):
    interval = (
        {"confidence": {"speedup": {"autoregressive": [low, high]}}, "prompts": 9} if low else {}
    )
    return {"speedup_vs_fastest": speedup, "speedup": {"autoregressive": speedup}, **interval}


@pytest.mark.parametrize(
    ("speedups", "words"),
    [
        ((1.5, 1.2), "pays from batch size 1 to 4, no crossover seen"),
        ((1.5, 0.9), "stops paying between batch size 1 and 4"),
        ((0.9, 1.2), "starts paying between batch size 1 and 4"),
        ((0.9, 0.8), "pays at no batch size from 1 to 4"),
        (
            (1.5, 0.9, 1.1),
            "stops paying between batch size 1 and 4, starts paying between batch size 4 and 16",
        ),
        ((None, 0.9), "does not pay at batch size 4, the only one"),
        ((1.2,), "pays at batch size 1, the only one"),
        ((None, None), "not measured"),
    ],
)
def test_crossovers_in_words(speedups, words):
    points = [(4**number, cell(speedup)) for number, speedup in enumerate(speedups)]
    assert crossover("batch size", points) == words


def test_a_crossover_names_where_it_is_not_sure():
    points = [(1, cell(1.5, 1.3, 1.7)), (2, cell(1.1, 0.9, 1.3)), (4, cell(0.7, 0.6, 0.8))]
    assert (
        crossover("batch size", points)
        == "stops paying between batch size 1 and 4 (inconclusive at 2)"
    )
    assert crossover("batch size", points[1:2] * 2).startswith(
        "inconclusive at every batch size measured"
    )
    idle = {**cell(1.5, 1.3, 1.7), "acceptance_by_depth": {"joint": []}}
    assert crossover("batch size", [(1, idle)]).startswith("inconclusive"), "nothing was drafted"


def test_runs_are_compared_on_common_prompts_against_their_own_plain_decoding():
    def run(seconds, plain, questions):
        return {
            "prompts": [
                prompt(seconds * (1 + 0.1 * q), question=str(q), plain=plain) for q in questions
            ]
        }

    ratio, prompts = against(run(1.0, 2.0, range(6)), run(1.0, 4.0, range(1, 9)))
    assert prompts == 5
    assert ratio == pytest.approx((2, 2, 2)), "as fast on a machine that is half as fast"
    assert against(run(1.0, 2.0, range(3)), run(1.0, 2.0, range(3, 6))) is None


def test_outliers_are_far_from_the_others():
    usual = [prompt(1.0 + 0.02 * number, question=str(number)) for number in range(9)]
    assert outliers({"prompts": usual}) == []
    (line,) = outliers(json.loads(json.dumps({"prompts": [*usual, prompt(4.0, question="late")]})))
    assert line == "chat, question late, turn 1: 0.53x, of 1.93x at the median prompt"
    assert outliers({"prompts": [prompt(1.0)] * 3 + [prompt(9.0)]}) == [], "too few to say"
    assert outliers({}) == []
