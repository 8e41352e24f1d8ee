"""The C kernels of ops/cpu.c and ops/cpu_layers.c, compiled once by the machine's own compiler and kept in the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from drafttrain.files import cache_folder

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("cpu_layers.c")  # which includes the other
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "skinny_linear": (_POINTER, _LONG, _LONG, _POINTER, _INT, _POINTER, _LONG, _INT),
    "rms_norm": (_POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG),
    "likeliest": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER),
    "move_slots": (_POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _POINTER, _LONG),
    "tree_attention": (
        *(_POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG),
        *(_POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _LONG),
        *(_POINTER, _LONG, _POINTER, _POINTER, _FLOAT, _LONG, _FLOAT, _POINTER, _INT),
    ),
    "layer_before_attention": (_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _INT),
    "layer_after_attention": (_POINTER, _POINTER, _POINTER, _LONG, _INT),
    "body_forward": (
        *(_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _POINTER),
        *(_POINTER, _LONG, _POINTER, _INT),
    ),
    "draft_step": (
        *(_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _POINTER, _LONG),
        *(_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _INT),
    ),
}


@cache
def cpu_kernels() -> ctypes.CDLL | None:
    """The built library, or None where that does not work; callers then use torch.

    The file's name carries a hash of source, flags, compiler and processor, so machines that share a home folder never
    run each other's instructions. torch is loaded before, and the linker knows its OpenMP runtime by the same name: both
    share one pool of threads.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None)
    if compiler is None:
        logger.warning("no C compiler (cc) here: decoding on this CPU takes torch's slower kernels")
        return None
    recipe = (_SOURCE.read_text(), _SOURCE.with_name("cpu.c").read_text(), *_FLAGS, compiler, _processor())
    digest = hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:16]
    path = cache_folder() / "native" / f"cpu-{digest}.so"
    try:
        if not path.is_file():
            _build(compiler, path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        logger.warning("ops/cpu.c cannot be built (%s); decoding takes torch's slower kernels", reason[-300:])
        return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def _build(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / "built.so"
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        built.replace(path)  # atomic: processes that start together never load half a file


def _processor() -> str:
    """What distinguishes this CPU's instruction set from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
