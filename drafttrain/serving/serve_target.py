"""`drafttrain serve-target`: a vLLM server that hands out the target's states for features and
training.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from types import FrameType

import torch

from drafttrain.config import TrainConfig, load_config
from drafttrain.data.generate import parse_layers
from drafttrain.drafters.base import NEW
from drafttrain.drafters.registry import kind_class
from drafttrain.errors import UserError
from drafttrain.states.server import MooncakeStore, StateServer
from drafttrain.target import Target, load_shell
from drafttrain.training import arguments

_LOOK_SECONDS = 2.0  # between looks at the server


def run(args: argparse.Namespace) -> int:
    """Starts the server and stays until it ends.

    Raises:
        UserError: nothing to serve, no vLLM, or the server ended.
    """
    config = None
    name = args.target
    if args.recipe:
        config = load_config(args.recipe, [], arguments.KEYS)
        name = name or config.target
    if not name:
        raise UserError("target='' names nothing to serve; give --target T, or --recipe FILE")
    target = load_shell(name, trust_remote_code=args.trust_remote_code)
    layers = parse_layers(args.layers, target)
    if config is not None and args.layers == "default":
        layers = layers_of(config, target)
    server = StateServer(
        target,
        layers,
        args.flags,
        args.engine_python,
        args.states_dir,
        args.trust_remote_code,
        store_of(args),
    )
    if args.dry_run:
        print(server, flush=True)
        return 0
    print(f"starting {server}", flush=True)
    return watch(server, name)


def store_of(args: argparse.Namespace) -> MooncakeStore | None:
    """The store that the flags name; None for a folder.

    Raises:
        UserError: flags of one transport together with the other.
    """
    if args.transport == "mooncake":
        if args.states_dir:
            raise UserError(
                f"states_dir={args.states_dir!r} belongs to --transport folder; drop it"
            )
        return MooncakeStore(args.mooncake_master, args.mooncake_protocol, args.mooncake_gib)
    # A flag of the store that differs from its default was given.
    defaults = {"mooncake_master": "", "mooncake_protocol": "tcp", "mooncake_gib": 4.0}
    for key, default in defaults.items():
        given = getattr(args, key)
        if given != default:
            raise UserError(
                f"{key}={given!r} belongs to --transport mooncake; give that too, or drop it"
            )
    return None


def layers_of(config: TrainConfig, target: Target) -> tuple[int, ...]:
    """The states that a recipe's drafter reads. Raises UserError: options that do not fit."""
    init = config.init
    if init in NEW:
        init = "random"
    with torch.device("meta"):  # no weights are needed to know the layers
        drafter = kind_class(config.kind).begin(target, init, config.drafter, "kl")
    return drafter.feature_layers


def watch(server: StateServer, name: str) -> int:
    """Runs a server until it ends, or a signal ends both; returns the exit status."""
    ending = 0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ending
        ending = number

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    # vLLM has a session of its own, so that a signal reaches it through `stop` only.
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
                    f"{server.url} serves {name!r}: layers {numbers}, states in {server.place}. "
                    f"Next: drafttrain features --backend vllm --url {server.url} --data DATA, or "
                    f"target_url: {server.url} in a recipe",
                    flush=True,
                )
            time.sleep(_LOOK_SECONDS)
    finally:
        server.stop()
    print(
        f"ended by {signal.Signals(ending).name}; vLLM has ended, and its states are deleted",
        file=sys.stderr,
    )
    return 128 + ending
