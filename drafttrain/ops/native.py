"""Builds, keeps and loads the C kernels of cpu_draft.c and the files that it includes.

A kernel reads and writes at addresses, so a wrong argument is a crash or worse. Each wrapper
therefore checks its arguments first and raises ValueError or TypeError; structures that many calls
share (plans, packed layers) are checked once, when they are built.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from drafttrain.errors import UserError, shown
from drafttrain.files import cache_folder, replacing

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("cpu_draft.c")  # includes the others
_INCLUDED = ("cpu.c", "cpu_linear.c", "cpu_layers.c")
_FLAGS = ("-O3", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
PATH_VARIABLE = "DRAFTTRAIN_CPU_PATH"


class CpuPath(NamedTuple):
    """Instructions that the kernels may be built for: a compiler's flags, and the processor's that
    they need.
    """

    flags: str
    needs: frozenset[str]


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_X86 = {
    "baseline": CpuPath("-march=x86-64", frozenset()),
    "avx2": CpuPath("-march=x86-64-v3", frozenset({"avx2", "fma", "bmi2", "f16c"})),
    "avx512": CpuPath("-march=x86-64-v4", _AVX512),
    "avx512bf16": CpuPath("-march=x86-64-v4 -mavx512bf16", _AVX512 | {"avx512_bf16"}),
    "amx": CpuPath(
        "-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16", _AVX512 | {"avx512_bf16", "amx_bf16"}
    ),
}
_ARM = {
    "neon": CpuPath("-march=armv8-a", frozenset({"asimd"})),
    "neon-bf16": CpuPath("-march=armv8.6-a", frozenset({"asimd", "bf16", "i8mm"})),
}
# Paths of this machine's architecture by name, the plainest first.
PATHS: dict[str, CpuPath] = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}.get(
    platform.machine(), {}
)
# Arguments of the exported functions: P pointer, L long, I int, F float.
_TYPES = {"P": ctypes.c_void_p, "L": ctypes.c_long, "I": ctypes.c_int, "F": ctypes.c_float}
_ARGUMENTS = {
    "skinny_linear": "PLLPIPLI",
    "name_exponents": "PLLPI",
    "pack_twelve": "PLLPPI",
    "rms_norm": "PPFPLL",
    "likeliest": "PLLLPPP",
    "move_slots": "PLLLLLPL",
    "tree_attention": "PLL PLL PLL PLPLI P LLLL P FLFPI",
    "layer_before_attention": "PPLPPPI",
    "layer_after_attention": "PPPLI",
    "body_forward": "PPPL PLPI P PLP PFP PIPL I",
    "head_top": "PPLL PPP I",
    "draft_step": "PPPL PP PPL PP I",
    "draft_read": "PPPLP PP PPL PP I",
    "draft_context": "PPL PP PP I",
    "draft_trees": "PPPL PP PP PPL PP PPPP I",
    "kernel_path": "",
}
_LARGEST = 64 * 2**20  # bytes that are read of a kept build; the real one has about 0.1 MB


@cache
def cpu_kernels() -> ctypes.CDLL | None:
    """The built library, or None if it cannot be built; callers then use torch.

    torch is loaded before and brings an OpenMP runtime of the same name, so both share one pool of
    threads. The library has no state of its own, and ctypes releases the GIL during a call: several
    threads may call it at once.
    """
    compiler = _compiler()
    chosen = _chosen_flags()
    if chosen is None:
        return None
    if compiler is None:
        logger.warning("no C compiler (cc) found: decoding on this CPU uses torch's slower kernels")
        return None
    try:
        name = _name(compiler, chosen)
        folder = _private_folder(cache_folder() / "kernels")
        if folder:
            kept = _kept(folder, name)
            library: ctypes.CDLL | None = None
            if kept is not None:
                library = _load(kept)
            if library is not None:
                return library
        with tempfile.TemporaryDirectory() as scratch:  # private
            built = Path(scratch) / "built.so"
            command = [compiler, *_FLAGS, *chosen, str(_SOURCE), "-o", str(built), "-lm"]
            subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=120,
            )
            if folder:
                _keep(built, folder, name)
            library = _load(built)
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error)
        if isinstance(error, subprocess.CalledProcessError) and error.stderr:
            reason = error.stderr  # the compiler's own message
        logger.warning(
            "ops/cpu_draft.c cannot be built (%s); decoding uses torch's slower kernels",
            reason.strip()[-300:],
        )
        return None
    if library is None:
        logger.warning(
            "the built ops/cpu_draft.c cannot be loaded; decoding uses torch's slower kernels"
        )
    return library


@cache
def built_kernels() -> ctypes.CDLL:
    """`cpu_kernels`, for callers that run only where the library was built."""
    kernels = cpu_kernels()
    assert kernels is not None, "check cpu_kernels() first"
    return kernels


def _compiler() -> str | None:
    """The C compiler: $CC, or the first of cc, gcc and clang that is installed."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return found
    return None


