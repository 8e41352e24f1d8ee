"""`drafttrain serve-target`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from drafttrain.command import AnyNumber, command, result_of
from drafttrain.values import AnyText, File, Name, Place, PositiveAmount


@command
def serve_target(
    *flags: Annotated[AnyText, AnyNumber()],
    target: Name | Path = "",
    recipe: Place | Path | None = None,
    layers: str = "default",
    states_dir: Name | Path = "",
    transport: Literal["folder", "mooncake"] = "folder",
    mooncake_master: Name | Path = "",
    mooncake_protocol: Literal["tcp", "rdma"] = "tcp",
    mooncake_gib: PositiveAmount = 4.0,
    engine_python: File | Path = sys.executable,
    trust_remote_code: bool = False,
    dry_run: bool = False,
) -> None:
    """Serve the target with vLLM, which hands out its states to features and training.

    Starts (with --dry-run prints) `vllm serve` with the layers that a drafter reads. All flags
    behind -- are vLLM's: parallel sizes, quantization, dtype, port. Only this machine reaches the
    server, unless --host says otherwise. States pass through a folder that the server and its
    clients see: on one machine shared memory, on several a network disk, or without one through a
    Mooncake store. Ctrl-C ends the server too.

    ```
    drafttrain serve-target --target meta-llama/Llama-3.1-8B-Instruct --engine-python ~/vllm/bin/python
    drafttrain serve-target --recipe configs/smollm2-135m/eagle3.yaml --dry-run
    drafttrain serve-target --target T --states-dir /nfs/states -- --tensor-parallel-size 8 --host 0.0.0.0
    drafttrain serve-target --target T --transport mooncake --mooncake-master 10.0.0.5:50051 -- --host 0.0.0.0    # no disk
    ```

    Args:
        flags: flags of vllm serve
        target: short name, folder or Hub id (default: the recipe's)
        recipe: recipe (file or name) of the drafter to be trained; its target and layers are
            served
        layers: states handed out beside the last: default (three layers), wide (six) or 2,15,27
        states_dir: folder that clients see too (default: in shared memory)
        transport: what states pass through
        mooncake_master: HOST:PORT where mooncake_master runs, as servers and clients reach it
        mooncake_protocol: network of --transport mooncake
        mooncake_gib: memory for states that this server gives to the store, in GiB
        engine_python: interpreter of the environment that has vLLM (default: this one)
        trust_remote_code: run model code that comes with the target
        dry_run: print the command and start nothing
    """
    result_of("serving.serve_target", locals())
