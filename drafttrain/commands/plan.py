"""`drafttrain plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from drafttrain.command import AnyNumber, command, result_of
from drafttrain.values import (
    AnyText,
    File,
    Name,
    Place,
    PositiveFraction,
    Size,
    StorageSize,
    StoreDtype,
)

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def plan(
    recipe: Place | Path,
    /,
    *overrides: Annotated[AnyText, AnyNumber()],
    gpus: Size = 0,
    device: Name | Path = "",
    gpu_memory: StorageSize | None = None,
    disk: StorageSize | None = None,
    deepspeed: Name | Path = "",
    states: Literal["", "online", "stored", "vllm"] = "",
    store_dtype: StoreDtype = "bfloat16",
    conversations: Size = 0,
    tokens: Size = 0,
    prompt_tokens: Size = 128,
    image_tokens: Size = 0,
    target_config: File | Path | None = None,
    init_config: File | Path | None = None,
    compute_efficiency: PositiveFraction = 0.4,
    memory_efficiency: PositiveFraction = 0.75,
    output: Name | Path | None = None,
) -> Json:
    """Memory, disk and hours of a training run, and what to change if it does not fit.

    Nothing is downloaded.

    ```
    drafttrain plan llama-3.1-8b/eagle3 --device rtx4090
    drafttrain plan configs/smollm2-135m/eagle3.yaml per_device_train_batch_size=2 --gpus 8 --disk 4T --output plan.json
    ```

    Memory comes from the training step itself, run on tensors without data. Hours come from a
    roofline and are not measured. Of the target only its config.json is read: from --target-config,
    from target.json next to the recipe, or by the target's name.

    Args:
        recipe: a YAML recipe, or the name of one that comes with drafttrain
        overrides: replace a value of the recipe; a.b=c sets b in a
        gpus: GPUs that train; 0 takes the processes of the accelerate file in --deepspeed, else 1
        device: accelerator with these rates and memory, one of h100, h200, a100, a100-40, l4, rtx3090, rtx4090,
            m3max, m2ultra, cpu-desktop, cpu-server; empty: h100, unless --gpu-memory is another
        gpu_memory: memory in GB of 10^9 bytes, instead of that of the device, which must be named
            unless it is about an h100's
        disk: free space in GB, or such as 4T; without it there is no limit
        deepspeed: ZeRO stage from 0 to 3, DeepSpeed JSON or accelerate YAML; empty: the
            recipe's, else 2 on several GPUs, 0 on one
        states: where the target's states come from: online, stored or vllm; empty: as the recipe and
            its data say
        store_dtype: type of the stored states
        conversations: conversations of the data; 0: as many as the recipe's data has, else 60,000
        tokens: tokens of a conversation on average; 0: as in the recipe's data, else 1024
        prompt_tokens: tokens of a conversation's prompt, without its images
        image_tokens: tokens of a conversation's images on average; more than 0 counts the target's vision part
        target_config: the target's config.json, where its name leads to none
        init_config: config.json of the model that the recipe's init names
        compute_efficiency: achieved share of the device's FLOP rate
        memory_efficiency: achieved share of the device's bandwidth
        output: JSON file with the same figures
    """
    return result_of("tuning.plan", locals())
