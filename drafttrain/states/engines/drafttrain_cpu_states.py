"""vLLM's connector of hidden states for machines without a GPU. vLLM's process imports this file;
drafttrain is not needed there.

The connector of vLLM 0.32 copies states through pinned memory and waits for CUDA events, which CPUs
do not have. Here both are what they are on a CPU: ordinary memory, and work that is done when the
call returns.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock


class _Done:
    """A stream or an event of a device that finishes each call before it returns."""

    def __init__(self, *args: object, **options: object):
        pass

    def query(self) -> bool:
        return True

    def wait(self, *args: object) -> None:
        pass

    record = synchronize = wait_event = wait_stream = wait


class CpuDevice:
    """Streams and events of a device without them, as torch.cuda has them."""

    Event = Stream = _Done

    @staticmethod
    def stream(stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def current_stream(*device: object) -> _Done:
        return _Done()


class _CpuTorch:
    """torch as the connector's module sees it."""

    cuda = CpuDevice

    @staticmethod
    def empty_like(
        like: torch.Tensor,
        *args: Any,
        pin_memory: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        return torch.empty_like(like, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


stock.torch = _CpuTorch()  # type: ignore[attr-defined]  # in this module only


class CpuHiddenStatesConnector(stock.ExampleHiddenStatesConnector):
    """ExampleHiddenStatesConnector whose copies are plain ones."""
