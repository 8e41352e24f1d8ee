"""Which figures are flagged, that our own results are not, and that a push stops at them."""

from __future__ import annotations

import copy
import re
from random import Random

import pytest
from hypothesis import given

from drafttrain.evaluation.plausibility import implausible
from drafttrain.reports.report import identity_line, print_results, warnings_of
from drafttrain.reports.report_page import page, run_names
from tests.files import ROOT, load_json
from tests.fuzz import fuzz, seeds

OWN = sorted((ROOT / "eval" / "results").rglob("*.json"))
RESULTS = load_json(ROOT / "eval" / "results" / "quickstart_smollm2-135m_zen5_cpu.json")


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_our_own_results_are_plausible(path):
    assert implausible(load_json(path)) == []


def changed(**places: object) -> dict:
    """The results with values at dotted places."""
    results = copy.deepcopy(RESULTS)
    for place, value in places.items():
        *parents, last = place.split("__")
        holder = results
        for key in parents:
            holder = holder[int(key)] if isinstance(holder, list) else holder[key]
        holder[last] = value
    return results


def slower(factor: float, side: str) -> dict:
    results = copy.deepcopy(RESULTS)
    for key in ("seconds", "latency"):
        if key in results["prompts"][3]["sides"][side]:
            results["prompts"][3]["sides"][side][key] *= factor
    return results


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        (
            slower(5, "autoregressive"),
            "autoregressive makes .* tokens/s from prompt to prompt, .*x apart",
        ),
        (slower(5, "hf_generate"), "hf_generate makes"),
        (
            {"predicted_speedup": 1.3, "measured_speedup": 1.0},
            "predicted 1.30x and measured 1.00x, more than 25% apart",
        ),
        (
            {"tree": "chain:2", "tuned": {"predicted_speedup": 1.0, "measured_speedup": 1.5}},
            "predicted 1.00x",
        ),
        (
            changed(overall__tokens_per_second=float("nan")),
            "overall.tokens_per_second=nan is not finite",
        ),
        (changed(overall__tokens_per_second=-3.0), "is negative"),
        (
            changed(overall__speedup={"autoregressive": 40.0}),
            "40.00x over plain decoding is more than",
        ),
        (
            changed(overall__speedup={"hf_generate": 40.0}),
            "is not the ratio of its tokens per second",
        ),
        ({"cells": [{"speedup": float("inf")}]}, "cells.0.speedup=inf is not finite"),
    ],
)
def test_each_kind_is_named(results, reason):
    (first, *_) = implausible(results)
    assert re.search(reason, first), first


def test_small_differences_are_no_reason():
    assert not implausible(slower(1.5, "autoregressive"))
    assert not implausible({"predicted_speedup": 1.2, "measured_speedup": 1.0})
    assert not implausible({"predicted_speedup": 0.8, "measured_speedup": 1.0})
    assert not implausible({})


@fuzz(examples=36)
@given(seed=seeds())
def test_no_measured_figure_may_be_negative_or_not_finite(seed):
    random = Random(seed)
    results = copy.deepcopy({key: RESULTS[key] for key in ("overall", "prompts")})
    results["prompts"] = results["prompts"][:2]
    places: list[tuple] = []

    def walk(value: object) -> None:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):  # type: ignore[arg-type]
            if isinstance(item, float):
                places.append((value, key))
            elif isinstance(item, (dict, list)):
                walk(item)

    walk(results)
    holder, key = random.choice(places)
    holder[key] = random.choice([float("nan"), float("inf"), -float("inf"), -1.0])
    assert implausible(results)


def test_the_table_and_the_page_show_them(capsys):
    results = slower(5, "autoregressive")
    print_results(results)
    assert "implausible: autoregressive makes" in capsys.readouterr().out
    html = page(
        [results],
        run_names([results], ["a.json"]),
        [],
        [[identity_line(results), *warnings_of(results)]],
    )
    assert "Implausible: autoregressive makes" in html and 'class="bad"' in html
    assert "Implausible" not in page(
        [RESULTS], ["a"], [], [[identity_line(RESULTS), *warnings_of(RESULTS)]]
    )
