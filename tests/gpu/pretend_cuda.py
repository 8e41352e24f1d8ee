"""What `torch.cuda` and Triton answer while a pretend GPU is open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from drafttrain.losses import divergence
from drafttrain.ops import flex_spans, layer_ops, tree_attention_triton
from tests.gpu.pretend import PretendGpu, PretendTensor, place, plain, without_pretending


def install(gpu: PretendGpu, patches: pytest.MonkeyPatch) -> None:
    """Replaces functions of torch.cuda, Triton's launch and FlexAttention; `patches` undoes it."""
    for name, value in (_facts(gpu) | _streams(gpu) | _graphs(gpu)).items():
        patches.setattr(torch.cuda, name, value)
    patches.setattr(torch.cuda.random, "_lazy_call", lambda run, **_: None)
    patches.setattr(
        torch.cuda.random, "get_rng_state", lambda device="cuda": torch.zeros(16, dtype=torch.uint8)
    )
    patches.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    patches.setattr(torch.accelerator, "current_stream", torch.cuda.current_stream)
    patches.setattr(torch.accelerator, "is_available", lambda check_available=False: True)
    patches.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    _install_triton(gpu, patches)
    flex_spans._compiled_flex.cache_clear()
    patches.setattr(flex_spans, "_compiled_flex", lambda options: dense_flex)
    patches.setattr(flex_attention, "flex_attention", dense_flex)
    patches.setattr(
        flex_attention, "create_block_mask", lambda sees, *_, **__: SimpleNamespace(mask_mod=sees)
    )
    patches.setattr(torch, "compile", lambda model=None, **_: model)


def _index(gpu: PretendGpu, device: Any) -> int:
    if device is None or isinstance(device, int):
        return gpu.current if device is None else device
    index = torch.device(device).index
    return gpu.current if index is None else index


def _facts(gpu: PretendGpu) -> dict[str, Any]:
    major, minor = gpu.capability
    properties = SimpleNamespace(
        name=f"pretend GPU sm_{major}{minor}",
        major=major,
        minor=minor,
        multi_processor_count=132,
        total_memory=gpu.memory,
        shared_memory_per_block_optin=gpu.shared,
    )

    def exchange(index: int) -> int:
        before = gpu.current
        gpu.current = before if index < 0 else index
        return before

    def debug(mode: str | int) -> None:
        gpu.strict = mode in ("error", 2)

    return {
        "_lazy_init": lambda: None,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "current_device": lambda: gpu.current,
        "device_count": lambda: gpu.devices,
        "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)] * gpu.devices,
        "get_sync_debug_mode": lambda: 2 if gpu.strict else 0,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: gpu.capability >= (8, 0),
        "is_initialized": lambda: True,
        "ipc_collect": lambda: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "max_memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "mem_get_info": lambda device=None: (gpu.memory, gpu.memory),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "set_device": lambda device: exchange(_index(gpu, device)),
        "set_rng_state": lambda state, device="cuda": None,
        "set_rng_state_all": lambda states: None,
        "set_sync_debug_mode": debug,
        "synchronize": lambda device=None: gpu.wait("synchronize"),
    }


def _streams(gpu: PretendGpu) -> dict[str, Any]:
    class Stream:
        """Work is done at once, in any stream; what counts is who waits for it."""

        def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
            self.device = torch.device("cuda", _index(gpu, device))
            self.cuda_stream = gpu.streams = gpu.streams + 1

        def wait_stream(self, other: Stream) -> None:
            if self.device != other.device:
                raise RuntimeError(
                    f"a stream of {self.device} waits for one of {other.device} at {place()}"
                )

        def wait_event(self, event: Event) -> None:
            pass

        def record_event(self, event: Event | None = None) -> Event:
            return event or Event()

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return gpu.recording is not None

        def synchronize(self) -> None:
            gpu.wait("stream")

    class Event:
        def __init__(self, enable_timing: bool = False, **_: Any) -> None:
            pass

        def record(self, stream: Stream | None = None) -> None:
            pass

        def wait(self, stream: Stream | None = None) -> None:
            pass

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            gpu.wait("event")

        def elapsed_time(self, later: Event) -> float:
            return 1.0  # an error where either is not complete, but no wait

    first = [Stream(index) for index in range(gpu.devices)]  # the default streams
    gpu.streams = 0
    now = list(first)

    def set_stream(stream: Stream) -> None:
        now[stream.device.index], gpu.current = stream, stream.device.index

    @contextlib.contextmanager
    def use(stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        device, before = gpu.current, now[stream.device.index]
        set_stream(stream)
        try:
            yield
        finally:
            now[before.device.index], gpu.current = before, device

    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: now[_index(gpu, device)],
        "default_stream": lambda device=None: first[_index(gpu, device)],
        "set_stream": set_stream,
        "stream": use,
        "is_current_stream_capturing": lambda: gpu.recording is not None,
    }