def _chosen_flags() -> tuple[str, ...] | None:
    """The compiler's flags for this processor, or for the path that $DRAFTTRAIN_CPU_PATH names.

    Returns:
        None where the variable asks for torch's kernels.

    Raises:
        UserError: a path that is unknown, or that this processor lacks.
    """
    name = os.environ.get(PATH_VARIABLE, "native")
    if name == "native":
        return ("-march=native",)
    if name == "torch":
        return None
    here = runnable_paths()
    if name not in here:
        raise UserError(
            f"{PATH_VARIABLE}={shown(name)}: this processor has {', '.join(['native', 'torch', *here])}"
        )
    return tuple(PATHS[name].flags.split())


def runnable_paths() -> list[str]:
    """Names of PATHS whose instructions this processor has, the plainest first."""
    has = set(_processor().split())
    return [name for name, path in PATHS.items() if path.needs <= has]


def kernel_path() -> str:
    """The instructions that the linear layers use: a name of PATHS, or 'torch' without kernels."""
    kernels = cpu_kernels()
    if kernels is None:
        return "torch"
    return ctypes.string_at(kernels.kernel_path()).decode()


def multiplies_bfloat16() -> bool:
    """Whether the kernels multiply pairs of bfloat16 numbers, twice as fast as float32.

    AVX512-BF16, AMX and NEON's BF16 do.
    """
    return kernel_path() in ("avx512bf16", "amx", "neon-bf16")


def return_freed_memory() -> None:
    """Gives freed memory back to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# -- the kept build: FOLDER/cpu-(hash of the recipe)-(hash of the content).so ----------------------


def _name(compiler: str, chosen: tuple[str, ...]) -> str:
    """`cpu-HASH` of source, flags, compiler with its version, and processor.

    Machines that share a home folder therefore never run each other's instructions.
    """
    version = subprocess.run(
        [compiler, "--version"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    recipe = [_SOURCE.read_text()]
    for part in _INCLUDED:
        recipe.append(_SOURCE.with_name(part).read_text())
    recipe += _FLAGS
    recipe += chosen
    recipe += [str(Path(compiler).resolve()), version, _processor()]
    return "cpu-" + _digest("\0".join(recipe).encode())[:16]


def _private_folder(folder: Path) -> Path | None:
    """The folder of kept builds, which only this user may enter; None, with a warning, otherwise."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        logger.warning(
            "%s cannot be used (%s): the kernels are built again for this process",
            folder,
            error.strerror,
        )
        return None
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return folder
    logger.warning(
        "%s is not a private folder of this user: the kernels are built again for this process; remove it, or run chmod 700 %s",
        folder,
        folder,
    )
    return None


def _kept(folder: Path, name: str) -> Path | None:
    """The kept build; deletes those that are damaged or that others could have written."""
    for path in folder.glob(f"{name}-*.so"):
        # OSError: the path is a link (O_NOFOLLOW), or the file cannot be read.
        with contextlib.suppress(OSError):
            # O_NONBLOCK: a named pipe must not block here.
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            found = os.fstat(file)
            content = os.pread(file, _LARGEST, 0)
            own = (
                stat.S_ISREG(found.st_mode)
                and found.st_uid == os.geteuid()
                and not found.st_mode & 0o022
            )
            if own and path.stem == f"{name}-{_digest(content)}":
                # The loader gets the file that was checked, by its descriptor. That stays open,
                # because the loader identifies libraries by name.
                opened = Path(f"/proc/self/fd/{file}")
                if opened.exists():
                    return opened
                return path
            os.close(file)
        _delete(path)
    return None


def _keep(built: Path, folder: Path, name: str) -> None:
    """Copies a build to the folder atomically: processes that start together load full files."""
    content = built.read_bytes()
    digest = _digest(content)
    try:
        with replacing(folder / f"{name}-{digest}.so") as part:
            part.write_bytes(content)
            part.chmod(0o700)
        for other in folder.glob(f"{name}-*.so"):
            # It lacks a function, or comes from another build of the same recipe.
            if digest not in other.name:
                _delete(other)
    except OSError as error:  # a full disk
        logger.warning(
            "%s cannot keep the kernels (%s): the next process builds them again",
            folder,
            error.strerror,
        )


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _load(path: Path) -> ctypes.CDLL | None:
    """Loads a library and declares its functions; None if it cannot be loaded or lacks a function."""
    try:
        library = ctypes.CDLL(str(path))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = [_TYPES[letter] for letter in arguments.replace(" ", "")]
            function.restype = None
        library.kernel_path.restype = ctypes.c_void_p
    except (OSError, AttributeError):
        return None
    return library


def _processor() -> str:
    """The CPU's instruction set, as the system names it."""
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        for line in facts.read_text().splitlines():
            if line.startswith(("flags", "Features")):  # x86, Arm
                return line
    return platform.processor()
