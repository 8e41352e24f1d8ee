from __future__ import annotations

from collections import Counter

import pytest

from drafttrain.evaluation.metrics import (
    acceptance_by_depth,
    accepted_length_histogram,
    by_category,
    intervals,
    percentiles,
    summarize,
)
from tests.evaluation.records import OURS, PLAIN, record, side


def test_acceptance_by_depth():
    got = acceptance_by_depth(Counter({(0, 0): 1, (0, 2): 1, (1, 2): 1, (2, 2): 2}))
    assert got == {"conditional": [0.75, 0.6667], "joint": [0.6, 0.4]}
    assert acceptance_by_depth(Counter()) == {"conditional": [], "joint": []}


def test_histogram_of_rounds():
    assert accepted_length_histogram(Counter({(0, 0): 1, (0, 2): 1, (1, 2): 1, (2, 2): 2})) == [
        0,
        2,
        1,
        2,
    ]
    assert summarize([record("a", OURS, PLAIN)])["accepted_length_histogram"] == [0, 2, 1, 2]
    assert sum(accepted_length_histogram(Counter())) == 0


def test_a_depth_that_nothing_reached_is_zero():
    assert acceptance_by_depth(Counter({(0, 2): 3})) == {
        "conditional": [0.0, 0.0],
        "joint": [0.0, 0.0],
    }


def test_figures_by_hand():
    got = summarize([record("a", OURS, PLAIN)])
    assert (got["prompts"], got["tokens"], got["target_passes"]) == (1, 11, 5)
    assert got["accepted_length"] == 2.0
    assert got["accepted_length"] == pytest.approx(1 + sum(got["acceptance_by_depth"]["joint"]))
    assert got["acceptance_rate"] == 5 / 8
    assert got["tokens_per_second"] == 5.5
    assert got["ttft_ms"]["p50"] == 100.0
    assert got["tpot_ms"]["p50"] == 190.0
    assert got["draft_fraction"] == 0.25
    # a draft round costs 0.1 s, a plain pass 0.3 s
    assert got["mbsu"] == pytest.approx(2.0 / (0.1 / 0.3 + 1), abs=1e-4)
    assert got["baselines"]["autoregressive"]["tokens_per_second"] == 2.75
    assert got["speedup"] == {"autoregressive": 2.0}
    assert got["identical_outputs"] == 1.0
    assert got["identical_to_hf_generate"] is None


def test_rates_are_of_totals_not_means_of_rates():
    quick = side(10, 1.0, [(0, 0, 9)])
    slow = side(10, 9.0, [(0, 0, 9)])
    assert (
        summarize([record("a", quick, PLAIN), record("a", slow, PLAIN)])["tokens_per_second"] == 2.0
    )


def test_without_baselines():
    got = summarize([record("a", OURS)])
    assert (got["baselines"], got["speedup"], got["speedup_vs_fastest"]) == ({}, {}, None)
    assert got["identical_outputs"] is None
    assert got["mbsu"] == pytest.approx(2.0 / (0.1 / 0.2 + 1), abs=1e-4)


def test_an_answer_of_one_token_has_no_rounds():
    got = summarize([record("a", side(1, 0.2))])
    assert (got["accepted_length"], got["acceptance_rate"], got["tpot_ms"]["p50"]) == (
        0.0,
        0.0,
        0.0,
    )


def test_categories_keep_their_order_and_share_of_identical_outputs():
    got = by_category(
        [record("b", OURS, PLAIN), record("a", OURS, PLAIN, same=False), record("b", OURS, PLAIN)]
    )
    assert list(got) == ["b", "a"]
    assert (got["b"]["prompts"], got["b"]["identical_outputs"], got["a"]["identical_outputs"]) == (
        2,
        1.0,
        0.0,
    )


def test_intervals_hold_what_other_prompts_would_give():
    alike = intervals([record("a", OURS, PLAIN)] * 5, ["autoregressive"])
    assert alike == {
        "accepted_length": [2.0, 2.0],
        "speedup": {"autoregressive": [2.0, 2.0]},
        "decoding_speedup": {"autoregressive": [2.0526, 2.0526]},
    }
    good = side(31, 2.0, [(2, 2, 10)])
    mixed = [record("a", OURS, PLAIN), record("a", good, side(31, 12.0, [(0, 0, 30)]))] * 10
    got = intervals(mixed, ["autoregressive"])
    assert got == intervals(mixed, ["autoregressive"])  # seeded
    whole = summarize(mixed)
    for figure, (low, high) in (
        (whole["accepted_length"], got["accepted_length"]),
        (whole["speedup"]["autoregressive"], got["speedup"]["autoregressive"]),
    ):
        assert low < figure < high
    assert whole["confidence"] == got
    # Few prompts say less than many of the same.
    few = intervals(mixed[:4], ["autoregressive"])["accepted_length"]
    assert few[1] - few[0] > got["accepted_length"][1] - got["accepted_length"][0]
    assert intervals([], []) == {"accepted_length": None, "speedup": {}, "decoding_speedup": {}}


def test_decoding_is_compared_after_the_first_token():
    """The first token takes 0.1 s on either side: requests gain less than decoding does."""
    hf = {"tokens": 11, "seconds": 2.5}
    got = summarize([record("a", OURS, PLAIN, hf, ngram=side(11, 2.75, [(0, 0, 10)]))] * 5)
    assert got["speedup"] == {"autoregressive": 2.0, "ngram": 1.375, "hf_generate": 1.25}
    assert got["decoding_speedup"] == {"autoregressive": 2.0526, "ngram": 1.3947}
    assert got["confidence"]["decoding_speedup"]["ngram"] == [1.3947, 1.3947]
    assert got["speedup_vs_fastest"] == 1.25, "n-grams are no plain baseline"
    assert got["prompt_lengths"] == {"mean": 50.0, "least": 50, "most": 50}
    assert got["answer_lengths"] == {"mean": 11.0, "least": 11, "most": 11}


def test_prompts_of_a_batch_share_the_seconds_of_its_decoding():
    """Two prompts at a time: each has half of the batch's seconds, and half of its first token's."""
    ours = {**side(11, 1.0), "latency": 2.0, "ttft": 0.5}
    plain = {**side(11, 2.0), "latency": 4.0, "ttft": 0.5}
    got = summarize([record("a", ours, plain)])
    assert got["decoding_speedup"] == {"autoregressive": round(3.5 / 1.5, 4)}


def test_peak_memory_is_that_of_the_hungriest_prompt():
    records = [{**record("a", OURS, PLAIN), "memory": size * 2**20} for size in (100, 300, 200)]
    assert summarize(records)["peak_memory_mb"] == 300.0
    assert summarize([record("a", OURS, PLAIN)])["peak_memory_mb"] is None


def test_percentiles_in_milliseconds():
    assert percentiles([i / 1000 for i in range(101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
