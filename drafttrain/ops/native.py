"""Builds and loads the C kernels of cpu.c and cpu_layers.c: compiled once on each machine, kept in the cache folder."""

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

_SOURCE = Path(__file__).with_name("cpu_layers.c")  # includes cpu.c
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
# Arguments of the exported functions: P pointer, L long, I int, F float.
_TYPES = {"P": ctypes.c_void_p, "L": ctypes.c_long, "I": ctypes.c_int, "F": ctypes.c_float}
_ARGUMENTS = {
    "skinny_linear": "PLLPIPLI",
    "rms_norm": "PPFPLL",
    "likeliest": "PLLLPPP",
    "move_slots": "PLLLLLPL",
    "tree_attention": "PLL PLL PLL PLPLP LLLL P FLFPI",
    "layer_before_attention": "PPLPPPI",
    "layer_after_attention": "PPPLI",
    "body_forward": "PPPL PLP P PLPI",
    "draft_step": "PPPLPP PPL PL PPLI",
}


@cache
def cpu_kernels() -> ctypes.CDLL | None:
    """The built library, or None if it cannot be built; callers then use torch.

    The file's name holds a hash of source, flags, compiler and processor, so machines that share a home folder never run
    each other's instructions. torch is loaded before and brings an OpenMP runtime of the same name, so both share one pool
    of threads. The library has no state of its own, and ctypes releases the GIL during a call: threads may call it at once.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None)
    if compiler is None:
        logger.warning("no C compiler (cc) found: decoding on this CPU uses torch's slower kernels")
        return None
    recipe = (_SOURCE.read_text(), _SOURCE.with_name("cpu.c").read_text(), *_FLAGS, compiler, _processor())
    digest = hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:16]
    path = cache_folder() / "native" / f"cpu-{digest}.so"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                built = Path(folder) / "built.so"
                command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built), "-lm"]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
                built.replace(path)  # atomic: processes that start together never load half a file
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        logger.warning("ops/cpu.c cannot be built (%s); decoding uses torch's slower kernels", reason[-300:])
        return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [_TYPES[letter] for letter in arguments.replace(" ", "")], None
    return library


@cache
def built_kernels() -> ctypes.CDLL:
    """`cpu_kernels`, for callers that run only where the library was built."""
    kernels = cpu_kernels()
    assert kernels is not None, "check cpu_kernels() first"
    return kernels


def _processor() -> str:
    """The CPU's instruction set, as the system names it."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
