"""Accepted length per minute of training: our eagle3 against speculators' trainer on the same data.

    python eval/compare_trainers.py --target smollm2-135m --data runs/quickstart/data --peer-python ~/peer/bin/python \\
        --minutes 1 2 4 --folder runs/trainers --output eval/results/trainers_smollm2-135m_cpu.json

Both sides train an EAGLE-3 head of the same shape and vocabulary on the same stored conversations for the same wall-clock time,
one after the other, each with its own trainer's settings: ours with --recipe, speculators with the defaults of `speculators
train` (Muon, rate 1e-3 falling linearly to the end of the time, three steps ahead, bfloat16 autocast, clipping at 1), but rows of
--sequence tokens, because its default of 8192 would leave it a dozen steps a minute on a CPU. Preparing data and loading
count for neither side. Then the heads decode the same prompts by `drafttrain eval`, alone, in a chain of --chain tokens.

The ratio is that of accepted draft tokens per round (accepted length - 1, the peer's at least 0.01) after the longest time;
`minutes_to_match` says how long each side takes to reach the other's best, by interpolation between the measured times. An
interrupted comparison goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from benchmark import write_result

from drafttrain.data.loader import count_tokens, keep_frequent, pack_rows, training_rows
from drafttrain.data.store import FeatureStore, load_records
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.folders import inputs_of, output_file
from drafttrain.target import load_shell

GOAL = 1.5
OURS = "drafttrain"
PEER = "speculators"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", default="smollm2-135m", help="short name or folder")
    add("--data", required=True, help="folder written by drafttrain generate")
    add("--peer-python", required=True, help="an interpreter with speculators")
    add("--recipe", default="quickstart", help="of our side: a name or a file")
    add(
        "--minutes",
        type=float,
        nargs="+",
        default=[1.0, 2.0, 4.0],
        help="training times, a run each",
    )
    add("--draft-vocab-size", type=int, default=4096, help="of both sides")
    add("--sequence", type=int, default=1024, help="tokens of a packed row of the speculators side")
    add("--chain", type=int, default=3, help="tokens drafted ahead when measured")
    add(
        "--suite",
        nargs="+",
        default=["drafttrain"],
        help="suites of drafttrain eval that are measured",
    )
    add("--limit", type=int, default=24, help="prompts of each suite")
    add("--folder", required=True, help="where heads and measurements go")
    add("--output", required=True, help="the results as JSON")
    return parser.parse_args()


def prepare(args: argparse.Namespace, path: Path) -> None:
    """Writes what the speculators side reads: the stored states of every conversation, in packed rows.

    Raises UserError: the data set holds no states of the target's default layers.
    """
    target = load_shell(args.target)
    layers = target.default_feature_layers
    records = load_records(args.data)
    store = FeatureStore.open(args.data, layers)
    if store is None or store.top_k:
        raise UserError(
            f"data={args.data!r} holds no states of layers {list(layers)}: generate it with --features default"
        )
    rows = pack_rows(training_rows(records, args.sequence, 0.02, 0)[0], args.sequence, seed=0)
    batches = [
        [[_document(records[index], store, args.sequence) for index in row["index"]]]
        for row in rows
    ]
    torch.save(
        {
            "target": target.path,
            "device": "cpu",
            "threads": torch.get_num_threads(),
            "feature_layers": layers,
            "kept_ids": keep_frequent(
                count_tokens(records, target.vocab_size), args.draft_vocab_size, target.eos_ids
            ),
            "ttt_steps": 3,
            "depth_decay": 1.0,  # the defaults of `speculators train`
            "batches": batches,
        },
        path,
    )


def _document(record: Json, store: FeatureStore, length: int) -> dict[str, torch.Tensor]:
    """A conversation as the speculators side reads it; its last token has no states."""
    found = store.get(record["id"])
    n = min(len(record["tokens"]), length) - 1
    response = torch.zeros(n, dtype=torch.bool)
    for first, end in record["spans"]:
        response[first:end] = True
    return {
        "tokens": torch.tensor(record["tokens"][:n]),
        "response": response,
        "features": found["features"][:n].float(),
        "last_hidden": found["last_hidden"][:n].float(),
    }


def train_ours(args: argparse.Namespace, minutes: float, folder: Path) -> None:
    drafttrain(
        *(
            "train",
            args.recipe,
            f"target={args.target}",
            f"data={args.data}",
            f"output_dir={folder}",
        ),
        *(
            f"max_minutes={minutes}",
            f"drafter.draft_vocab_size={args.draft_vocab_size}",
            "report_to=none",
        ),
    )


def _published(drafter: Path) -> Path:
    """Where the speculators side writes the head that is imported as `drafter`."""
    return drafter.with_name(f"{drafter.name}-published")


def train_peer(args: argparse.Namespace, minutes: float, folder: Path, job: Path) -> None:
    published = _published(folder)
    if not (published / "training.json").is_file():
        script = Path(__file__).resolve().with_name("speculators_side.py")
        run(
            args.peer_python,
            str(script),
            str(job),
            "--minutes",
            str(minutes),
            "--output",
            str(published),
        )
    drafttrain(
        "import", "--checkpoint", str(published), "--target", args.target, "--output", str(folder)
    )


def drafttrain(*words: str) -> None:
    run(sys.executable, "-m", "drafttrain", *words)


def run(*command: str) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True)


def measured(args: argparse.Namespace, drafter: Path, suite: str) -> Json:
    """Accepted length of a head on a suite; greedy, float32, so that it does not depend on the machine's load."""
    place = drafter.with_name(f"{drafter.name}-{Path(suite).stem}.json")
    if not place.is_file():
        drafttrain(
            *(
                "eval",
                "--target",
                args.target,
                "--drafter",
                str(drafter),
                "--suite",
                suite,
                "--limit",
                str(args.limit),
            ),
            *(
                "--tree",
                f"chain:{args.chain}",
                "--dtype",
                "float32",
                "--max-new-tokens",
                "64",
                "--baselines",
                "none",
            ),
            *("--output", str(place)),
        )
    overall = json.loads(place.read_text())["overall"]
    return {
        key: overall[key] for key in ("accepted_length", "acceptance_by_depth", "prompts", "tokens")
    }


