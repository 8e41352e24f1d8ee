"""Compares recipes that differ in a few keys: same data, same training time, several seeds, paired intervals.

    python eval/ablate.py --target smollm2-135m --data runs/smollm2-135m/data --minutes 8 --cpu-time --cores 0 1 --kind eagle3 \
        --variant plain --variant fc_norm drafter.fc_norm=true --seeds 0 1 --output eval/results/norms_smollm2-135m_cpu.json

Each variant is a name and the keys that it sets in the recipe of `--kind`; `kind=` names another recipe. The first is the one
that the others are compared with. Each is trained once per seed and measured as `compare_kinds.py` does it, which also says how
trainings share a machine and how an interrupted run goes on. An interval resamples prompts, each
with the passes of all its seeds. It does not show how much results vary by seed, so the figures of each seed are given too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import compare_kinds
import numpy as np
import torch

from drafttrain.environment import describe_environment
from drafttrain.errors import UserError
from drafttrain.evaluation.resampling import draws, ends
from drafttrain.files import Json, write_json
from drafttrain.folders import OutputFolder, inputs_of, output_file
from drafttrain.progress import Progress


class Variant(NamedTuple):
    """A recipe to compare: its name, kind, and the keys that it sets."""

    name: str
    kind: str
    keys: tuple[str, ...]


class Run(NamedTuple):
    """A variant with one of the seeds."""

    variant: Variant
    seed: int


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kind", default="eagle3", help="the recipe that variants change")
    add(
        "--variant",
        nargs="+",
        action="append",
        required=True,
        metavar=("NAME", "KEY=VALUE"),
        help="a name and its keys; once per variant",
    )
    add("--seeds", type=int, nargs="+", default=[0, 1])
    add("--tree", default="chain:4")
    add("--output", type=Path, required=True)
    own, others = parser.parse_known_args(words)
    rest = ["--folder", "runs/ablate", "--trees", own.tree, "--temperatures", "0", *others]
    args = compare_kinds.arguments(rest)
    args.output = own.output
    args.tree = own.tree
    args.seeds = own.seeds
    args.variants = [read_variant(words, own.kind) for words in own.variant]
    names = [variant.name for variant in args.variants]
    if len(set(names)) < len(names):
        raise UserError(f"variant={names}: two have one name; name each differently")
    return args


def read_variant(words: Sequence[str], kind: str) -> Variant:
    """Reads `NAME KEY=VALUE ...`.

    Raises:
        UserError: a word without `=`.
    """
    name, *keys = words
    own = []
    for key in keys:
        if "=" not in key:
            raise UserError(f"variant {name}: {key!r} must be KEY=VALUE")
        if key.startswith("kind="):
            kind = key.removeprefix("kind=")
        else:
            own.append(key)
    return Variant(name, kind, tuple(own))


def settings(args: argparse.Namespace, run: Run) -> argparse.Namespace:
    """The arguments of a run's training."""
    changed = {"train": [*args.train, *run.variant.keys], "seed": run.seed}
    return argparse.Namespace(**{**vars(args), **changed})


def train_and_measure(
    args: argparse.Namespace,
    run: Run,
    core: int | None,
) -> tuple[Json, Json]:
    """The figures of a training, and those of its decoding."""
    trained = compare_kinds.train(run.variant.kind, settings(args, run), core)
    folder = (args.folder / trained["folder"]).resolve()
    label = f"{run.variant.name} {run.seed}"
    entry = compare_kinds.Entry(label, str(folder), run.variant.kind)
    return trained, compare_kinds.measure(entry, args.tree, 0.0, args)


