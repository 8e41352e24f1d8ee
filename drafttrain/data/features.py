"""`drafttrain features`: stores the target's hidden states of a data set, for training without running the target."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import torch
from datasets import Dataset
from torch import Tensor

from drafttrain.data.generate import parse_layers
from drafttrain.data.int8_rows import StoreDtype, stored_as, value_bytes
from drafttrain.data.store import (
    FeatureStore,
    ShardWriter,
    Share,
    check_space,
    load_records,
    read_meta,
    stored_features,
)
from drafttrain.errors import UserError
from drafttrain.files import first_change, write_json
from drafttrain.flags import add_target_flags, load_target
from drafttrain.folders import OutputFolder, check_folder
from drafttrain.progress import Progress
from drafttrain.target import Target
from drafttrain.values import DeviceMap, Place, Size, adder

HELP = """store the target's hidden states of a data set, for training without running the target

Works on any data set (`generate --features` stores states while it runs). The size is estimated and checked against the
free disk first. An interrupted run continues when run again; several processes share the work.

  drafttrain features --data runs/data
  drafttrain features --data runs/data --layers 2,15,27 --top-k 64          # most likely tokens in place of last states
  accelerate launch --num_processes 8 -m drafttrain.cli features --data runs/data
  drafttrain features --data runs/data --target-device-map auto             # a target larger than one GPU"""

_BATCH_TOKENS = 16_384  # padded tokens of one forward on a GPU; on a CPU rows run one by one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--data", Place, required=True, help="folder of the data set; states go to DATA/features")
    add_target_flags(parser, "short name, folder or Hub id (default: the target named in the data)", required=False)
    add("--target-device-map", DeviceMap, default="", help="auto spreads the target over GPUs (default: one device)")
    add("--layers", default="default", help="target states to store: default, or 2,15,27")
    add("--top-k", Size, default=0, help="store this many most likely tokens in place of the last hidden states")
    more = "of stored states; int8 takes half of bfloat16's bytes"
    add("--store-dtype", default="bfloat16", choices=get_args(StoreDtype), help=more)
    add("--max-length", Size, default=0, help="tokens of a conversation to store; 0 stores all")
    more = "replace the stored states, which are deleted when the new ones are complete"
    add("--overwrite", action="store_true", help=more)


def run(args: argparse.Namespace) -> int:
    """Extracts the missing states.

    Raises UserError: no data set there, one of another tokenizer, stored states of other settings, or too little disk.
    """
    share, root = Share.of_process(), check_folder(args.data, "generate", key="data")
    meta, records = read_meta(root), load_records(root)
    name = args.target or meta["target"]["name"]
    target = load_target(args, name, args.target_device_map)
    if meta["target"]["tokenizer"] != target.identity()["tokenizer"]:
        raise UserError(f"data={args.data!r} was tokenized for target {meta['target']['name']!r}, not for {name!r}")
    if args.top_k and args.store_dtype == "int8":
        raise UserError(
            f"store_dtype=int8 stores states, but top_k={args.top_k} stores logits; drop --top-k, or store in bfloat16"
        )
    if args.top_k > target.vocab_size:
        raise UserError(f"top_k={args.top_k} is more than the {target.vocab_size} tokens of target {name!r}")
    layers = parse_layers(args.layers, target)
    if not layers:
        raise UserError(f"layers={args.layers!r} stores nothing; write default, or layer numbers such as 2,15,27")
    with OutputFolder(root, "generate", key="data", rank=share.rank if share.world > 1 else None) as output:
        if args.overwrite and share.world == 1:
            output.set_aside("features/part-*.safetensors", "features/features.json")
        try:
            extract(args, target, layers, share, records)
        except BaseException:
            if not any(root.glob("features/part-*.safetensors")):
                output.restore()
            raise
        output.forget()
    return 0


