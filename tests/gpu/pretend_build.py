"""Makes a build of torch without CUDA accept tensors on CUDA devices that a wrapper subclass stands for.

Two answers of torch's C++ side are in the way, and no Python function changes them:

- A device guard for CUDA. torch has one that does nothing (`NoOpDeviceGuardImpl`, for fake tensors) and installs it where the
  present guard counts no devices; a build without CUDA has no guard, so it is given one to count.
- The hooks object's `hasCUDA`, which autograd asks before it accumulates gradients of a device. Its table of virtual functions
  is replaced by a copy, with other answers, while a pretend GPU is open. The order of the functions is read from torch's headers.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

_FOLDER = Path(torch.__file__).parent
_ANSWERS = {
    "hasCUDA": 1,
    "isBuilt": 1,
    "isAvailable": 1,
    "hasPrimaryContext": 0,
    "deviceCount": 1,
    "getCurrentDevice": 0,
}
_METHOD = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p, ctypes.c_long)
_BEFORE = 2  # words of a table of virtual functions in front of the first one: offset and type


@cache
def set_device_guard() -> None:
    """Sets torch's guard that does nothing, for good: without a CUDA device no other code asks for it."""
    library = ctypes.CDLL(str(_FOLDER / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(
        library, "_ZN3c104impl26device_guard_impl_registryE"
    )  # [CPU, CUDA]
    zero = _METHOD(lambda *_: 0)
    methods = (ctypes.c_void_p * 64)(
        *[ctypes.cast(zero, ctypes.c_void_p).value] * 64
    )  # all answer 0, also the count
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(methods))
    before = guards[1] = guards[1] or ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    if guards[1] == before:
        raise RuntimeError(f"torch {torch.__version__} does not set a guard for pretend devices")


@contextlib.contextmanager
def cuda_hooks() -> Iterator[None]:
    """Lets torch's hooks say that there is CUDA."""
    library = ctypes.CDLL(str(_FOLDER / "lib" / "libtorch_cpu.so"))
    find = library._ZN2at6detail12getCUDAHooksEv
    find.restype = ctypes.c_void_p
    table = ctypes.c_void_p.from_address(find())  # the object begins with the address of its table
    original = table.value
    names = _virtual_functions()
    assert original is not None
    size = _BEFORE + len(names)
    copied = (ctypes.c_void_p * size).from_buffer_copy(
        (ctypes.c_char * (8 * size)).from_address(original - 8 * _BEFORE)
    )
    kept = []  # ctypes frees a callback that nothing refers to
    for name, answer in _ANSWERS.items():
        kept.append(_METHOD(lambda *_, answer=answer: answer))
        copied[_BEFORE + names.index(name)] = ctypes.cast(kept[-1], ctypes.c_void_p).value
    table.value = ctypes.addressof(copied) + 8 * _BEFORE
    try:
        yield
    finally:
        table.value = original


@cache
def _virtual_functions() -> list[str]:
    """Those of CUDAHooksInterface in the order of its table: the base class's, then its own. A destructor takes two places."""
    headers = _FOLDER / "include" / "ATen" / "detail"
    names = ["destroy", "destroy_and_free"]
    for header in ("AcceleratorHooksInterface.h", "CUDAHooksInterface.h"):
        text = re.sub(
            r"#ifdef USE_ROCM.*?#endif", "", (headers / header).read_text(), flags=re.DOTALL
        )
        names += re.findall(r"virtual\s[^~;{]*?(\w+)\(", text)
    return names
