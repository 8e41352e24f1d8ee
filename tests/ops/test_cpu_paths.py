"""Every path of the linear kernels sums right, and gives a row the same bits alone, among 64 and in other threads.

A program per path checks cpu_linear.c (linear_paths.c). Paths that this machine lacks are emulated: NEON by qemu, and AMX by
functions that stand for its instructions.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from drafttrain.errors import UserError
from drafttrain.ops import native
from drafttrain.ops.packing import pack_panels, skinny_linear

PROGRAM = Path(__file__).with_name("linear_paths.c")
FLAGS = [flag for flag in native._FLAGS if flag not in ("-shared", "-fPIC")]
HERE = native.runnable_paths()
GCC = shutil.which("gcc")

pytestmark = pytest.mark.skipif(os.name != "posix" or GCC is None, reason="needs gcc")


def check(compiler: str, flags: list[str], folder: Path, runner: tuple[str, ...] = ()) -> str:
    """Builds the program and runs it; returns the path that it names."""
    source = ["-I", str(native._SOURCE.parent), str(PROGRAM)]
    program = str(folder / "program")
    subprocess.run(
        [compiler, *FLAGS, *flags, *source, "-o", program, "-lm"], check=True, capture_output=True
    )
    # Threads that wait for others would spin on a busy machine.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [*runner, program], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.thorough
@pytest.mark.parametrize("path", HERE)
def test_a_path_of_this_processor(path, tmp_path):
    assert check(GCC, native.PATHS[path].flags.split(), tmp_path) == path


@pytest.mark.thorough
@pytest.mark.skipif("amx" in HERE, reason="this processor has AMX")
def test_tiles_by_functions_that_stand_for_their_instructions(tmp_path):
    assert check(GCC, ["-DEMULATED_TILES"], tmp_path) == "amx"


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for x86-64")
def test_amx_instructions_compile(tmp_path):
    """The intrinsics, which the emulation replaces; from GCC 11 on."""
    flags = [flag for flag in native._FLAGS if flag != "-O3"]
    done = subprocess.run(
        [
            GCC,
            *flags,
            "-O1",
            *native._X86["amx"].flags.split(),
            str(native._SOURCE),
            "-o",
            str(tmp_path / "built.so"),
        ],
        capture_output=True,
        text=True,
    )
    if "unrecognized" in done.stderr:
        pytest.skip("this compiler does not know AMX")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() == "aarch64", reason="its own paths run above")
@pytest.mark.parametrize("path", native._ARM)
def test_arm_in_an_emulator(path, tmp_path):
    compiler = shutil.which("aarch64-linux-gnu-gcc")
    emulator = shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip(
            "needs aarch64-linux-gnu-gcc and qemu-aarch64: apt-get install gcc-aarch64-linux-gnu qemu-user"
        )
    flags = ["-static", *native._ARM[path].flags.split()]
    assert check(compiler, flags, tmp_path, (emulator, "-cpu", "max")) == path


def test_a_path_that_the_processor_lacks_is_refused(monkeypatch):
    for name in ("sse9", "", "neon" if platform.machine() == "x86_64" else "avx2"):
        monkeypatch.setenv(native.PATH_VARIABLE, name)
        with pytest.raises(
            UserError, match=f"DRAFTTRAIN_CPU_PATH='{name}': this processor has native, torch"
        ):
            native.cpu_kernels.__wrapped__()


@pytest.mark.parametrize("path", ["torch", *HERE[:1]])
def test_the_variable_chooses_the_path(monkeypatch, path):
    """Of a process that has not built, or found, its library yet."""
    monkeypatch.setenv(native.PATH_VARIABLE, path)
    monkeypatch.setattr(native, "cpu_kernels", native.cpu_kernels.__wrapped__)
    assert native.kernel_path() == path and not native.multiplies_bfloat16()


@pytest.mark.skipif(
    not native.multiplies_bfloat16(), reason="this processor does not multiply bfloat16"
)
def test_rounded_inputs_give_the_products_of_bfloat16_numbers():
    weight = torch.randn(70, 129, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = torch.randn(40, 129, generator=torch.Generator().manual_seed(1))
    panels = pack_panels(weight.float())
    exact = (x.bfloat16().double() @ weight.double().t()).float()
    torch.testing.assert_close(
        skinny_linear(x, panels, 70, rounded=True), exact, atol=1e-4, rtol=1e-5
    )
    assert not torch.equal(skinny_linear(x, panels, 70), skinny_linear(x, panels, 70, rounded=True))
    nan = torch.full((1, 129), float("nan"))
    assert skinny_linear(nan, panels, 70, rounded=True).isnan().all()
