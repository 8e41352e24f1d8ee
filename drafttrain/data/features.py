"""`drafttrain features`: the target's states for an existing data set, so that training need not run the target."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.data.generate import owner, parse_layers
from drafttrain.data.store import FeatureStore, ShardWriter, check_space, load_records, read_meta, stored_features
from drafttrain.errors import UserError
from drafttrain.files import write_json
from drafttrain.progress import Progress
from drafttrain.target import DTYPES, Target

HELP = """store the target's states of a data set, for training without running the target

Works on any data set (`generate` can store states itself while it runs: --features). The size is estimated and checked
against the free disk first. Run it again and it goes on; several processes share the work.

  drafttrain features --data runs/data
  drafttrain features --data runs/data --layers 2,15,27 --top-k 64          # likeliest tokens in place of the last states
  accelerate launch --num_processes 8 -m drafttrain.cli features --data runs/data
  drafttrain features --data runs/data --target-device-map auto             # a target larger than one GPU"""

# Padded tokens of one forward on a GPU; on a CPU rows run one by one.
_BATCH_TOKENS = 16_384


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, help="folder of the data set; states go to DATA/features")
    parser.add_argument(
        "--target", default="", help="short name, folder or Hub id (default: the one that the data names)"
    )
    parser.add_argument("--layers", default="default", help="target states to store: default, or 2,15,27")
    parser.add_argument(
        "--top-k", type=int, default=0, help="store so many likeliest tokens in place of the last hidden states"
    )
    parser.add_argument("--store-dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of stored states")
    parser.add_argument("--max-length", type=int, default=0, help="tokens of a conversation to store; 0 stores all")
    parser.add_argument("--dtype", default="auto", help="the target's: auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--target-device-map", default="", help="auto spreads the target over this process's GPUs (default: one device)"
    )
    parser.add_argument("--overwrite", action="store_true", help="delete the stored states first")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the target")


def run(args: argparse.Namespace) -> int:
    """Extracts what is missing.

    Raises:
        UserError: no data set there, one of another tokenizer, stored states of other settings, or too little disk.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    root = Path(args.data).expanduser()
    meta, records = read_meta(root), load_records(root)
    name = args.target or meta["target"]["name"]
    if args.top_k < 0 or args.max_length < 0:
        raise UserError(f"top_k={args.top_k} and max_length={args.max_length} must not be negative")
    target = Target.load(name, args.dtype, args.device, args.trust_remote_code, args.target_device_map)
    target.check_head()
    if meta["target"]["tokenizer"] != target.identity()["tokenizer"]:
        raise UserError(f"data={args.data!r} was tokenized for target {meta['target']['name']!r}, not for {name!r}")
    if not 0 <= args.top_k <= target.vocab_size:
        raise UserError(f"top_k={args.top_k} is more than the {target.vocab_size} tokens of target {name!r}")
    layers = parse_layers(args.layers, target)
    if not layers:
        raise UserError(f"layers={args.layers!r} stores nothing; write default, or layer numbers such as 2,15,27")
    if args.overwrite and world == 1:
        shutil.rmtree(root / "features", ignore_errors=True)
    describe(root, target, layers, args)

    done = FeatureStore(root)
    limit = args.max_length or None
    todo = [(row["id"], row["tokens"][:limit]) for row in records if row["id"] not in done]
    element = DTYPES[args.store_dtype].itemsize
    last = 8 * args.top_k + 4 if args.top_k else element * target.hidden_size
    position = element * len(layers) * target.hidden_size + last
    needed = 1.01 * position * sum(len(tokens) - 1 for _, tokens in todo)
    if rank == 0:
        free = shutil.disk_usage(root).free
        print(
            f"{args.data}: states of layers {','.join(map(str, layers))} and "
            f"{f'the {args.top_k} likeliest tokens' if args.top_k else 'last states'} in {args.store_dtype}, "
            f"{len(todo)} of {len(records)} conversations to do, about {needed / 1e9:.3f} GB; {free / 1e9:.1f} GB are free",
            flush=True,
        )
    check_space(
        root, needed, "features", "choose another disk for the data, --top-k 64, fewer --layers or --max-length"
    )
    writer = ShardWriter(root / "features", rank)
    kept = "the shards written so far are"
    mine = [it for it in todo if owner(it[0], world) == rank]
    with Progress("features", len(mine), "conversations") as progress:
        for keys, rows in batches(mine, 1 if target.device.type == "cpu" else _BATCH_TOKENS):
            for key, tensors in zip(
                keys, states(target, rows, layers, args.top_k, DTYPES[args.store_dtype]), strict=True
            ):
                writer.add(key, **tensors)
            if writer.full:
                writer.write(kept)
            progress.advance(len(keys))
        if writer.pending:
            writer.write(kept)
    return 0


def describe(root: Path, target: Target, layers: tuple[int, ...], args: argparse.Namespace) -> None:
    """Writes features.json, or checks that what is there was made with the same settings.

    Raises:
        UserError: it was not.
    """
    wanted = {"layers": list(layers), "dtype": args.store_dtype, "top_k": args.top_k, "max_length": args.max_length}
    held = stored_features(root)
    if held is not None and any((root / "features").glob("part-*.safetensors")):
        for key, new in wanted.items():
            old = held.get(key, new)
            if old != new:
                raise UserError(
                    f"data={args.data!r} holds features with {key}={old!r}, this run has {key}={new!r}; "
                    "use the same, or replace them: --overwrite"
                )
    write_json(root / "features" / "features.json", {"target": target.identity(), **wanted})


def batches(todo: list[tuple[str, list[int]]], limit: int) -> Iterator[tuple[list[str], list[list[int]]]]:
    """Conversations of about equal length together, at most `limit` padded tokens (or a single one)."""
    keys: list[str] = []
    rows: list[list[int]] = []
    for key, tokens in sorted(todo, key=lambda it: len(it[1])) if limit > 1 else todo:
        if rows and (len(rows) + 1) * len(tokens) > limit:
            yield keys, rows
            keys, rows = [], []
        keys.append(key)
        rows.append(tokens)
    if rows:
        yield keys, rows


@torch.no_grad()
def states(
    target: Target, rows: list[list[int]], layers: tuple[int, ...], top_k: int, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """What `FeatureStore.get` gives back, for each row, on the CPU."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, tokens in enumerate(rows):
        ids[i, : len(tokens)] = torch.as_tensor(tokens)
    out = target.forward(ids.to(target.device), layers)
    for i, tokens in enumerate(rows):
        n = len(tokens) - 1
        found: dict[str, Any] = {"features": out.features[i, :n].to(dtype)}
        if top_k:
            parts = [likeliest(target.head(part), top_k) for part in out.last_hidden[i, :n].split(256)]
            names = ("topk_ids", "topk_logits", "log_z")
            found.update(zip(names, map(torch.cat, zip(*parts, strict=True)), strict=True))
        else:
            found["last_hidden"] = out.last_hidden[i, :n].to(dtype)
        yield {name: tensor.cpu() for name, tensor in found.items()}


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """[n, v] -> ids [n, k] int32, likeliest first, their logits [n, k], and log of the full softmax denominator [n]."""
    top = logits.topk(k, dim=-1)
    return top.indices.int(), top.values, logits.logsumexp(-1)
