"""Figures of results.json, computed from records of single prompts, and the files with both. Every
figure is defined here.

A record holds one prompt (one turn of a question):

    {"question_id", "turn", "category", "prompt_tokens",
     "sides": {"drafter": {"tokens", "seconds", "latency", "ttft", "passes", "draft_seconds",
     "target_seconds",
                           "rounds": [[accepted, offered, count], ...]},
               "autoregressive": {the same}, "hf_generate": {"tokens", "seconds"}},
     "identical": {"autoregressive": bool, "hf_generate": bool} or {} when sampled,
     "outputs": {"drafter": text, ...}, with the text of each side that differs; absent if none
     does,
     "memory": peak bytes in use while the drafter's side answered (in a batch: of the whole batch),
     "covered": share of the answer's tokens that the drafter can propose; absent if its vocabulary
     is complete,
     "speculation": false if decoding.json switches the category off}

`seconds` is the wall-clock time of a generation, prefill included; the prompts of a batch get equal
shares of the batch's time. `latency` is the time until the prompt's last token. A round is one
target pass after the prefill; the prefill's own token belongs to no round.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from drafttrain.drafters.kinds import split_name
from drafttrain.errors import UserError
from drafttrain.evaluation.baselines import ALL_BASELINES, BASELINES
from drafttrain.evaluation.resampling import FEWEST, draws, ends
from drafttrain.evaluation.results_schema import PartialLine, Results, SweepSummary, TrainingRecord
from drafttrain.files import Json, JsonlLog, check_json, read_json
from drafttrain.inference import Generation

Record = Json
Rounds = Counter[tuple[int, int]]  # counts by (accepted tokens, offered depth)


def side_record(generation: Generation, share: float | None = None) -> Record:
    """The record of a generation by our engine, in seconds. share: the prompt's share of a batch's
    time, None if it is alone.
    """
    stats = generation.stats
    return {
        "tokens": stats.new_tokens,
        "seconds": round(stats.total_seconds if share is None else share, 6),
        "latency": round(stats.total_seconds, 6),
        "ttft": round(stats.prefill_seconds, 6),
        "passes": stats.target_passes,
        "draft_seconds": round(stats.draft_seconds, 6),
        "target_seconds": round(stats.target_seconds, 6),
        "rounds": [
            [accepted, offered, count]
            for (accepted, offered), count in sorted(stats.rounds.items())
        ],
    }


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
        reached = sum(count for (a, _), count in rounds.items() if a >= k)
        tried = sum(count for (a, o), count in rounds.items() if a >= k - 1 and o >= k)
        conditional.append(round(_ratio(reached, tried), 4))
        joint.append(round(reached / total, 4))
    return {"conditional": conditional, "joint": joint}


def accepted_length_histogram(rounds: Rounds) -> list[int]:
    """Number of rounds that committed n tokens, at index n: accepted tokens plus the bonus token.

    A round that EOS cuts has no bonus token but counts as if it had one: the record does not
    distinguish it.
    """
    counts = [0] * (max((accepted for accepted, _ in rounds), default=-1) + 2)
    for (accepted, _), count in rounds.items():
        counts[accepted + 1] += count
    return counts


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 in milliseconds; zeros for an empty list."""
    if len(seconds):
        points = np.percentile(seconds, (50, 95, 99)) * 1000
    else:
        points = np.zeros(3)
    return {
        name: round(float(point), 3)
        for name, point in zip(("p50", "p95", "p99"), points, strict=True)
    }


def tokens_per_second(sides: Sequence[Record]) -> float:
    """New tokens / wall-clock seconds, prefill included, summed over prompts."""
    return round(_ratio(_sum(sides, "tokens"), _sum(sides, "seconds")), 3)