def extract(args: argparse.Namespace, target: Target, layers: tuple[int, ...], share: Share, records: Dataset) -> None:
    """Computes and stores the missing states of this process's conversations."""
    root = Path(args.data).expanduser()
    describe(root, target, layers, args)
    done = FeatureStore(root)
    limit = args.max_length or None
    todo = [(row["id"], row["tokens"][:limit]) for row in records if row["id"] not in done]
    element = value_bytes(args.store_dtype, target.hidden_size)
    last = 8 * args.top_k + 4 if args.top_k else element * target.hidden_size  # ids, logits and log_z, or the state
    row_bytes = 1.01 * (element * len(layers) * target.hidden_size + last)
    needed = row_bytes * sum(len(tokens) - 1 for _, tokens in todo)  # no state is needed at the last token
    if share.rank == 0:
        free = shutil.disk_usage(root).free
        kind = f"the {args.top_k} most likely tokens" if args.top_k else "last states"
        print(
            f"{args.data}: states of layers {','.join(map(str, layers))} and {kind} in {args.store_dtype}, "
            f"{len(todo)} of {len(records)} conversations to do, about {needed / 1e9:.3f} GB; {free / 1e9:.1f} GB are free",
            flush=True,
        )
    check_space(root, needed, "features", "choose another disk for the data, --top-k 64, fewer --layers, --max-length")
    writer = ShardWriter(root / "features", share.rank)
    mine = [it for it in todo if share.owns(it[0])]
    with Progress("features", len(mine), "conversations") as progress:
        for group in batches(mine, 1 if target.device.type == "cpu" else _BATCH_TOKENS):
            found = states(target, [tokens for _, tokens in group], layers, args.top_k, args.store_dtype)
            for (key, _), tensors in zip(group, found, strict=True):
                writer.add(key, **tensors)
            progress.advance(len(group))
        writer.flush()


def describe(root: Path, target: Target, layers: tuple[int, ...], args: argparse.Namespace) -> None:
    """Writes features.json, or checks that stored states were made with the same settings. Raises UserError: they were not."""
    wanted = {"layers": list(layers), "dtype": args.store_dtype, "top_k": args.top_k, "max_length": args.max_length}
    held = stored_features(root) or {}
    changed = first_change({**wanted, **{key: held[key] for key in wanted if key in held}}, wanted)
    if changed and any((root / "features").glob("part-*.safetensors")):
        raise UserError(f"data={args.data!r} holds features with {changed}; use the same, or replace them: --overwrite")
    write_json(root / "features" / "features.json", {"target": target.identity(), **wanted})


def batches(todo: list[tuple[str, list[int]]], limit: int) -> Iterator[list[tuple[str, list[int]]]]:
    """Groups conversations of similar length, at most `limit` padded tokens or a single conversation per group."""
    group: list[tuple[str, list[int]]] = []
    for key, tokens in sorted(todo, key=lambda it: len(it[1])) if limit > 1 else todo:
        if group and (len(group) + 1) * len(tokens) > limit:
            yield group
            group = []
        group.append((key, tokens))
    if group:
        yield group


@torch.no_grad()
def states(
    target: Target, rows: list[list[int]], layers: tuple[int, ...], top_k: int, dtype: StoreDtype
) -> Iterator[dict[str, Tensor]]:
    """The tensors to store for each row, on the CPU."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)  # [b, s]
    for i, tokens in enumerate(rows):
        ids[i, : len(tokens)] = torch.as_tensor(tokens)
    out = target.forward(ids.to(target.device), layers)
    for i, tokens in enumerate(rows):
        n = len(tokens) - 1
        found = stored_as("features", out.features[i, :n], dtype, target.hidden_size)  # [n, f*h]
        if top_k:
            parts = [top_tokens(target.head(part), top_k) for part in out.last_hidden[i, :n].split(256)]
            names = ("topk_ids", "topk_logits", "log_z")
            found.update(zip(names, map(torch.cat, zip(*parts, strict=True)), strict=True))
        else:
            found |= stored_as("last_hidden", out.last_hidden[i, :n], dtype, target.hidden_size)  # [n, h]
        yield {name: tensor.cpu() for name, tensor in found.items()}


def top_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """[n, v] -> ids [n, k] int32, most likely first, their logits [n, k], and log of the full softmax denominator [n]."""
    top = logits.topk(k, dim=-1)
    return top.indices.int(), top.values, logits.logsumexp(-1)