def _graphs(gpu: PretendGpu) -> dict[str, Any]:
    class CUDAGraph:
        """Launches with the addresses that they had at the capture."""

        def __init__(self, keep_graph: bool = False) -> None:
            self.launches: list[Any] | None = None
            self.made: list[Tensor] = []

        def replay(self) -> None:
            if self.launches is None:
                raise RuntimeError("a graph is replayed that holds no capture")
            gpu.replays += 1
            gpu.calls[place()] += 1

            def run() -> None:
                gpu.poison(self.made)  # whoever still reads the last replay's outputs notices
                for launch in self.launches:
                    launch()

            without_pretending(run)()

        def reset(self) -> None:
            self.launches = None

    @contextlib.contextmanager
    def capture(
        graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        gpu.wait("capture")  # torch synchronizes and empties the cache before one
        launches = gpu.begin_capture()
        try:
            with torch.cuda.stream(stream):
                yield
            graph.launches = launches
        finally:
            graph.made = without_pretending(gpu.end_capture)()

    return {"CUDAGraph": CUDAGraph, "graph": capture, "graph_pool_handle": lambda: (0, 0)}


def _install_triton(gpu: PretendGpu, patches: pytest.MonkeyPatch) -> None:
    from triton.runtime import driver
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    facts = {"multiprocessor_count": 132, "max_shared_mem": gpu.shared}
    utils = SimpleNamespace(get_device_properties=lambda index: facts)
    patches.setattr(driver, "_active", SimpleNamespace(utils=utils))
    tree_attention_triton._device_limits.cache_clear()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not any(isinstance(x, PretendTensor) for x in tensors):
            GridExecutor(self.rewrite(), self.arg_names, grid, self.pre_run_hooks)(*args, **kwargs)
            return
        check_launch(gpu, self.__name__, tensors)
        given = [plain(x) for x in args]
        named = {name: plain(x) for name, x in kwargs.items()}
        executor = GridExecutor(self.rewrite(), self.arg_names, grid, self.pre_run_hooks)
        gpu.call(without_pretending(lambda: executor(*given, **named)))

    patches.setattr(InterpretedFunction, "run", run)
    if not gpu.interpret:
        patches.setattr(tree_attention_triton, "_launch", _attend_by_reference(gpu))
        patches.setattr(divergence, "has_kernel", lambda hidden: False)
        patches.setattr(layer_ops, "has_kernels", lambda x: False)


def check_launch(gpu: PretendGpu, kernel: str, tensors: list[Tensor]) -> None:
    """Raises RuntimeError where Triton would read a pointer of the host or of a device that is not the current one."""
    for tensor in tensors:
        if not isinstance(tensor, PretendTensor):
            raise RuntimeError(
                f"{kernel}: pointer argument cannot be accessed from Triton (cpu tensor?) at {place()}"
            )
        if tensor.device.index != gpu.current:
            raise RuntimeError(
                f"{kernel} launches on cuda:{gpu.current}, a pointer is on {tensor.device} at {place()}"
            )


def _attend_by_reference(gpu: PretendGpu) -> Any:
    """The launch of tree attention as two calls, computed by the torch reference: the interpreter takes seconds."""
    attention = tree_attention_triton
    checked = {
        (1,): lambda *tensors: check_launch(gpu, "attend_parts", list(tensors))
    }  # in place of the kernel

    def launch(
        query: Tensor, keys: Tensor, values: Tensor, plan: Any, geometry: Any = None, **form: Any
    ) -> Tensor:
        tensors = [
            query,
            keys,
            values,
            *(x for x in (*plan, *form.values()) if isinstance(x, Tensor)),
        ]
        attention.run_kernel(checked, (1,), *tensors)
        attention._check(query, keys, values, plan, form["sinks"])
        own_plan = attention.PackedPlan._make(plain(x) for x in plan)
        inputs = [plain(x) for x in (query, keys, values)]
        options = {name: plain(x) for name, x in form.items()}
        out = query.new_empty(1, query.shape[2], query.shape[1], values.shape[3])

        def compute() -> None:
            out.data_on_cpu.copy_(
                attention.static_reference(*inputs, own_plan, **options).transpose(1, 2)
            )

        gpu.call(without_pretending(compute))
        return out.transpose(1, 2)

    return launch


def dense_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_mask: Any,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    return_aux: Any = None,
    kernel_options: Any = None,
) -> tuple[Tensor, Any]:
    """FlexAttention with the scores that it never holds. Under autocast it casts as FlexAttention does.

    Args:
        query: [b, heads, t, e]; key, value: [b, kv_heads, T, e]. block_mask: anything with a mask_mod.
    """
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (x.to(torch.get_autocast_dtype("cuda")) for x in (query, key, value))
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query {query.dtype}, key {key.dtype} and value {value.dtype} must share a dtype"
        )
    groups = query.shape[1] // key.shape[1]
    if enable_gqa != (groups != 1):
        raise ValueError("enable_gqa must say whether there are fewer key heads than query heads")
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    rows, asks, seen = (
        torch.arange(n, device=query.device) for n in (len(query), query.shape[2], key.shape[2])
    )
    visible = block_mask.mask_mod(
        rows[:, None, None, None], 0, asks[:, None], seen[None]
    )  # broadcasts to [b, 1, t, T]
    with torch.autocast("cuda", enabled=False):
        scores = (query @ key.transpose(-1, -2)).float() * (scale or query.shape[-1] ** -0.5)
        scores = scores.masked_fill(~visible, float("-inf"))
        lse = scores.logsumexp(-1)  # [b, heads, t]
        out = (scores - lse[..., None]).exp().to(value.dtype) @ value
    if return_aux is not None:
        return out, SimpleNamespace(lse=lse)
    return (out, lse) if return_lse else out  # type: ignore[return-value]
