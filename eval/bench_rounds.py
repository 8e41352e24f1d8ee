"""Milliseconds of a decoding round by kind of drafter, here and in another checkout: draft, verify, commit, read.

Both checkouts decode the same prompts with the same heads of random weights, which costs what trained ones cost: a process of
each holds all of them, and one round of measurements asks one process after the other. The other checkout writes the heads,
since a newer one reads what an older one wrote. Texts have to be equal.

    python eval/bench_rounds.py --against ../drafttrain-before --output eval/results/rounds_against_cpu.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmark import result_path, write_result
from side import Side

GOAL = 0.98
CELLS = (
    "none none",
    "eagle3 dynamic:4,4,8",
    "eagle3 chain:3",
    "mtp dynamic:4,4,8",
    "medusa dynamic:4,4,8",
    "dflash dynamic:4,4,8",
    "dflash chain:4",
    "draft_model chain:3",
    "eagle3+ngram dynamic:4,4,8",
    "eagle3+suffix dynamic:4,4,8",
    "ngram+suffix chain:4",
)


def compare(args: argparse.Namespace) -> None:
    """Measures all cells in both checkouts, in turn, and writes the ratios."""
    script = Path(__file__).with_name("round_side.py").resolve()
    roots = {"there": args.against.expanduser().resolve(), "here": script.parents[1]}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        sides = {}
        for name, root in roots.items():
            words = ["--heads", folder, "--target", args.target, "--dtype", args.dtype]
            words += ["--suite", args.suite, "--prompts", args.prompts, "--tokens", args.tokens]
            words += ["--vocabulary", args.vocabulary, "--cell", *args.cell]
            if name == "there":
                words += ["--make"]
            command = ["env", f"PYTHONPATH={root}", sys.executable, script, *words]
            sides[name] = Side([str(word) for word in command])
        for number, cell in enumerate(args.cell):
            found[cell] = measure(sides, number, args.repeats)
            print(f"{cell}: {found[cell]}", flush=True)
        for side in sides.values():
            side.close()
    slowest = min(each["ratio"] for each in found.values())
    write_result(
        args.output,
        slowest,
        GOAL,
        found,
        torch.device("cpu"),
        against=args.against.name,
        dtype=args.dtype,
    )


def measure(sides: dict[str, Side], number: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of a round in both checkouts, and the other's over this one's: median of pairs, and all of them."""
    for side in sides.values():
        side.step(number)
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    texts = set()
    for repeat in range(repeats):
        names = list(sides) if repeat % 2 else list(sides)[::-1]
        for name in names:
            answer = sides[name].step(number)
            rounds[name].append(1000 * answer["seconds"] / answer["passes"])
            texts.add(answer["text"])
    if len(texts) > 1:
        raise SystemExit(f"the checkouts decoded different texts: {texts}")
    pairs = [there / here for there, here in zip(rounds["there"], rounds["here"], strict=True)]
    return {
        "ratio": round(statistics.median(pairs), 3),
        "pairs": [round(pair, 3) for pair in pairs],
        "ms_there": round(statistics.median(rounds["there"]), 3),
        "ms_here": round(statistics.median(rounds["here"]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, required=True, help="root of the other checkout")
    parser.add_argument("--target", default="smollm2-135m", help="short name, folder or Hub id")
    parser.add_argument("--cell", nargs="+", default=CELLS, help="'DRAFTER TREE' each")
    parser.add_argument("--suite", default="drafttrain")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--vocabulary", type=int, default=8192, help="of heads that have their own")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--output", type=result_path)
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