def minutes_to(curve: list[tuple[float, float]], length: float) -> float | None:
    """Minutes after which a curve of (minutes, accepted length) reaches a length; None if it does not within its times."""
    minutes, lengths = (np.array(column) for column in zip(*curve, strict=True))
    best = np.maximum.accumulate(lengths)
    if best[-1] < length:
        return None
    return float(np.interp(length, [1.0, *best], [0.0, *minutes]))


def main() -> None:
    args = arguments()
    output_file(args.output, "benchmark", inputs_of(args))
    minutes = sorted(args.minutes)
    folder = Path(args.folder).expanduser()  # the commands below protect what they did not write
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.pt"
    if not job.is_file():
        prepare(args, job)
    sides: Json = {OURS: [], PEER: []}
    for each in minutes:
        for name in sides:
            drafter = folder / f"{name}-{each:g}"
            if not (drafter / "config.json").is_file():
                train_ours(args, each, drafter) if name == OURS else train_peer(
                    args, each, drafter, job
                )
            found = {suite: measured(args, drafter, suite) for suite in args.suite}
            trained = (drafter if name == OURS else _published(drafter)) / "training.json"
            steps = json.loads(trained.read_text())["steps"]
            sides[name].append({"minutes": each, "steps": steps, **found})
            print(
                name,
                each,
                {suite: one["accepted_length"] for suite, one in found.items()},
                flush=True,
            )
    summary: Json = {}
    for suite in args.suite:
        curves = {
            name: [(one["minutes"], one[suite]["accepted_length"]) for one in runs]
            for name, runs in sides.items()
        }
        last = {name: curve[-1][1] for name, curve in curves.items()}
        summary[suite] = {
            "ratio_of_accepted_drafts": round((last[OURS] - 1) / max(last[PEER] - 1, 0.01), 3),
            "minutes_to_match": {
                OURS: minutes_to(curves[OURS], last[PEER]),
                PEER: minutes_to(curves[PEER], last[OURS]),
            },
        }
    print(json.dumps(summary, indent=2))
    ratio = summary[args.suite[0]]["ratio_of_accepted_drafts"]
    write_result(Path(args.output), ratio, GOAL, sides, torch.device("cpu"), summary=summary)


if __name__ == "__main__":
    main()
