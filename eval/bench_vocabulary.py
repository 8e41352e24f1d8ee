"""What a drafter's vocabulary is worth: kept tokens of any number, with and without tokens of the text.

Every --drafter decodes the same prompts greedily, alternating prompt by prompt: with its kept tokens alone (`kept`), and with
tokens of the text (`+tokens`). A row gives coverage (share of the answers' tokens that could be drafted), the accepted length
and its paired ratio to the first row, with intervals over the prompts, milliseconds per round of drafting, and the speed
relative to the first row. --train measures steps per minute at vocabularies of these sizes instead, alternating: forward and
backward of one batch of the data; 0 keeps all tokens.

    python eval/bench_vocabulary.py --target smollm2-135m --drafter runs/quickstart/drafter --tree dynamic:4,4,8 \\
        --output eval/results/vocabulary_smollm2-135m_cpu.json
    python eval/bench_vocabulary.py --target smollm2-135m --train 4096 8192 16384 0 --data runs/quickstart/data \\
        --output eval/results/vocabulary_training_smollm2-135m_cpu.json
"""

from __future__ import annotations

import argparse
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmark import alternate, median, result_path, write_result
from transformers import TrainingArguments

from drafttrain.batch import Batch
from drafttrain.config import load_config
from drafttrain.data.loader import collate
from drafttrain.data.store import load_records
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.combined import parts_of
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter
from drafttrain.evaluation.runner import covered
from drafttrain.evaluation.suites import load_suite, take_evenly
from drafttrain.inference import Decoder
from drafttrain.losses import TargetRows
from drafttrain.states.source import TargetSource
from drafttrain.target import Target
from drafttrain.train import build_drafter

VARIANTS = {"kept": "extra_vocab_size=0", "+tokens": "extra_vocab_size=256"}
SAMPLES = 2000  # of the bootstrap over prompts


def interval(over: np.ndarray, under: np.ndarray) -> list[float]:
    """The 95 % interval of a ratio of sums over prompts [n]."""
    at = np.random.default_rng(0).integers(0, len(over), (SAMPLES, len(over)))
    return [
        round(float(x), 3) for x in np.percentile(over[at].sum(1) / under[at].sum(1), (2.5, 97.5))
    ]


def decode(args: argparse.Namespace, target: Target) -> dict[str, dict[str, Any]]:
    """A row per drafter and variant."""
    questions = take_evenly(load_suite(args.suite).questions, args.limit)
    prompts = [question.prompt(target.tokenizer) for question in questions]
    sides = {}
    kept = {}
    for name in args.drafter:
        folder, plus, second = name.partition("+")
        for variant, options in VARIANTS.items():
            drafter = load_drafter(f"{folder}:{options}{plus}{second}", target)
            assert drafter is not None, "a folder is not 'none'"
            main = parts_of(drafter)[0]
            ids = range(target.vocab_size) if main.vocabulary is None else main.vocabulary.tolist()
            side = f"{Path(folder).name}, {len(ids)} {variant}{plus}{second}"
            sides[side] = Decoder(target, drafter, spec=TreeSpec.parse(args.tree))
            kept[side] = list(ids), main.joins_tokens
    figures: dict[str, list[list[float]]] = {
        side: [] for side in sides
    }  # per prompt: tokens, passes, seconds, ...
    names = list(sides)
    for number, prompt in enumerate(prompts):
        texts = {}
        for side in names[number % len(names) :] + names[: number % len(names)]:
            made = sides[side].generate([prompt], max_new_tokens=args.max_new_tokens)[0]
            tokens = made.tokens
            stats = made.stats
            texts[side] = tokens
            hits = len(tokens) * covered(tokens, kept[side][0], prompt if kept[side][1] else [])
            seconds = stats.total_seconds - stats.prefill_seconds
            figures[side].append(
                [
                    len(tokens) - 1,
                    stats.target_passes,
                    seconds,
                    stats.draft_seconds,
                    hits,
                    len(tokens),
                ]
            )
        assert (
            all(text == texts[names[0]] for text in texts.values()) or target.dtype != torch.float32
        )
        print(f"prompt {number + 1}/{len(prompts)}", flush=True)
    first = np.array(figures[names[0]])
    rows = {}
    for side in names:
        own = np.array(figures[side])  # [prompts, 6]
        new, passes, seconds = own.T[:3]
        total = [float(x) for x in own.sum(0)]
        rows[side] = {
            "coverage": round(total[4] / total[5], 4),
            "accepted_length": round(total[0] / total[1], 4),
            "accepted_length_interval": interval(new, passes),
            # The texts are the same, so the ratio of accepted lengths is that of passes.
            "accepted_ratio": round(float(first[:, 1].sum()) / total[1], 4),
            "accepted_ratio_interval": interval(first[:, 1], passes),
            "draft_ms": round(1000 * total[3] / total[1], 3),
            "tokens_per_second": round(total[0] / total[2], 2),
            "speed_ratio": round(float(first[:, 2].sum()) / total[2], 4),
            "speed_ratio_interval": interval(first[:, 2], seconds),
        }
        print(f"{side}: {rows[side]}", flush=True)
    return rows