def run_all(args: argparse.Namespace) -> dict[Run, tuple[Json, Json]]:
    """All trainings and measurements, as many at a time as there are cores of their own; seed by seed."""
    free: SimpleQueue[int | None] = SimpleQueue()
    cores = args.cores or [None]
    for core in cores:
        free.put(core)
    runs = [Run(variant, seed) for seed in args.seeds for variant in args.variants]
    done: dict[Run, tuple[Json, Json]] = {}

    def one(run: Run) -> tuple[Json, Json]:
        core = free.get()
        try:
            return train_and_measure(args, run, core)
        finally:
            free.put(core)

    with Progress("training", len(runs), "runs") as meter, ThreadPoolExecutor(len(cores)) as pool:
        jobs = [(run, pool.submit(one, run)) for run in runs]
        for run, job in jobs:
            done[run] = job.result()
            length = done[run][1]["accepted_length"]
            meter.advance(note=f"{run.variant.name}, seed {run.seed}: {length:.3f}")
            write_json(args.output, summary(args, done))
    return done


def summary(args: argparse.Namespace, done: dict[Run, tuple[Json, Json]]) -> Json:
    """What is known so far, variant by variant."""
    variants: Json = {}
    base: np.ndarray | None = None
    for variant in args.variants:
        runs = [run for run in done if run.variant.name == variant.name]
        if not runs:
            continue
        cells = [done[run][1] for run in runs]
        rows = np.sum([cell["by_prompt"] for cell in cells], axis=0)  # [prompts, 6] over seeds
        complete = len(runs) == len(args.seeds)
        if base is None and complete:
            base = rows
        variants[variant.name] = {
            "kind": variant.kind,
            "keys": list(variant.keys),
            "accepted_length": accepted(rows),
            "beyond": beyond(rows, base) if complete and base is not None else None,
            "seeds": {
                str(run.seed): {
                    "accepted_length": done[run][1]["accepted_length"],
                    "steps": done[run][0]["steps"],
                    "seconds": done[run][0]["seconds"],
                    "parameters": done[run][0]["parameters"],
                    "held_out": done[run][0]["held_out"],
                    "identical_outputs": done[run][1]["identical_outputs"],
                }
                for run in runs
            },
        }
    device = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    return {
        **describe_environment(torch.device(device)),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "target": args.target,
        "minutes": args.minutes,
        "cpu_time": args.cpu_time,
        "tree": args.tree,
        "suite": args.suite,
        "max_new_tokens": args.max_new_tokens,
        "variants": variants,
    }


def accepted(rows: np.ndarray) -> float:
    """Accepted length of [prompts, 6] as `compare_kinds` counts a prompt: tokens after the first, passes."""
    return round(float(rows[:, 0].sum() / rows[:, 1].sum()), 4)


def beyond(rows: np.ndarray, base: np.ndarray) -> list[float]:
    """[ratio, low, high] of the accepted length to the base's on the same prompts, a 95 % interval."""
    drawn = draws(len(rows))  # [resamples, prompts]

    def ratio(chosen: np.ndarray) -> np.ndarray:
        ours = rows[chosen].sum(1)
        theirs = base[chosen].sum(1)
        return ours[:, 0] / ours[:, 1] / (theirs[:, 0] / theirs[:, 1])

    all_prompts = np.arange(len(rows))[None]
    low, high = ends(ratio(drawn), len(rows))
    return [round(float(number), 4) for number in (ratio(all_prompts)[0], low, high)]


def markdown(found: Json) -> str:
    """A table of the variants, each beside the first."""
    lines = ["| variant | keys | accepted length | times the first | each seed |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, variant in found["variants"].items():
        times = ""
        if variant["beyond"]:
            ratio, low, high = variant["beyond"]
            times = f"{ratio:.3f} [{low:.3f}, {high:.3f}]"
        seeds = ", ".join(f"{seed['accepted_length']:.3f}" for seed in variant["seeds"].values())
        keys = " ".join(variant["keys"])
        lines.append(f"| {name} | {keys} | {variant['accepted_length']:.3f} | {times} | {seeds} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    try:
        args = arguments()
        inputs = [*inputs_of(args, "folder")]
        args.output = output_file(args.output, "compare", inputs)
        with OutputFolder(args.folder, "compare", inputs, "folder"):
            done = run_all(args)
    except (UserError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = summary(args, done)
    write_json(args.output, found)
    print(markdown(found))
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