def latencies(sides: Sequence[Record]) -> dict[str, dict[str, float]]:
    """ttft_ms: time to first token, per prompt. tpot_ms: mean time per token after the first, per
    prompt.
    """
    tpot = [
        (side["latency"] - side["ttft"]) / (side["tokens"] - 1)
        for side in sides
        if side["tokens"] > 1
    ]
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
        speedup: tokens_per_second over each baseline's; speedup_vs_fastest is the smallest, None
            without baselines.
        identical_outputs, identical_to_hf_generate: share of prompts whose greedy output equals the
            baseline's; None if sampled or not measured.
        confidence: 95 % intervals of accepted_length and of each speed-up, see `intervals`.
        peak_memory_mb: of the drafter's side, on a GPU of the device, on a CPU of the process
            (baselines' models included); None if unknown.
    """
    ours = [record["sides"]["drafter"] for record in records]
    rounds = rounds_of(records)
    passes = _sum(ours, "passes")
    tokens = _sum(ours, "tokens")
    draft_seconds = _sum(ours, "draft_seconds")
    tau = _ratio(tokens - len(ours), passes)
    rate = tokens_per_second(ours)
    measured = [name for name in ALL_BASELINES if all(name in r["sides"] for r in records)]
    baselines = {name: _baseline(records, name) for name in measured}
    speedup = {
        name: round(rate / b["tokens_per_second"], 4)
        for name, b in baselines.items()
        if b["tokens_per_second"]
    }
    if "autoregressive" in baselines:
        plain = [record["sides"]["autoregressive"] for record in records]
    else:
        plain = ours
    plain_pass = _ratio(_sum(plain, "target_seconds"), _sum(plain, "passes"))  # seconds
    memory = [record["memory"] for record in records if record.get("memory")]
    accepted, offered = (sum(key[i] * count for key, count in rounds.items()) for i in range(2))
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
        "mbsu": round(tau / (_ratio(_ratio(draft_seconds, passes), plain_pass) + 1), 4),
        "baselines": baselines,
        "speedup": speedup,
        "speedup_vs_fastest": min(
            (speedup[name] for name in BASELINES if name in speedup), default=None
        ),
        "identical_outputs": _identical(records, "autoregressive"),
        "identical_to_hf_generate": _identical(records, "hf_generate"),
        "confidence": intervals(records, measured),
        "peak_memory_mb": round(max(memory) / 2**20, 1) if memory else None,
    }


def intervals(records: Sequence[Record], baselines: Sequence[str], comparisons: int = 1) -> Json:
    """Computes 95 % bootstrap intervals over prompts: how far the figures would move on other
    prompts of the same kind.

    Computes each figure from the totals of drawn prompts (`evaluation/resampling.py`). Turns of a
    question count as prompts. With a single prompt both ends are equal.

    Args:
        baselines: names that all records have. comparisons: number of such sets whose intervals
            must hold together.

    Returns:
        accepted_length: [low, high]; speedup: the same for each baseline.
    """
    if not records:
        return {"accepted_length": None, "speedup": {}}
    # Prompts that were answered at once share their seconds, so batches are drawn, not prompts.
    first: dict[object, int] = {}
    for i, record in enumerate(records):
        first.setdefault((record["batch"], record["turn"]) if "batch" in record else i, len(first))
    batches = [first[(r["batch"], r["turn"]) if "batch" in r else i] for i, r in enumerate(records)]

    def total(
        side: str,
        key: str,
        minus: float = 0.0,
        of: Sequence[int] = batches,
    ) -> np.ndarray:  # [RESAMPLES] float64
        sums = np.bincount(of, [record["sides"][side][key] - minus for record in records])
        return sums[draws(len(sums))].sum(1)

    def interval(over: np.ndarray, under: np.ndarray, count: int) -> list[float] | None:
        valid = under > 0
        ratios = over[valid] / under[valid]
        if len(ratios):
            return [round(x, 4) for x in ends(ratios, count, comparisons)]
        return None

    each = range(len(records))
    few = len(first) < min(FEWEST, len(records))
    lengths = interval(
        total("drafter", "tokens", 1, each),
        total("drafter", "passes", 0, each),
        len(records),
    )
    tokens = total("drafter", "tokens")
    seconds = total("drafter", "seconds")
    speedup = {
        name: None
        if few
        else interval(tokens * total(name, "seconds"), seconds * total(name, "tokens"), len(first))
        for name in baselines
    }
    return {"accepted_length": lengths, "speedup": speedup}


def accepted_below(
    part: Sequence[Record],
    rest: Sequence[Record],
    share: float,
    comparisons: int = 1,
) -> bool:
    """Whether a part of the prompts accepts less than `share` of the tokens per round that the rest
    accepts, beyond noise.
    """

    def sampled(records: Sequence[Record], seed: int) -> np.ndarray:  # [RESAMPLES] float64
        sides = [record["sides"]["drafter"] for record in records]
        tokens, passes = (
            np.array([side[key] for side in sides], float) for key in ("tokens", "passes")
        )
        drawn = draws(len(records), seed)
        return (tokens - 1 - passes)[drawn].sum(1) / np.maximum(passes[drawn].sum(1), 1)

    return (
        ends(sampled(part, 1) - share * sampled(rest, 2), min(len(part), len(rest)), comparisons)[1]
        < 0
    )


def by_category(records: Sequence[Record]) -> dict[str, Json]:
    """`summarize` for each category, in order of first appearance."""
    names = dict.fromkeys(record["category"] for record in records)
    return {
        name: summarize([record for record in records if record["category"] == name])
        for name in names
    }


def _baseline(records: Sequence[Record], name: str) -> Json:
    sides = [record["sides"][name] for record in records]
    if all("ttft" in side for side in sides):
        known = latencies(sides)
    else:
        known = {}
    return {"tokens_per_second": tokens_per_second(sides), **known}


def _identical(records: Sequence[Record], name: str) -> float | None:
    same = [record["identical"][name] for record in records if name in record["identical"]]
    if same:
        return round(sum(same) / len(same), 4)
    return None


def _sum(sides: Iterable[Record], key: str) -> float:
    return sum(side[key] for side in sides)


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return 0.0


# -- files -----------------------------------------------------------------------------------------


def fingerprint(settings: Mapping[str, object]) -> str:
    """Hashes everything that a record depends on."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[
        :16
    ]