def train(args: argparse.Namespace, target: Target) -> dict[str, dict[str, Any]]:
    """Steps per minute by size of the vocabulary; no optimizer, whose work is a few percent."""
    records = load_records(args.data)
    trainer_keys = [field.name for field in fields(TrainingArguments)]
    sides = {}
    lines = records.select(range(len(records) // 2, len(records) // 2 + args.rows)).to_list()
    batch = Batch.of(
        collate([{**line, "index": -1, "length": len(line["tokens"])} for line in lines])
    )
    for size in args.train:
        words = [
            f"target={args.target}",
            f"data={args.data}",
            "output_dir=unused",
            f"drafter.draft_vocab_size={size}",
        ]
        drafter, _ = build_drafter(load_config(args.recipe, words, trainer_keys), target, records)
        features, rows, row_of = TargetSource(target, drafter.feature_layers, drafter.kept_ids)(
            batch
        )
        assert isinstance(rows, TargetRows), "the data has no features"
        count = torch.as_tensor(float(batch.response_mask.sum()))
        inputs = StepInputs(
            batch, target.embed(batch.input_ids), features, rows, row_of, count, False
        )

        def step(drafter=drafter, inputs=inputs) -> dict[str, float]:
            began = time.perf_counter()
            drafter.train().zero_grad()
            drafter(inputs=inputs).loss.backward()
            return {"seconds": time.perf_counter() - began}

        sides[str(size or target.vocab_size)] = step
    runs = alternate(sides, args.repeats)
    return {
        side: {
            "seconds": median(found, "seconds"),
            "steps_per_minute": round(60 / median(found, "seconds"), 1),
        }
        for side, found in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument(
        "--drafter", nargs="+", default=[], help="folders, each perhaps with +ngram"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tree", default="dynamic:4,4,8")
    parser.add_argument("--suite", default="drafttrain")
    parser.add_argument("--limit", type=int, default=24, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument(
        "--train",
        type=int,
        nargs="+",
        metavar="SIZE",
        help="measure training at these sizes instead",
    )
    parser.add_argument("--data", default="", help="for --train")
    parser.add_argument("--recipe", default="configs/quickstart.yaml", help="for --train")
    parser.add_argument("--rows", type=int, default=4, help="for --train: conversations of a batch")
    parser.add_argument("--repeats", type=int, default=5, help="for --train")
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    if bool(args.train) == bool(args.drafter) or bool(args.train) != bool(args.data):
        parser.error("give --drafter, or --train with --data")
    target = Target.load(args.target, "float32" if args.train else args.dtype)
    if args.train:
        found = train(args, target)
        small, large = (list(found)[i] for i in (0, -1))
        ratio = found[large]["seconds"] / found[small]["seconds"]
    else:
        found = decode(args, target.pack())
        ratio = list(found.values())[1]["speed_ratio"]
    write_result(args.output, round(ratio, 4), 1.0, found, target.device)


if __name__ == "__main__":
    main()
