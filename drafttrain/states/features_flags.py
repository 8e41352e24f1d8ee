"""`drafttrain features`: its help and flags."""

from __future__ import annotations

import argparse
import sys
from typing import get_args

from drafttrain.flags import add_target_flags
from drafttrain.values import AnyText, DeviceMap, File, Name, Place, Size, StoreDtype, adder

HELP = """store the target's hidden states of a data set, for training without running the target

Works on any data set (`generate --features` stores states while it runs). The size is estimated and checked against the
free disk first. An interrupted run continues when run again; several processes share the work.

  drafttrain features --data runs/data
  drafttrain features --data runs/data --layers 2,15,27 --top-k 64          # most likely tokens in place of last states
  accelerate launch --num_processes 8 -m drafttrain.cli features --data runs/data
  drafttrain features --data runs/data --target-device-map auto             # a target larger than one GPU
  drafttrain features --data runs/data --backend vllm --engine-python ~/vllm/bin/python -- --tensor-parallel-size 8
  drafttrain features --data runs/data --backend vllm --url http://node1:8000 --url http://node2:8000   # serve-target runs there

With --backend vllm the target's layers are never loaded here: vLLM computes the states, quantized or on many GPUs, and is proven
first: its log-probabilities must be those of the target's head over its states."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--data", Place, required=True, help="folder of the data set; states go to DATA/features")
    add_target_flags(
        parser,
        "short name, folder or Hub id (default: the target named in the data)",
        required=False,
    )
    add(
        "--target-device-map",
        DeviceMap,
        default="",
        help="auto spreads the target over GPUs (default: one device)",
    )
    add(
        "--layers",
        default="default",
        help="target states to store: default (three layers), wide (six) or 2,15,27",
    )
    add(
        "--top-k",
        Size,
        default=0,
        help="store this many most likely tokens in place of the last hidden states",
    )
    more = "of stored states; int8 takes half of bfloat16's bytes"
    add("--store-dtype", default="bfloat16", choices=get_args(StoreDtype), help=more)
    add("--max-length", Size, default=0, help="tokens of a conversation to store; 0 stores all")
    add(
        "--backend",
        default="local",
        choices=["local", "vllm"],
        help="what computes the states (default: %(default)s)",
    )
    add("--url", action="append", default=[], help="server of --backend vllm that serve-target started; repeat it for several "
        "(default: start one)")  # fmt: skip
    add(
        "--states-dir",
        Name,
        default="",
        help="folder of the server's states, as seen here (default: as the server says)",
    )
    add(
        "--engine-python",
        File,
        default=sys.executable,
        help="interpreter of the environment that has vLLM",
    )
    add(
        "flags",
        AnyText,
        nargs="*",
        metavar="-- flags",
        help="flags of vllm serve, for the server that this command starts",
    )
    more = "replace the stored states, which are deleted when the new ones are complete"
    add("--overwrite", action="store_true", help=more)