def folder_state(name: str) -> list[tuple[str, int, int]]:
    """Name, size and modification time of a model folder's files; tells a retrained model from the
    earlier one.
    """
    folder = Path(name).expanduser()
    inside = folder.iterdir() if folder.is_dir() else ()
    files = sorted(path for path in inside if path.is_file() and path.name[0] != ".")
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def training_record(drafter: str) -> Json:
    """The training.json in a drafter's folder; empty without one. Raises UserError: a damaged one."""
    return read_training(Path(split_name(drafter)[0]).expanduser())


def read_training(folder: Path) -> Json:
    """See `training_record`."""
    path = folder / "training.json"
    fix = "restore that file, or delete it and go without its figures"
    if path.is_file():
        return {**read_json(path, "training", fix, TrainingRecord)}
    return {}


def is_sweep(content: Json) -> bool:
    """Whether the content of a JSON file is a sweep's summary rather than results."""
    return "cells" in content


def load_results(name: str, sweeps: bool = False) -> Json:
    """Reads a results file, or with `sweeps` also a sweep's summary. Raises UserError: missing,
    damaged, or other content.
    """
    path = Path(name).expanduser()
    fix = "give a file that drafttrain eval wrote"
    content: Json = read_json(path, "results", fix)
    if is_sweep(content) and not sweeps:
        raise UserError(
            f"results={name!r} is a sweep's summary; give the results of one of its cells, which are in the same folder"
        )
    check_json(content, f"results={name!r}", fix, SweepSummary if is_sweep(content) else Results)
    return content


class PartialResults:
    """`<output>.partial.jsonl`: a first line with the hash of the settings, then one line per
    finished question.

    It replaces a file of other settings. Raises UserError if it cannot be written, or holds a
    damaged line.

    Attributes:
        tree: the result of the tree search, {"tree", "tree_search"}; None before the search.
        records: the records of finished questions, by question key.
    """

    def __init__(self, output: Path, key: str):
        partial = output.with_name(output.name + ".partial.jsonl")
        self._log = JsonlLog(partial, {"settings": key}, PartialLine, overwrite=True)
        rows = self._log.rows
        self.tree: Json | None = next(
            (row for row in rows if row.keys() >= {"tree", "tree_search"}), None
        )
        self.records = {
            row["question"]: row["records"] for row in rows if row.keys() >= {"question", "records"}
        }

    def add_tree(self, tree: str, tree_search: list[Json]) -> None:
        """Stores the result of the tree search."""
        self.tree = {"tree": tree, "tree_search": tree_search}
        self._log.add(self.tree)

    def add_question(self, question: str, records: list[Record]) -> None:
        """Stores the records of a finished question."""
        self.records[question] = records
        self._log.add({"question": question, "records": records})

    def remove(self) -> None:
        """Deletes the file, after the results are complete."""
        self._log.remove()

    def close(self) -> None:
        """Unlocks the file."""
        self._log.close()
