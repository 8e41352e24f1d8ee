"""Figures that a sound measurement does not give: what else ran on the machine, a clock, or an edit
made them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from drafttrain.evaluation.baselines import BASELINES
from drafttrain.files import Json

MOST_SPREAD = 3.0  # of a plain baseline's tokens per second over the prompts
MOST_TUNE_ERROR = 0.25  # between the predicted and the measured speed-up of a tree
_LEAST_TOKENS = 16  # of an answer that counts for the spread: shorter ones are mostly prefill
# By which a measured speed-up may exceed the accepted length, its limit: in runs of at least a
# second, and in shorter ones.
_SLACK = 1.25
_SHORT_SLACK = 3.0


def implausible(results: Mapping[str, Any]) -> list[str]:
    """Why figures cannot be right, one line each; empty if nothing is wrong.

    Args:
        results: of `drafttrain eval`, `tune`, a sweep's summary, or a drafter's decoding.json.
    """
    broken = [
        f"{place}={value} is {_wrong(value)}" for place, value in _figures(results) if _wrong(value)
    ]
    if broken:
        more = ""
        if len(broken) > 1:
            more = f" (and {len(broken) - 1} more)"
        return [broken[0] + more]
    return [*_spread(results), *_tuning(results), *_speedups(results)]


def _figures(results: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every measured number with its place."""

    def walk(value: object, place: str) -> Iterator[tuple[str, float]]:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield place, value
        for key, item in (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        ):
            if key not in ("relative_error", "error", "seed"):
                yield from walk(item, f"{place}.{key}" if place else str(key))

    for key in (
        "overall",
        "categories",
        "prompts",
        "cells",
        "tuned",
        "predicted_speedup",
        "measured_speedup",
    ):
        yield from walk(results.get(key), key)


def _wrong(value: float) -> str:
    if math.isfinite(value) and value >= 0:
        return ""
    if math.isfinite(value):
        return "negative"
    return "not finite"


def _spread(results: Mapping[str, Any]) -> Iterator[str]:
    prompts: list[Json] = results.get("prompts") or []
    for name in BASELINES if isinstance(prompts, list) else ():
        rates = []
        for side in (prompt["sides"].get(name, {}) for prompt in prompts):
            # The time of the prompt's own tokens differs with its length.
            prefill = 0.0
            if "latency" in side and side["seconds"] == side["latency"]:
                prefill = side["ttft"]
            seconds = side.get("seconds", 0.0) - prefill
            if side.get("tokens", 0) >= _LEAST_TOKENS and seconds > 0:
                rates.append((side["tokens"] - (prefill > 0)) / seconds)
        if rates and max(rates) > MOST_SPREAD * min(rates):
            low = min(rates)
            high = max(rates)
            yield (
                f"{name} makes {low:.1f} to {high:.1f} tokens/s from prompt to prompt, {high / low:.1f}x apart (at most "
                f"{MOST_SPREAD:g}x): something else used the machine"
            )


def _tuning(results: Mapping[str, Any]) -> Iterator[str]:
    for figures in (results, results.get("tuned")):
        if (
            isinstance(figures, dict)
            and {"predicted_speedup", "measured_speedup"} <= figures.keys()
        ):
            predicted = figures["predicted_speedup"]
            measured = figures["measured_speedup"]
            if abs(predicted - measured) > MOST_TUNE_ERROR * measured:
                yield (
                    f"tune predicted {predicted:.2f}x and measured {measured:.2f}x, more than {MOST_TUNE_ERROR:.0%} apart: "
                    "measure again on an idle machine"
                )


def _speedups(results: Mapping[str, Any]) -> Iterator[str]:
    parts: dict[str, Json] = {
        "overall": results.get("overall", {}),
        **results.get("categories", {}),
    }
    for name, figures in parts.items():
        length = figures.get("accepted_length")
        speedup = figures.get("speedup", {})
        seconds = figures.get("tokens", 0) / max(figures.get("tokens_per_second", 0), 1e-9)
        slack = _SLACK if seconds >= 1 else _SHORT_SLACK
        if length and speedup.get("autoregressive", 0) > slack * max(length, 1):
            yield (
                f"{name}: {speedup['autoregressive']:.2f}x over plain decoding is more than {length:.2f} accepted tokens per "
                "pass allow"
            )
        for baseline, factor in speedup.items():
            rate = figures.get("baselines", {}).get(baseline, {}).get("tokens_per_second")
            if rate and abs(figures["tokens_per_second"] / rate - factor) > 0.02 * factor + 0.001:
                yield f"{name}: speed-up {factor:.2f}x over {baseline} is not the ratio of its tokens per second"
