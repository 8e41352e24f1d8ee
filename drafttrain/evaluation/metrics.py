"""Figures of results.json, computed from records of single prompts, and the files with both.

Every figure is defined here. A record holds one prompt: `results_schema.PromptRecord`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafttrain.drafters.kinds import split_name
from drafttrain.errors import UserError
from drafttrain.evaluation.baselines import ALL_BASELINES, BASELINES
from drafttrain.evaluation.resampling import FEWEST, Amounts, draws, ends, paired_ratio
from drafttrain.evaluation.results_schema import (
    EngineSide,
    PartialLine,
    PromptRecord,
    Results,
    SweepSummary,
    TrainingRecord,
)
from drafttrain.files import Json, JsonlLog, check_json, read_json
from drafttrain.inference import Generation

Record = Mapping[str, Any]  # a PromptRecord
Side = Mapping[str, Any]  # an EngineSide or a PlainSide
Rounds = Counter[tuple[int, int]]  # counts by (accepted tokens, offered depth)


def side_record(generation: Generation, share: float | None = None) -> EngineSide:
    """The record of a generation by our engine.

    Args:
        share: the prompt's share of a batch's seconds, None if it is alone.
    """
    stats = generation.stats
    seconds = stats.total_seconds
    if share is not None:
        seconds = share
    rounds = []
    for (accepted, offered), count in sorted(stats.rounds.items()):
        rounds.append([accepted, offered, count])
    return EngineSide(
        tokens=stats.new_tokens,
        seconds=round(seconds, 6),
        latency=round(stats.total_seconds, 6),
        ttft=round(stats.prefill_seconds, 6),
        passes=stats.target_passes,
        draft_seconds=round(stats.draft_seconds, 6),
        target_seconds=round(stats.target_seconds, 6),
        rounds=rounds,
    )


def rounds_of(records: Iterable[Record]) -> Rounds:
    """Adds up the rounds of the drafter's side."""
    rounds: Rounds = Counter()
    for record in records:
        for accepted, offered, count in record["sides"]["drafter"]["rounds"]:
            rounds[accepted, offered] += count
    return rounds


def acceptance_by_depth(rounds: Rounds) -> dict[str, list[float]]:
    """Acceptance at each depth.

    conditional[k-1]: of the rounds that accepted at least k-1 tokens and offered depth k, the share
    that accepted k. joint[k-1]: of all rounds, the share that accepted at least k tokens. Its sum
    is the mean number of accepted tokens.
    """
    deepest = max((offered for _, offered in rounds), default=0)
    total = sum(rounds.values())
    conditional = []
    joint = []
    for k in range(1, deepest + 1):
        reached = 0  # rounds that accepted k tokens
        tried = 0  # rounds that accepted k - 1 and offered depth k
        for (accepted, offered), count in rounds.items():
            if accepted >= k:
                reached += count
            if accepted >= k - 1 and offered >= k:
                tried += count
        conditional.append(round(_ratio(reached, tried), 4))
        joint.append(round(reached / total, 4))
    return {"conditional": conditional, "joint": joint}


