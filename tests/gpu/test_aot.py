"""Kernels compile for GPUs that are not here, and fit their shared memory; in processes without Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.files import load_json

ROOT = Path(__file__).parents[2]


def compiled(tmp_path, *words: str) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "tests.gpu.aot",
        "--output",
        str(tmp_path / "rows.json"),
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return load_json(tmp_path / "rows.json")["rows"]


@pytest.mark.thorough
def test_attention_compiles_for_an_h100_with_its_tensor_cores(tmp_path):
    (row,) = compiled(
        tmp_path, "--arch", "90", "--width", "64", "--kernel", "attend_parts", "--dtype", "bf16"
    )
    assert row["fits"] and 0 < row["shared"] <= 232_448 and row["wgmma"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["75", "80", "86", "89", "90", "100", "120"])
def test_every_kernel_compiles_and_fits(tmp_path, architecture):
    rows = compiled(tmp_path, "--arch", architecture, "--width", "80", "--width", "256")
    assert {row["kernel"] for row in rows} == {
        "attend_parts",
        "merge_parts",
        "move_paths",
        "divergence_rows",
        "add_norm",
        "rotate_head",
        "gate_up",
    }
    half = [row for row in rows if row["kernel"] == "attend_parts" and row["dtype"] != "fp32"]
    if architecture != "75":  # whose tensor cores Triton does not use
        assert all(row.get("mma") or row.get("wgmma") or row.get("tcgen05") for row in half), half


def test_the_published_table_holds_every_kernel_and_all_fit():
    rows = load_json(ROOT / "eval" / "results" / "aot_kernels.json")["rows"]
    assert (
        len({(row["arch"], row["width"]) for row in rows if row["kernel"] == "attend_parts"})
        == 7 * 5
    )
    assert all(row["fits"] and row["shared"] <= row["limit"] for row in rows)
