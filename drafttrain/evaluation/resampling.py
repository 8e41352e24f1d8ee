"""Bootstrap intervals over prompts, which eval, tune and the diagnosis share.

Prompts are drawn with replacement. What was measured on a prompt stays together, so differences
between prompts cancel in ratios of two sides. Percentiles of few prompts are too narrow: they are
moved outwards as far as Student's t is wider than the normal distribution.

Source: Hesterberg 2015, "What Teachers Should Know about the Bootstrap", arXiv 1411.5279, expanded
percentile interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

RESAMPLES = 1000
FEWEST = 4  # prompts, or batches of them, that a verdict needs
ERROR = 0.05  # chance that an interval misses
_LEAST = 1e-9  # smallest divisor

Amounts = Sequence[float] | np.ndarray  # one per prompt, or per batch of them


class Ratio(NamedTuple):
    """How many times as fast one side is as another, with its 95 % interval over prompts."""

    value: float
    low: float
    high: float


def draws(prompts: int, seed: int = 0) -> np.ndarray:
    """Indices of the drawn prompts, [RESAMPLES, prompts] int64."""
    return np.random.default_rng(seed).integers(prompts, size=(RESAMPLES, prompts))


def totals(amounts: Amounts, drawn: np.ndarray) -> np.ndarray:
    """Sums of a prompt's amounts over drawn prompts [..., n] -> [...] float64, never 0."""
    sums = np.array(amounts, float)[drawn].sum(-1)
    return np.maximum(sums, _LEAST)


def paired_ratio(
    over: Sequence[Amounts],
    under: Sequence[Amounts],
    comparisons: int = 1,
) -> Ratio:
    """Ratio of totals over prompts, with its interval; the amounts of a prompt are drawn together.

    Resamples without anything to divide by are left out.

    Args:
        comparisons: number of intervals that must hold together.
        over: amounts per prompt, whose totals are multiplied. under: amounts per prompt, by whose
            totals is divided. Tokens of one side and seconds of the other are `over` in a ratio of
            rates.
    """
    prompts = len(over[0])
    # The first row is the figure itself, the others are the resamples.
    drawn = np.vstack([np.arange(prompts), draws(prompts)])  # [1 + RESAMPLES, prompts]
    ratios = np.ones(len(drawn))
    for amounts in over:
        ratios *= totals(amounts, drawn)
    valid = np.ones(len(drawn), bool)
    for amounts in under:
        divisors = totals(amounts, drawn)
        ratios /= divisors
        valid &= divisors > _LEAST
    low, high = ends(ratios[1:][valid[1:]], prompts, comparisons)
    return Ratio(float(ratios[0]), low, high)


def ends(figures: np.ndarray, prompts: int, comparisons: int = 1) -> tuple[float, float]:
    """The ends of a figure's 95 % interval.

    Args:
        figures: one per resample. prompts: number of drawn prompts. comparisons: number of
            intervals that must hold together (Bonferroni).
    """
    count = max(prompts, 2)
    quantile = student(1 - ERROR / 2 / comparisons, count - 1)
    # Percentiles of the bootstrap are as narrow as sqrt((n - 1) / n) of a normal's.
    tail = NormalDist().cdf(-math.sqrt(count / (count - 1)) * quantile)
    low, high = np.percentile(figures, (100 * tail, 100 * (1 - tail)))
    return float(low), float(high)


def student(share: float, freedom: int) -> float:
    """A quantile of Student's t, by expansion 26.7.5 of Abramowitz and Stegun.

    95 % intervals are within 1 % from 3 degrees of freedom on, stricter ones up to 11 % too wide.
    """
    z = NormalDist().inv_cdf(share)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def lengths_ratio(
    before: Sequence[list[int]], after: Sequence[list[int]]
) -> tuple[Ratio, float, float]:
    """Ratio of accepted lengths, paired by answer, and both lengths. Each: [committed, passes]."""
    # [committed of each answer, passes of each answer], from pairs.
    amounts_before = [list(amounts) for amounts in zip(*before, strict=True)]
    amounts_after = [list(amounts) for amounts in zip(*after, strict=True)]
    # (committed after / passes after) / (committed before / passes before), as one quotient.
    ratio = paired_ratio(
        [amounts_after[0], amounts_before[1]],
        [amounts_after[1], amounts_before[0]],
    )
    lengths = []
    for committed, passes in (amounts_before, amounts_after):
        lengths.append(round(sum(committed) / max(sum(passes), 1), 4))
    return ratio, lengths[0], lengths[1]
