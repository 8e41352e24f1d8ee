"""From records of single prompts to the figures of results.json; every figure is defined here.

A record is what the runner keeps of one prompt (one turn of a question):

    {"question_id", "turn", "category", "prompt_tokens",
     "sides": {"drafter": {"tokens", "seconds", "latency", "ttft", "passes", "draft_seconds", "target_seconds",
                           "rounds": [[accepted, offered, count], ...]},
               "autoregressive": {the same}, "hf_generate": {"tokens", "seconds"}},
     "identical": {"autoregressive": bool, "hf_generate": bool} or {} when sampled,
     "outputs": {"drafter": text, ...}, with each side's that differs; absent where none does,}
     "memory": bytes at most in use while the drafter's side answered (batches: the whole batch's),
     "covered": share of the answer's tokens that the drafter's vocabulary holds; left out where it holds all,
     "speculation": false where decoding.json switches the category off}

Every side's seconds are the wall-clock time of a whole generation, prefill included; prompts of one batch have equal shares
of the batch's time, while latency is how long each took. A round is one target pass after the prefill; the prefill's own
token belongs to no round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from drafttrain.inference import Generation

RESAMPLES = 1000
BASELINES = ("autoregressive", "hf_generate")
# On request: transformers' own speculative decoding. Speed-ups are claimed against the plain ones above only.
HF_SPECULATIVE = ("hf_prompt_lookup", "hf_assisted")
Record = dict[str, Any]


def side_record(generation: Generation, share: float | None = None) -> Record:
    """What is kept of a generation by our engine; times in seconds. share: of the batch's time; None where it was alone."""
    stats = generation.stats
    return {
        "tokens": stats.new_tokens,
        "seconds": round(stats.total_seconds if share is None else share, 6),
        "latency": round(stats.total_seconds, 6),
        "ttft": round(stats.prefill_seconds, 6),
        "passes": stats.target_passes,
        "draft_seconds": round(stats.draft_seconds, 6),
        "target_seconds": round(stats.target_seconds, 6),
        "rounds": [[accepted, offered, count] for (accepted, offered), count in sorted(stats.rounds.items())],
    }


def acceptance_by_depth(rounds: Counter[tuple[int, int]]) -> dict[str, list[float]]:
    """How far rounds get.

    conditional[k-1]: of the rounds that accepted at least k-1 tokens and were offered depth k, the share accepting k.
    joint[k-1]: of all rounds, the share that accepted k tokens or more. Its sum is the mean number of accepted tokens.

    Args:
        rounds: counts by (accepted, offered depth).
    """
    deepest = max((offered for _, offered in rounds), default=0)
    total = sum(rounds.values())
    conditional, joint = [], []
    for k in range(1, deepest + 1):
        reached = sum(count for (a, o), count in rounds.items() if a >= k)
        tried = sum(count for (a, o), count in rounds.items() if a >= k - 1 and o >= k)
        conditional.append(round(reached / tried, 4) if tried else 0.0)
        joint.append(round(reached / total, 4))
    return {"conditional": conditional, "joint": joint}


