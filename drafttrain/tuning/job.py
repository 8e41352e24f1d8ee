"""What `drafttrain plan` plans besides a recipe: devices, their memory, where states come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drafttrain.values import (
    File,
    Name,
    PositiveAmount,
    PositiveFraction,
    Size,
    StoreDtype,
    check_fields,
)


@dataclass(frozen=True)
class Job:
    """The fields are the flags of `drafttrain plan`. Raises UserError for values out of range."""

    gpus: Size = 0
    device: Name = ""
    gpu_memory: PositiveAmount | None = None
    disk: PositiveAmount | None = None
    deepspeed: Name = ""
    states: Literal["", "online", "stored", "vllm"] = ""
    store_dtype: StoreDtype = "bfloat16"
    conversations: Size = 0
    tokens: Size = 0
    prompt_tokens: Size = 128
    image_tokens: Size = 0
    target_config: File | None = None
    init_config: File | None = None
    compute_efficiency: PositiveFraction = 0.4
    memory_efficiency: PositiveFraction = 0.75

    def __post_init__(self) -> None:
        check_fields(self)
