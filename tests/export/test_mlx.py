"""Tiny drafters in mlx-dspark on a CPU: `MLX_PYTHON=ENV/bin/python pytest -m slow tests/export/test_mlx.py`.

ENV has mlx-dspark and, on Linux, mlx[cpu].
"""

from __future__ import annotations

import os

import pytest

from drafttrain.cli import main
from drafttrain.drafters.shipping import shipping
from drafttrain.export import tiny_drafters
from tests.files import load_json

PYTHON = os.environ.get("MLX_PYTHON", "")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="MLX_PYTHON names no environment with mlx-dspark")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dflash", {}),
        ("dflash2", {}),
        ("dspark", {"sample_from_anchor": True, "draft_vocab_size": 200}),
    ],
)
def test_it_drafts_what_we_draft(tmp_path, monkeypatch, kind, options):
    described = shipping(kind)
    monkeypatch.setattr(tiny_drafters, "shipped_kinds", lambda: [kind])
    monkeypatch.setattr(type(described), "tiny", {**described.tiny, **options})
    output = tmp_path / "mlx.json"
    words = [
        "verify",
        "--all-kinds",
        "--engine",
        "mlx",
        "--prompts",
        "6",
        "--max-new-tokens",
        "32",
        "--engine-python",
    ]
    assert main([*words, PYTHON, "--output", str(output)]) == 0
    (row,) = load_json(output)["rows"]
    assert row["verdict"] == "same" and row["same_text"] == 6
    assert row["accepted_length"] == row["ours"] > 1.5
