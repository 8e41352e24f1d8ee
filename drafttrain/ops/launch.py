"""Launches of Triton kernels, and whether this machine builds them."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor

from drafttrain.errors import first_line

logger = logging.getLogger(__name__)


@functools.cache
def has_triton() -> bool:
    """Whether Triton builds and launches a kernel on the GPU; a warning says what it lacks."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        # At its first kernel, Triton compiles a part of its driver with the machine's C compiler.
        from drafttrain.ops.tree_attention_kernels import mark

        out = torch.zeros(1, dtype=torch.int32, device="cuda")
        run_kernel(mark, (1,), out)
    except Exception as error:  # whatever its reason, torch's functions serve
        logger.warning(
            "Triton builds no kernels here (%s): this GPU uses torch's slower functions; install a "
            "C compiler and Python's headers (apt-get install gcc python3-dev)",
            first_line(error),
        )
        return False
    return True


def run_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    first: Tensor,
    /,
    *args: Any,
    **options: Any,
) -> None:
    """Launches a Triton kernel on its first argument's device, not on the process's current one."""
    with torch.cuda.device_of(first):
        kernel[grid](first, *args, **options)
