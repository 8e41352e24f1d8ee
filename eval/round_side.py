"""A side of bench_rounds.py: decodes the cells' prompts on a CPU and says how long it took.

Runs on another checkout's package too, so it imports only names that have stayed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import kind_class, load_drafter
from drafttrain.evaluation.suites import load_suite, take_evenly
from drafttrain.inference import Decoder
from drafttrain.target import Target

# Kinds with weights: what `begin` takes besides the target.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("random", {}),
    "mtp": ("random", {}),
    "medusa": ("random", {}),
    "dflash": ("random", {}),
    "draft_model": ("target", {"layers": [0]}),
}


def make_heads(target: Target, folder: Path, vocabulary: int) -> None:
    """Writes a head of random weights of each kind to a folder of its name."""
    for kind, (init, options) in HEADS.items():
        torch.manual_seed(0)
        keep = None
        if kind in ("eagle3", "mtp"):
            options = {**options, "draft_vocab_size": vocabulary}
            keep = torch.arange
        drafter = kind_class(kind).begin(target, init, options, "kl", keep)
        drafter.save_pretrained(folder / kind)


def serve(args: argparse.Namespace) -> None:
    """Answers {"batch": number of a cell} with the seconds and target passes of all prompts."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    target = Target.load(args.target, args.dtype, "cpu")
    if args.make:
        make_heads(target, args.heads, args.vocabulary)  # from layers that are not packed yet
    target.pack()
    questions = take_evenly(load_suite(args.suite).questions, args.prompts)
    prompts = [question.prompt(target.tokenizer) for question in questions]
    decoders: dict[str, Decoder] = {}
    for line in sys.stdin:
        cell = args.cell[json.loads(line)["batch"]]
        if cell not in decoders:
            decoders[cell] = decoder_of(cell, target, args.heads)
            decoders[cell].generate(prompts[:1], max_new_tokens=2)
        began = time.perf_counter()
        passes = 0
        tokens: list[int] = []
        for prompt in prompts:
            (made,) = decoders[cell].generate([prompt], max_new_tokens=args.tokens)
            passes += made.stats.target_passes
            tokens += made.tokens
        seconds = time.perf_counter() - began
        text = zlib.crc32(str(tokens).encode())
        answer = {"seconds": seconds, "passes": passes, "text": text}
        print(json.dumps(answer), file=answers, flush=True)


def decoder_of(cell: str, target: Target, heads: Path) -> Decoder:
    """A decoder with a cell's drafter and tree."""
    name, tree = cell.split()
    drafter = None
    if name != "none":
        parts = [str(heads / part) if part in HEADS else part for part in name.split("+")]
        drafter = load_drafter("+".join(parts), target)
    return Decoder(target, drafter, spec=TreeSpec.parse(tree), eos_ids=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=Path, help="folder of the heads")
    parser.add_argument("--make", action="store_true", help="write the heads first")
    parser.add_argument("--cell", nargs="+", help="'DRAFTER TREE' each")
    for name in ("target", "suite", "dtype"):
        parser.add_argument(f"--{name}")
    for name in ("prompts", "tokens", "vocabulary"):
        parser.add_argument(f"--{name}", type=int)
    serve(parser.parse_args())


if __name__ == "__main__":
    main()
