"""`drafttrain serve-target`: a vLLM server that hands out the target's states for features and training."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from types import FrameType

import torch

from drafttrain.config import load_config
from drafttrain.data.generate import parse_layers
from drafttrain.data.state_server import MooncakeStore, StateServer
from drafttrain.drafters.base import NEW
from drafttrain.drafters.registry import kind_class
from drafttrain.errors import UserError
from drafttrain.flags import TARGET_HELP
from drafttrain.target import Target, load_shell
from drafttrain.training import arguments
from drafttrain.values import AnyText, File, Name, PositiveAmount, adder

HELP = """serve the target with vLLM, which hands out its states: for features and training without the target's weights

Starts (with --dry-run prints) `vllm serve` with the layers that a drafter reads. All flags behind -- are vLLM's: parallel sizes,
quantization, dtype, port. States pass through a folder that the server and its clients see: on one machine shared memory, on
several a network disk, or without one through a Mooncake store. Ctrl-C ends the server too.

  drafttrain serve-target --target meta-llama/Llama-3.1-8B-Instruct --engine-python ~/vllm/bin/python
  drafttrain serve-target --recipe configs/smollm2-135m/eagle3.yaml --dry-run
  drafttrain serve-target --target T --states-dir /nfs/states -- --tensor-parallel-size 8 --port 8001
  drafttrain serve-target --target T --transport mooncake --mooncake-master 10.0.0.5:50051      # no shared disk"""

_LOOK_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--target", Name, default="", help=f"{TARGET_HELP} (default: the recipe's)")
    add("--recipe", File, help="recipe of the drafter that will be trained; its target and layers are served")
    add("--layers", default="default", help="states to hand out beside the last one: default, or 2,15,27")
    add("--states-dir", Name, default="", help="folder that clients see too (default: in shared memory)")
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
    add("--engine-python", File, default=sys.executable, help="interpreter of the environment that has vLLM")
    add("--trust-remote-code", action="store_true", help="run model code that comes with the target")
    add("--dry-run", action="store_true", help="print the command and start nothing")
    add("flags", AnyText, nargs="*", metavar="-- flags", help="flags of vllm serve")


def run(args: argparse.Namespace) -> int:
    """Starts the server and stays until it ends. Raises UserError: nothing to serve, no vLLM, or the server ended."""
    config = load_config(args.recipe, [], arguments.KEYS) if args.recipe else None
    name = args.target or (config.target if config else "")
    if not name:
        raise UserError("target='' names nothing to serve; give --target T, or --recipe FILE")
    target = load_shell(name, trust_remote_code=args.trust_remote_code)
    layers = parse_layers(args.layers, target)
    if config is not None and args.layers == "default":
        layers = layers_of(config.kind, config.init, config.drafter, target)
    server = StateServer(
        target, layers, args.flags, args.engine_python, args.states_dir, args.trust_remote_code, store_of(args)
    )
    print(f"{'' if args.dry_run else 'starting '}{server}", flush=True)
    return 0 if args.dry_run else watch(server, name)


def store_of(args: argparse.Namespace) -> MooncakeStore | None:
    """The store that the flags name; None for a folder. Raises UserError: flags of one transport together with the other."""
    if args.transport == "mooncake":
        if args.states_dir:
            raise UserError(f"states_dir={args.states_dir!r} belongs to --transport folder; drop it")
        return MooncakeStore(args.mooncake_master, args.mooncake_protocol, args.mooncake_gib)
    for key, default in (("mooncake_master", ""), ("mooncake_protocol", "tcp"), ("mooncake_gib", 4.0)):
        if (given := getattr(args, key)) != default:
            raise UserError(f"{key}={given!r} belongs to --transport mooncake; give that too, or drop it")
    return None


def layers_of(kind: str, init: str, options: dict[str, object], target: Target) -> tuple[int, ...]:
    """The states that a recipe's drafter reads. Raises UserError: options that do not fit."""
    with torch.device("meta"):
        return kind_class(kind).begin(target, "random" if init in NEW else init, dict(options), "kl").feature_layers


def watch(server: StateServer, name: str) -> int:
    """Runs a server until it ends, or a signal ends both; returns the exit status."""
    ending = 0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ending
        ending = number

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        server.start()
        ready = False
        while not ending:
            server.check_running()
            server.sweep()
            if not ready and server.is_ready():
                ready = True
                numbers = ",".join(map(str, server.layers))
                print(
                    f"{server.url} serves {name!r}: layers {numbers}, states in {server.place}. Next: drafttrain features "
                    f"--backend vllm --url {server.url} --data DATA, or target_url: {server.url} in a recipe",
                    flush=True,
                )
            time.sleep(_LOOK_SECONDS)
    finally:
        server.stop()
    print(f"ended by {signal.Signals(ending).name}; vLLM has ended, and its states are deleted", file=sys.stderr)
    return 128 + ending