def accepted_length_histogram(rounds: Counter[tuple[int, int]]) -> list[int]:
    """How many rounds committed n tokens, at index n: accepted tokens and the bonus token.

    A round that EOS cut has no bonus token and counts as if it had one, since what is kept of it does not tell.

    Args:
        rounds: counts by (accepted, offered depth).
    """
    counts = [0] * (max((accepted for accepted, _ in rounds), default=-1) + 2)
    for (accepted, _), count in rounds.items():
        counts[accepted + 1] += count
    return counts


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 of values in seconds, in milliseconds; zeros without values."""
    points = np.percentile(values, (50, 95, 99)) * 1000 if len(values) else np.zeros(3)
    return {name: round(float(point), 3) for name, point in zip(("p50", "p95", "p99"), points, strict=True)}


def tokens_per_second(sides: Iterable[Record]) -> float:
    """New tokens / wall-clock seconds of whole generations, over all prompts together."""
    sides = list(sides)
    seconds = sum(side["seconds"] for side in sides)
    return round(sum(side["tokens"] for side in sides) / seconds, 3) if seconds else 0.0


def latencies(sides: Sequence[Record]) -> dict[str, dict[str, float]]:
    """ttft_ms: start to first token, per prompt. tpot_ms: mean time of each token after the first, per prompt."""
    tpot = [(side["latency"] - side["ttft"]) / (side["tokens"] - 1) for side in sides if side["tokens"] > 1]
    return {"ttft_ms": percentiles([side["ttft"] for side in sides]), "tpot_ms": percentiles(tpot)}


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """The figures of a set of prompts.

    Returns:
        prompts, tokens, target_passes: counts; tokens are all new tokens of the side with the drafter.
        accepted_length: tokens committed by rounds / rounds, the bonus token included (block efficiency, tau).
        acceptance_rate: accepted draft tokens / drafted depth offered (for a chain: accepted / proposed).
        acceptance_by_depth, accepted_length_histogram: see those functions.
        tokens_per_second, ttft_ms, tpot_ms: see those functions.
        draft_fraction: seconds in the drafter / seconds in all.
        mbsu: the memory-bound speed-up tau / (c * gamma + 1). gamma is the mean depth offered, c the cost of one draft
            step over that of one plain target step, so c * gamma = draft seconds per round / target seconds per plain
            pass. A plain pass is the autoregressive baseline's; without that baseline, the drafter side's own.
        baselines: tokens_per_second, and where known ttft_ms and tpot_ms, of each baseline.
        speedup: tokens_per_second over each baseline's; speedup_vs_fastest is the least, None without baselines.
        identical_outputs: share of prompts whose greedy output equals the autoregressive one; None if sampled or not
            measured. identical_to_hf_generate: the same against transformers' generate.
        confidence: 95 % intervals of accepted_length and of each speed-up, see `intervals`.
        peak_memory_mb: most memory in use while the drafter's side answered, on a GPU of the device, else of the process
            (with the baselines' models in it); None where no record says.
    """
    ours = [record["sides"]["drafter"] for record in records]
    rounds: Counter[tuple[int, int]] = Counter()
    for side in ours:
        for accepted, offered, count in side["rounds"]:
            rounds[accepted, offered] += count
    passes = sum(side["passes"] for side in ours)
    tokens = sum(side["tokens"] for side in ours)
    accepted = sum(a * count for (a, _), count in rounds.items())
    offered = sum(o * count for (_, o), count in rounds.items())
    draft_seconds = sum(side["draft_seconds"] for side in ours)
    tau = (tokens - len(ours)) / passes if passes else 0.0
    rate = tokens_per_second(ours)
    measured = [name for name in (*BASELINES, *HF_SPECULATIVE) if all(name in r["sides"] for r in records)]
    baselines = {name: _baseline(records, name) for name in measured}
    speedup = {name: round(rate / b["tokens_per_second"], 4) for name, b in baselines.items() if b["tokens_per_second"]}
    plain = [record["sides"]["autoregressive"] for record in records] if "autoregressive" in baselines else ours
    plain_pass = _ratio(sum(side["target_seconds"] for side in plain), sum(side["passes"] for side in plain))
    return {
        "prompts": len(records),
        "tokens": tokens,
        "target_passes": passes,
        "accepted_length": round(tau, 4),
        "acceptance_rate": round(_ratio(accepted, offered), 4),
        "acceptance_by_depth": acceptance_by_depth(rounds),
        "accepted_length_histogram": accepted_length_histogram(rounds),
        "tokens_per_second": rate,
        **latencies(ours),
        "draft_fraction": round(_ratio(draft_seconds, sum(side["seconds"] for side in ours)), 4),
        "mbsu": round(tau / (_ratio(_ratio(draft_seconds, passes), plain_pass) + 1), 4),
        "baselines": baselines,
        "speedup": speedup,
        "speedup_vs_fastest": min((speedup[name] for name in BASELINES if name in speedup), default=None),
        "identical_outputs": _identical(records, "autoregressive"),
        "identical_to_hf_generate": _identical(records, "hf_generate"),
        "confidence": intervals(records, measured),
        "peak_memory_mb": _peak(records),
    }


def intervals(records: Sequence[Record], baselines: Sequence[str], seed: int = 0) -> dict[str, Any]:
    """95 % bootstrap intervals over prompts: how far the figures would move with other prompts of the same kinds.

    Prompts are drawn with replacement RESAMPLES times, and each draw's figure is computed from its totals, as the figure
    itself is. Turns of a question count as prompts. With a single prompt there is nothing to draw, and both ends are equal.

    Args:
        baselines: that all records have.

    Returns:
        accepted_length: [low, high]; speedup: the same for each baseline.
    """
    if not records:
        return {"accepted_length": None, "speedup": {}}
    draws = np.random.default_rng(seed).integers(len(records), size=(RESAMPLES, len(records)))

    def interval(over: Sequence[float], under: Sequence[float]) -> list[float] | None:
        below = np.asarray(under, dtype=float)[draws].sum(1)
        ratios = np.asarray(over, dtype=float)[draws].sum(1)[below > 0] / below[below > 0]
        return [round(float(x), 4) for x in np.percentile(ratios, (2.5, 97.5))] if len(ratios) else None

    ours = [record["sides"]["drafter"] for record in records]
    speedup = {}
    for name in baselines:
        # Rates of totals: tokens and seconds are drawn together, per prompt.
        sums = [
            np.array([[record["sides"][side][key] for record in records] for key in ("tokens", "seconds")])[
                :, draws
            ].sum(2)
            for side in ("drafter", name)
        ]
        (tokens, seconds), (theirs, spent) = sums
        fine = (seconds > 0) & (theirs > 0)
        ratios = (tokens * spent)[fine] / (seconds * theirs)[fine]
        speedup[name] = [round(float(x), 4) for x in np.percentile(ratios, (2.5, 97.5))] if len(ratios) else None
    return {
        "accepted_length": interval([side["tokens"] - 1 for side in ours], [side["passes"] for side in ours]),
        "speedup": speedup,
    }


def _peak(records: Sequence[Record]) -> float | None:
    known = [record["memory"] for record in records if record.get("memory")]
    return round(max(known) / 2**20, 1) if known else None


def by_category(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """`summarise` for each category, in order of first appearance."""
    names = dict.fromkeys(record["category"] for record in records)
    return {name: summarise([record for record in records if record["category"] == name]) for name in names}


def _baseline(records: Sequence[Record], name: str) -> dict[str, Any]:
    sides = [record["sides"][name] for record in records]
    known = latencies(sides) if all("ttft" in side for side in sides) else {}
    return {"tokens_per_second": tokens_per_second(sides), **known}


def _identical(records: Sequence[Record], name: str) -> float | None:
    same = [record["identical"][name] for record in records if name in record["identical"]]
    return round(sum(same) / len(same), 4) if same else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
