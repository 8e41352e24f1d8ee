"""Compares two heads of one data set: states streamed from a server of the target, and stored states. One of two is `remote`.

scripts/remote_target_cpu.sh trains and evaluates both, and calls this with the folder where they lie. Exit status 1: the accepted
lengths differ by more than 3 %.

    python eval/compare_remote_target.py runs/remote_target --output result.json --command WORD ...
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from benchmark import result_path, write_result

from drafttrain.files import Json, write_json

MOST_APART = 0.03


def side(folder: Path, name: str) -> Json:
    """Figures of a head: folder/NAME/training.json, and folder/NAME.json of the evaluation."""
    trained = json.loads((folder / name / "training.json").read_text())
    overall = json.loads((folder / f"{name}.json").read_text())["overall"]
    of_training = (
        "steps",
        "seconds",
        "train_loss",
        "states_wait",
        "target_features",
        "engine",
        "processes",
    )
    of_decoding = (
        "accepted_length",
        "acceptance_by_depth",
        "prompts",
        "tokens",
        "target_passes",
        "identical_outputs",
    )
    return {
        **{key: overall[key] for key in of_decoding},
        **{key: trained[key] for key in of_training},
        "peak_memory_gb": trained["memory_gb"],  # of the first training process
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=result_path)
    parser.add_argument(
        "--command",
        nargs=argparse.REMAINDER,
        help="what produced the folder, for the record; comes last",
    )
    args = parser.parse_args()
    sides = {name: side(args.folder, name) for name in ("remote", "local")}
    for name, of in sides.items():
        waits = (
            ""
            if of["states_wait"] is None
            else f", {100 * of['states_wait']:.1f} % of the steps' time waiting for states"
        )
        print(
            f"{name}: accepted length {of['accepted_length']:.3f}{waits}, peak memory {of['peak_memory_gb']} GB"
        )
    ratio = sides["remote"]["accepted_length"] / sides["local"]["accepted_length"]
    write_result(args.output, ratio, 1 - MOST_APART, sides, torch.device("cpu"))
    if args.output and args.command:
        write_json(args.output, {**json.loads(args.output.read_text()), "command": args.command})
    return int(abs(ratio - 1) > MOST_APART)


if __name__ == "__main__":
    raise SystemExit(main())
