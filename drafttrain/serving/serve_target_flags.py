"""`drafttrain serve-target`: its help and flags."""

from __future__ import annotations

import argparse
import sys

from drafttrain.flags import TARGET_HELP
from drafttrain.values import AnyText, File, Name, Place, PositiveAmount, adder

HELP = """serve the target with vLLM, which hands out its states: for features and training without the target's weights

Starts (with --dry-run prints) `vllm serve` with the layers that a drafter reads. All flags behind -- are vLLM's: parallel sizes,
quantization, dtype, port. States pass through a folder that the server and its clients see: on one machine shared memory, on
several a network disk, or without one through a Mooncake store. Ctrl-C ends the server too.

  drafttrain serve-target --target meta-llama/Llama-3.1-8B-Instruct --engine-python ~/vllm/bin/python
  drafttrain serve-target --recipe configs/smollm2-135m/eagle3.yaml --dry-run
  drafttrain serve-target --target T --states-dir /nfs/states -- --tensor-parallel-size 8 --port 8001
  drafttrain serve-target --target T --transport mooncake --mooncake-master 10.0.0.5:50051      # no shared disk"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--target", Name, default="", help=f"{TARGET_HELP} (default: the recipe's)")
    add(
        "--recipe",
        Place,
        help="recipe (file or name) of the drafter to be trained; its target and layers are served",
    )
    add(
        "--layers",
        default="default",
        help="states handed out beside the last: default (three layers), wide (six) or 2,15,27",
    )
    add(
        "--states-dir",
        Name,
        default="",
        help="folder that clients see too (default: in shared memory)",
    )
    add(
        "--transport",
        default="folder",
        choices=["folder", "mooncake"],
        help="what states pass through (default: %(default)s)",
    )
    add(
        "--mooncake-master",
        Name,
        default="",
        help="HOST:PORT where mooncake_master runs, as servers and clients reach it",
    )
    more = "network of --transport mooncake (default: %(default)s)"
    add("--mooncake-protocol", default="tcp", choices=["tcp", "rdma"], help=more)
    more = "memory for states that this server gives to the store, in GiB (default: %(default)s)"
    add("--mooncake-gib", PositiveAmount, default=4.0, help=more)
    add(
        "--engine-python",
        File,
        default=sys.executable,
        help="interpreter of the environment that has vLLM",
    )
    add(
        "--trust-remote-code",
        action="store_true",
        help="run model code that comes with the target",
    )
    add("--dry-run", action="store_true", help="print the command and start nothing")
    add("flags", AnyText, nargs="*", metavar="-- flags", help="flags of vllm serve")
