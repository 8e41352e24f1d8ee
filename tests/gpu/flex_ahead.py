"""Compiles FlexAttention as training calls it for GPUs that are not here, and prints the shared memory that its kernels take.

    python tests/gpu/flex_ahead.py bfloat16:256:86 float32:128:120      # dtype, head size, compute capability

Needs a build of torch with CUDA, but no device and no driver: `environment` makes stand-ins for the driver's library and for
torch's count of devices. Inductor lowers the call for a device that reports the given capability and shared memory; Triton
then compiles the kernels that it wrote.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHARED = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}  # bytes a program may use
_DRIVER = """
int cuInit(unsigned flags) { return 100; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
int cuCtxGetCurrent() { return 100; }
int cuCtxGetDevice() { return 100; }
int cuPointerGetAttribute() { return 100; }
int cuGetErrorString() { return 100; }
int cuGetErrorName() { return 100; }
"""
_COUNT = """
static int devices = 0;
namespace c10 { namespace cuda {
signed char device_count() noexcept { return devices; }
signed char device_count_ensure_non_zero() { return 1; }
} }
extern "C" void set_devices(int count) { devices = count; }
"""


def environment(folder: Path) -> dict[str, str]:
    """Builds the stand-ins in a folder; returns the variables that a process needs to use them. Needs cc and c++."""
    for name, text, compiler, flags in (
        ("libcuda.so.1", _DRIVER, "cc", ["-xc", "-w", "-Wl,-soname,libcuda.so.1"]),
        ("count.so", _COUNT, "c++", ["-xc++"]),
    ):
        command = [compiler, "-shared", "-fPIC", *flags, "-", "-o", str(folder / name)]
        subprocess.run(command, input=text, text=True, check=True)
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    loads = {"LD_PRELOAD": str(folder / "count.so"), "DRIVER": str(folder / "libcuda.so.1")}
    return {**loads, **caches, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}


def pretend(capability: int) -> None:
    """Has torch and Triton answer what a device of that capability would."""
    import torch
    import triton
    from torch._dynamo.device_interface import CudaInterface as interface
    from triton.backends.compiler import GPUTarget

    major, minor = divmod(capability, 10)
    facts = SimpleNamespace(
        **{
            "name": "pretend",
            "major": major,
            "minor": minor,
            "multi_processor_count": 132,
            "warp_size": 32,
        },
        **{
            "total_memory": 80 * 2**30,
            "regs_per_multiprocessor": 65536,
            "max_threads_per_multi_processor": 2048,
        },
        **{
            "shared_memory_per_block_optin": SHARED[capability],
            "shared_memory_per_block": 49152,
            "L2_cache_size": 2**25,
        },
        **{
            "shared_memory_per_multiprocessor": SHARED[capability] + 1024,
            "max_threads_per_block": 1024,
            "gcnArchName": "",
        },
        **{
            "is_integrated": 0,
            "uuid": "x",
            "clock_rate": 1,
            "memory_clock_rate": 1,
            "memory_bus_width": 1,
            "pci_bus_id": 0,
        },
    )
    numbers = lambda value: lambda *_, **__: value  # noqa: E731
    answers: dict[str, Any] = {
        **{
            name: numbers(None)
            for name in ("_lazy_init", "set_device", "synchronize", "set_rng_state")
        },
        **{
            name: numbers(0)
            for name in ("current_device", "_exchange_device", "_maybe_exchange_device")
        },
        **{name: numbers(True) for name in ("is_available", "is_initialized", "is_bf16_supported")},
        **{
            "device_count": numbers(1),
            "_get_device_properties": numbers(facts),
            "get_device_properties": numbers(facts),
            "get_device_name": numbers("pretend"),
        },
        **{
            "get_device_capability": numbers((major, minor)),
            "get_rng_state": numbers(torch.zeros(16, dtype=torch.uint8)),
        },
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for name in ("get_rng_state", "set_rng_state", "current_device"):
        setattr(torch.cuda.random, name, answers[name])
    for name, value in {
        "_cuda_getDevice": 0,
        "_cuda_getDeviceCount": 1,
        "_cuda_getCurrentRawStream": 0,
    }.items():
        setattr(torch._C, name, numbers(value))
    stated = {
        **{
            "is_available": True,
            "get_compute_capability": capability,
            "is_triton_capable": True,
            "device_count": 1,
        },
        **{
            "raise_if_triton_unavailable": None,
            "get_raw_stream": 0,
            "exchange_device": 0,
            "maybe_exchange_device": 0,
        },
        **{
            "current_device": 0,
            "set_device": None,
            "synchronize": None,
            "current_stream": SimpleNamespace(cuda_stream=0),
        },
    }
    for name, value in stated.items():
        setattr(interface, name, staticmethod(numbers(value)))
    interface.Worker.get_device_properties = staticmethod(numbers(facts))
    interface.Worker.current_device = staticmethod(numbers(0))
    limits = {"max_shared_mem": SHARED[capability], "multiprocessor_count": 132}
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=numbers(0),
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: torch.device("cuda:0"),
        is_active=numbers(True),
        utils=SimpleNamespace(get_device_properties=numbers(limits)),
    )
    triton.runtime.driver.set_active(driver)


def lowered(dtype: str, width: int, heads: int = 8, kv_heads: int = 2) -> list[tuple[str, str]]:
    """(name, source) of the kernels that Inductor writes for a forward and a backward."""
    import torch
    from torch._inductor import async_compile, config
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._subclasses.fake_tensor import FakeTensorMode

    from drafttrain.ops.flex_spans import span_attention_gpu
    from drafttrain.ops.path_attention import Spans

    config.pattern_matcher = config.fx_graph_cache = False
    torch._functorch.config.force_non_lazy_backward_lowering = True
    torch._functorch.config.enable_autograd_cache = False
    joint_graph.lazy_init = post_grad.lazy_init = lambda *_, **__: None  # type: ignore[assignment]
    sources: list[tuple[str, str]] = []

    def keep(self: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        sources.append((name, source))
        return SimpleNamespace(run=lambda *_, **__: None)

    async_compile.AsyncCompile.triton = keep  # type: ignore[method-assign]
    torch._dynamo.reset()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):

            def make(n, h):
                made = torch.randn(n, h, width, dtype=getattr(torch, dtype), device="cuda:0")
                return made.requires_grad_()

            own = torch.arange(1100, device="cuda:0")[:700]
            spans = Spans(own * 0, own, own * 0)
            span_attention_gpu(make(700, heads), make(1100, kv_heads), make(1100, kv_heads), spans)
    except Exception as error:  # the compiled call then fails for lack of a device
        if not sources:
            raise
        del error
    return [(name, source) for name, source in sources if "_tem_" in name]


def shared_memory(source: str, name: str, capability: int) -> int:
    """Bytes of shared memory that a generated kernel takes."""
    import triton
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found: dict[str, Any] = {}

    def template(*_: Any, **meta: Any) -> Any:
        return lambda function: found.update(meta, function=function) or function

    triton_helpers.set_driver_to_gpu = lambda: None
    triton_heuristics.template = template  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        meta = found["triton_meta"]
        constants = meta.get("constants", {})
        signature = {
            key: "constexpr" if key in constants else kind
            for key, kind in meta["signature"].items()
        }
        code = ASTSource(found["function"], signature, constants, meta["configs"][0])
        options = {"num_warps": found["num_warps"], "num_stages": found["num_stages"]}
        compiled = triton.compile(code, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled.metadata.shared


def main(words: list[str]) -> None:
    import ctypes

    import torch

    torch._C._ensureCUDADeviceGuardSet()  # without devices torch's guard becomes one that does nothing
    ctypes.CDLL(os.environ["DRIVER"], mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(os.environ["LD_PRELOAD"]).set_devices(100)  # torch asks about more than one
    for word in words:
        dtype, width, capability = word.split(":")
        pretend(int(capability))
        sizes = [
            shared_memory(source, name, int(capability))
            for name, source in lowered(dtype, int(width))
        ]
        print(
            dtype,
            width,
            f"sm_{capability}",
            "forward, backward:",
            *sizes,
            "limit:",
            SHARED[int(capability)],
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
