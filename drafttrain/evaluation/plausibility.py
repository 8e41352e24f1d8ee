"""Figures that a sound measurement does not give: made by other work on the machine, or by an edit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from drafttrain.evaluation.baselines import BASELINES
from drafttrain.files import Json, value_of

MOST_SPREAD = 3.0  # of a plain baseline's tokens per second over the prompts
MOST_TUNE_ERROR = 0.25  # between the predicted and the measured speed-up of a tree
_LEAST_TOKENS = 16  # of an answer that counts for the spread: shorter ones are mostly prefill
# By which a measured speed-up may exceed the accepted length, its limit: in runs of at least a
# second, and in shorter ones.
_SLACK = 1.25
_SHORT_SLACK = 3.0
_MEASURED = (
    "overall",
    "categories",
    "prompts",
    "cells",
    "tuned",
    "predicted_speedup",
    "measured_speedup",
)
_SIGNED = ("relative_error", "error", "seed")  # keys of numbers that may be negative


def implausible(results: Mapping[str, Any]) -> list[str]:
    """Why figures cannot be right, one line each; empty if nothing is wrong.

    Args:
        results: of `drafttrain eval`, `tune`, a sweep's summary, or a drafter's decoding.json.
    """
    broken = []
    for key in _MEASURED:
        for place, value in _numbers(results.get(key), key):
            if not math.isfinite(value):
                broken.append(f"{place}={value} is not finite")
            elif value < 0:
                broken.append(f"{place}={value} is negative")
    if len(broken) > 1:
        return [f"{broken[0]} (and {len(broken) - 1} more)"]
    if broken:
        return broken
    return [*_spread(results), *_tuning(results), *_speedups(results)]


def _numbers(value: object, place: str) -> Iterator[tuple[str, float]]:
    """Every number in a JSON value with its place."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield place, value
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        if key not in _SIGNED:
            yield from _numbers(item, f"{place}.{key}")


def _spread(results: Mapping[str, Any]) -> Iterator[str]:
    """Plain decoding whose speed differs too much from prompt to prompt."""
    prompts: list[Json] = value_of(results, "prompts", [])
    if not isinstance(prompts, list):  # of tune: their number
        return
    for name in BASELINES:
        rates = []
        for prompt in prompts:
            side = prompt["sides"].get(name, {})
            seconds = side.get("seconds", 0.0)
            tokens = side.get("tokens", 0)
            enough = tokens >= _LEAST_TOKENS
            # The prompt's own pass differs with its length, so it is left out where it is known.
            if "latency" in side and seconds == side["latency"] and side["ttft"]:
                seconds -= side["ttft"]
                tokens -= 1
            if enough and seconds > 0:
                rates.append(tokens / seconds)
        if rates and max(rates) > MOST_SPREAD * min(rates):
            low = min(rates)
            high = max(rates)
            yield (
                f"{name} makes {low:.1f} to {high:.1f} tokens/s from prompt to prompt, "
                f"{high / low:.1f}x apart (at most {MOST_SPREAD:g}x): something else used the machine"
            )


def _tuning(results: Mapping[str, Any]) -> Iterator[str]:
    """A predicted speed-up that lies far from the measured one."""
    for figures in (results, results.get("tuned")):
        if not isinstance(figures, dict):
            continue
        predicted = figures.get("predicted_speedup")
        measured = figures.get("measured_speedup")
        if predicted is None or measured is None:
            continue
        if abs(predicted - measured) > MOST_TUNE_ERROR * measured:
            yield (
                f"tune predicted {predicted:.2f}x and measured {measured:.2f}x, "
                f"more than {MOST_TUNE_ERROR:.0%} apart: measure again on an idle machine"
            )


def _speedups(results: Mapping[str, Any]) -> Iterator[str]:
    """Speed-ups beyond the accepted length, or other than the ratio of their rates."""
    parts: dict[str, Json] = {
        "overall": results.get("overall", {}),
        **results.get("categories", {}),
    }
    for name, figures in parts.items():
        length = figures.get("accepted_length")
        speedup = figures.get("speedup", {})
        # Of the whole run: short runs are noisier.
        seconds = figures.get("tokens", 0) / max(figures.get("tokens_per_second", 0), 1e-9)
        slack = _SLACK if seconds >= 1 else _SHORT_SLACK
        if length and speedup.get("autoregressive", 0) > slack * max(length, 1):
            yield (
                f"{name}: {speedup['autoregressive']:.2f}x over plain decoding is more than "
                f"{length:.2f} accepted tokens per pass allow"
            )
        for baseline, factor in speedup.items():
            rate = figures.get("baselines", {}).get(baseline, {}).get("tokens_per_second")
            if rate and abs(figures["tokens_per_second"] / rate - factor) > 0.02 * factor + 0.001:
                yield (
                    f"{name}: speed-up {factor:.2f}x over {baseline} "
                    "is not the ratio of its tokens per second"
                )
