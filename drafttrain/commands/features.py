"""`drafttrain features`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from drafttrain.command import AnyNumber, command, result_of
from drafttrain.flags import Device
from drafttrain.values import AnyText, DeviceMap, Dtype, File, Name, Place, Size, StoreDtype

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def features(
    *flags: Annotated[AnyText, AnyNumber()],
    data: Place | Path,
    target: Name | Path = "",
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: bool = False,
    target_device_map: DeviceMap = "",
    layers: str = "default",
    top_k: Size = 0,
    store_dtype: StoreDtype = "bfloat16",
    max_length: Size = 0,
    backend: Literal["local", "vllm"] = "local",
    url: Sequence[str] = (),
    states_dir: Name | Path = "",
    engine_python: File | Path = sys.executable,
    overwrite: bool = False,
) -> Json:
    """Store the target's hidden states of a data set, for training without running the target.

    Works on any data set (`generate --features` stores states while it runs). The size is estimated
    and checked against the free disk first. An interrupted run continues when run again; several
    processes share the work.

    ```
    drafttrain features --data runs/data
    drafttrain features --data runs/data --layers 2,15,27 --top-k 64          # most likely tokens in place of last states
    accelerate launch --num_processes 8 -m drafttrain.cli features --data runs/data
    drafttrain features --data runs/data --target-device-map auto    # a target larger than one GPU
    drafttrain features --data runs/data --backend vllm --engine-python ~/vllm/bin/python -- --tensor-parallel-size 8
    drafttrain features --data runs/data --backend vllm --url http://node1:8000    # serve-target runs there
    ```

    With --backend vllm the target's layers are never loaded here: vLLM computes the states,
    quantized or on many GPUs, and is proven first: its log-probabilities must be those of the
    target's head over its states.

    Args:
        flags: flags of vllm serve, for the server that this command starts
        data: folder of the data set; states go to DATA/features
        target: short name, folder or Hub id (default: the target named in the data)
        dtype: float32, bfloat16, float16 or auto (bfloat16 where the device has it)
        device: cpu, cuda, cuda:N or auto
        trust_remote_code: run model code that comes with the target
        target_device_map: auto spreads the target over GPUs (default: one device)
        layers: target states to store: default (three layers), wide (six) or 2,15,27
        top_k: store this many most likely tokens in place of the last hidden states
        store_dtype: type of the stored states; int8 and float8 take half of bfloat16's bytes
        max_length: most tokens of a conversation that are stored; 0 stores all
        backend: what computes the states
        url: server of --backend vllm that serve-target started; repeat it for several (default:
            start one)
        states_dir: folder of the server's states, as seen here (default: as the server says)
        engine_python: interpreter of the environment that has vLLM (default: this one)
        overwrite: replace the stored states, which are deleted when the new ones are complete
    """
    return result_of("states.features", locals())