def accepted_length_histogram(rounds: Rounds) -> list[int]:
    """Number of rounds that committed n tokens, at index n: accepted tokens plus the bonus token.

    A round that EOS cuts has no bonus token but counts as if it had one: the record does not
    distinguish it.
    """
    most = max((accepted for accepted, _ in rounds), default=-1)
    counts = [0] * (most + 2)  # index 0, and one more for the bonus token
    for (accepted, _), count in rounds.items():
        counts[accepted + 1] += count
    return counts


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 in milliseconds; zeros for an empty list."""
    points = np.zeros(3)
    if len(seconds):
        points = np.percentile(seconds, (50, 95, 99)) * 1000
    p50, p95, p99 = (round(float(point), 3) for point in points)
    return {"p50": p50, "p95": p95, "p99": p99}


def tokens_per_second(sides: Sequence[Side]) -> float:
    """New tokens / wall-clock seconds, prefill included, summed over prompts."""
    return round(_ratio(_sum(sides, "tokens"), _sum(sides, "seconds")), 3)


def latencies(sides: Sequence[Side]) -> dict[str, dict[str, float]]:
    """Percentiles over prompts of ttft_ms and tpot_ms.

    ttft_ms: time to first token. tpot_ms: mean time per token after the first.
    """
    tpot = []
    for side in sides:
        if side["tokens"] > 1:
            tpot.append((side["latency"] - side["ttft"]) / (side["tokens"] - 1))
    return {"ttft_ms": percentiles([side["ttft"] for side in sides]), "tpot_ms": percentiles(tpot)}


def summarize(records: Sequence[Record]) -> Json:
    """Computes the figures of a set of prompts.

    Returns:
        prompts, tokens, target_passes: counts; tokens are the new tokens of the drafter's side.
        accepted_length: tokens committed by rounds / rounds, bonus token included (block
            efficiency, tau).
        acceptance_rate: accepted draft tokens / offered depth (for a chain: accepted / proposed).
        acceptance_by_depth, accepted_length_histogram, tokens_per_second, ttft_ms, tpot_ms: see the
            functions above.
        draft_fraction: seconds in the drafter / total seconds.
        mbsu: memory-bound speed-up tau / (c * gamma + 1). gamma is the mean offered depth, c the
            cost of one draft step over one plain target step; so c * gamma = draft seconds per
            round / target seconds per plain pass. The plain pass is the autoregressive baseline's,
            or the drafter side's own if that baseline is missing.
        baselines: tokens_per_second of each baseline, and ttft_ms and tpot_ms if known.
        speedup: tokens_per_second over each baseline's; speedup_vs_fastest is the smallest over a
            plain one, None without. decoding_speedup: the same after the first tokens, where a
            baseline's are timed.
        prompt_lengths, answer_lengths: mean, least and most tokens.
        identical_outputs, identical_to_hf_generate: share of prompts whose greedy output equals the
            baseline's; None if sampled or not measured.
        confidence: 95 % intervals of accepted_length and of each speed-up, see `intervals`.
        peak_memory_mb: of the drafter's side, on a GPU of the device, on a CPU of the process
            (baselines' models included); None if unknown.
    """
    ours = _sides(records, "drafter")
    rounds = rounds_of(records)
    accepted = sum(taken * count for (taken, _), count in rounds.items())
    offered = sum(depth * count for (_, depth), count in rounds.items())
    passes = _sum(ours, "passes")
    tokens = _sum(ours, "tokens")
    rate = tokens_per_second(ours)
    tau = _ratio(tokens - len(ours), passes)  # prefills give the first tokens

    measured = []  # baselines that every prompt has
    for name in ALL_BASELINES:
        if all(name in record["sides"] for record in records):
            measured.append(name)
    baselines: dict[str, Json] = {}
    speedup = {}
    decoding_speedup = {}
    for name in measured:
        sides = _sides(records, name)
        theirs = tokens_per_second(sides)
        baselines[name] = {"tokens_per_second": theirs}
        if theirs:
            speedup[name] = round(rate / theirs, 4)
        if _is_timed(sides):
            baselines[name] |= latencies(sides)
            decoding = _decoding_rate(sides)
            if decoding:
                decoding_speedup[name] = round(_decoding_rate(ours) / decoding, 4)
    plain_speedups = [speedup[name] for name in BASELINES if name in speedup]

    plain = ours
    if "autoregressive" in baselines:
        plain = _sides(records, "autoregressive")
    plain_pass = _ratio(_sum(plain, "target_seconds"), _sum(plain, "passes"))  # seconds
    draft_seconds = _sum(ours, "draft_seconds")
    # c * gamma, see above
    drafting = _ratio(_ratio(draft_seconds, passes), plain_pass)

    memory = [record["memory"] for record in records if record.get("memory")]
    peak = None
    if memory:
        peak = round(max(memory) / 2**20, 1)
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
        "draft_fraction": round(_ratio(draft_seconds, _sum(ours, "seconds")), 4),
        "mbsu": round(tau / (drafting + 1), 4),
        "baselines": baselines,
        "speedup": speedup,
        "decoding_speedup": decoding_speedup,
        "prompt_lengths": _lengths([record["prompt_tokens"] for record in records]),
        "answer_lengths": _lengths([side["tokens"] for side in ours]),
        "speedup_vs_fastest": min(plain_speedups, default=None),
        "identical_outputs": _identical(records, "autoregressive"),
        "identical_to_hf_generate": _identical(records, "hf_generate"),
        "confidence": intervals(records, measured),
        "peak_memory_mb": peak,
    }


def _work(sides: Iterable[Side], decoding: bool) -> tuple[list[float], list[float]]:
    """Tokens and seconds of each answer; with `decoding` those after its first token.

    Prompts of a batch share the seconds of its decoding as they share all of them.
    """
    tokens = []
    seconds = []
    for side in sides:
        if decoding:
            share = _ratio(side["latency"] - side["ttft"], side["latency"])
            tokens.append(side["tokens"] - 1)
            seconds.append(side["seconds"] * share)
        else:
            tokens.append(side["tokens"])
            seconds.append(side["seconds"])
    return tokens, seconds


def intervals(records: Sequence[Record], baselines: Sequence[str], comparisons: int = 1) -> Json:
    """Computes 95 % bootstrap intervals: how far figures would move on other such prompts.

    Computes each figure from the totals of drawn prompts (`evaluation/resampling.py`). Turns of a
    question count as prompts. With a single prompt both ends are equal.

    Args:
        baselines: names that all records have. comparisons: number of such sets whose intervals
            must hold together.

    Returns:
        accepted_length: [low, high]; speedup, decoding_speedup: the same for each baseline.
    """
    found: Json = {"accepted_length": None, "speedup": {}, "decoding_speedup": {}}
    if not records:
        return found

    # Prompts that were answered at once share their seconds, so batches are drawn, not prompts.
    number_of: dict[object, int] = {}
    batches = []  # of each record: the number of its batch
    for index, record in enumerate(records):
        key: object = index
        if "batch" in record:
            key = (record["batch"], record["turn"])
        batches.append(number_of.setdefault(key, len(number_of)))
    too_few = len(number_of) < min(FEWEST, len(records))

    def interval(over: Sequence[Amounts], under: Sequence[Amounts]) -> list[float] | None:
        if not all(map(any, under)):
            return None
        ratio = paired_ratio(over, under, comparisons)
        return [round(ratio.low, 4), round(ratio.high, 4)]

    def faster(name: str, decoding: bool) -> list[float] | None:
        """The interval of the drafter's rate over a baseline's."""
        if too_few:
            return None
        ours = [np.bincount(batches, each) for each in _work(_sides(records, "drafter"), decoding)]
        theirs = [np.bincount(batches, each) for each in _work(_sides(records, name), decoding)]
        return interval([ours[0], theirs[1]], [ours[1], theirs[0]])

    ours = _sides(records, "drafter")
    found["accepted_length"] = interval(
        [[side["tokens"] - 1 for side in ours]],
        [[side["passes"] for side in ours]],
    )
    for name in baselines:
        found["speedup"][name] = faster(name, decoding=False)
        if _is_timed(_sides(records, name)):
            found["decoding_speedup"][name] = faster(name, decoding=True)
    return found


def _is_timed(sides: Sequence[Side]) -> bool:
    """Whether it is known when the first token of each of a side's answers came."""
    return all("ttft" in side for side in sides)


def _decoding_rate(sides: Sequence[Side]) -> float:
    """Tokens per second of a side after its first tokens; 0 if no answer has two."""
    tokens, seconds = _work(sides, decoding=True)
    return _ratio(sum(tokens), sum(seconds))


def _lengths(counts: Sequence[int]) -> Json:
    mean = round(_ratio(sum(counts), len(counts)), 1)
    return {"mean": mean, "least": min(counts, default=0), "most": max(counts, default=0)}


def accepted_below(
    part: Sequence[Record],
    rest: Sequence[Record],
    share: float,
    comparisons: int = 1,
) -> bool:
    """Whether a part of the prompts accepts less than `share` of what the rest accepts.

    Compares accepted tokens per round, beyond noise.
    """

    def sampled(records: Sequence[Record], seed: int) -> np.ndarray:  # [RESAMPLES] float64
        sides = _sides(records, "drafter")
        tokens = np.array([side["tokens"] for side in sides], float)
        passes = np.array([side["passes"] for side in sides], float)
        drawn = draws(len(records), seed)
        accepted = tokens - 1 - passes  # without first tokens and bonus tokens
        return accepted[drawn].sum(1) / np.maximum(passes[drawn].sum(1), 1)

    differences = sampled(part, 1) - share * sampled(rest, 2)
    prompts = min(len(part), len(rest))
    return ends(differences, prompts, comparisons)[1] < 0


def records_by_category(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each category, in order of first appearance."""
    parts: dict[str, list[Record]] = {}
    for record in records:
        parts.setdefault(record["category"], []).append(record)
    return parts


def by_category(records: Sequence[Record]) -> dict[str, Json]:
    """`summarize` for each category, in order of first appearance."""
    return {name: summarize(part) for name, part in records_by_category(records).items()}


def _sides(records: Sequence[Record], name: str) -> list[Side]:
    return [record["sides"][name] for record in records]


def _identical(records: Sequence[Record], name: str) -> float | None:
    """Share of the prompts that were compared with a baseline whose tokens are the same."""
    compared = 0
    same = 0
    for record in records:
        if name in record["identical"]:
            compared += 1
            same += record["identical"][name]
    if not compared:  # sampled, or not measured
        return None
    return round(same / compared, 4)


def _sum(sides: Iterable[Side], key: str) -> float:
    return sum(side[key] for side in sides)


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return 0.0


# -- files -----------------------------------------------------------------------------------------


def fingerprint(settings: Mapping[str, object]) -> str:
    """Hashes everything that a record depends on."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def folder_state(name: str) -> list[tuple[str, int, int]]:
    """Name, size and modification time of a model folder's files.

    Tells a retrained model from the earlier one.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return []
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            state = path.stat()
            found.append((path.name, state.st_size, state.st_mtime_ns))
    return found


def training_record(drafter: str) -> Json:
    """The training.json in a drafter's folder; empty without one. Raises UserError: a damaged one."""
    return read_training(Path(split_name(drafter)[0]).expanduser())


def read_training(folder: Path) -> Json:
    """See `training_record`."""
    path = folder / "training.json"
    if not path.is_file():
        return {}
    fix = "restore that file, or delete it and go without its figures"
    return {**read_json(path, "training", fix, TrainingRecord)}


def is_sweep(content: Json) -> bool:
    """Whether the content of a JSON file is a sweep's summary rather than results."""
    return "cells" in content


def load_results(name: str, sweeps: bool = False) -> Json:
    """Reads a results file; with `sweeps` also a sweep's summary.

    Raises:
        UserError: missing, damaged, or other content.
    """
    path = Path(name).expanduser()
    fix = "give a file that drafttrain eval wrote"
    content: Json = read_json(path, "results", fix)
    if not is_sweep(content):
        check_json(content, f"results={name!r}", fix, Results)
    elif sweeps:
        check_json(content, f"results={name!r}", fix, SweepSummary)
    else:
        raise UserError(
            f"results={name!r} is a sweep's summary; "
            "give the results of one of its cells, which are in the same folder"
        )
    return content


def partial_file(output: Path) -> Path:
    """The file of an evaluation's log, until its results are complete."""
    return output.with_name(output.name + ".partial.jsonl")


def open_log(output: Path, key: str) -> JsonlLog:
    """The log of an evaluation: a line for the tree search, and one for each finished question.

    A log of other settings is begun again.

    Args:
        key: hash of the settings.

    Raises:
        UserError: it cannot be written, or contains a damaged line.
    """
    return JsonlLog(partial_file(output), {"settings": key}, PartialLine, overwrite=True)


def saved_records(log: JsonlLog) -> dict[str, list[PromptRecord]]:
    """The records of the finished questions in a log, by question key."""
    found = {}
    for row in log.rows:
        if row.keys() >= {"question", "records"}:
            found[row["question"]] = row["records"]
    return found
