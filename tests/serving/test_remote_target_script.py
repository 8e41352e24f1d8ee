"""scripts/remote_target_cpu.sh: its commands exist with the flags that it gives, and its figures come from what they write."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys

import pytest

from drafttrain.cli import parsed
from drafttrain.train import setup
from tests.files import ROOT

SCRIPT = "scripts/remote_target_cpu.sh"


@pytest.mark.thorough
def test_its_commands_exist_with_their_flags(monkeypatch, tmp_path):
    """Every line of the dry run is parsed as the command would parse it; nothing is installed, and no folder is made."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["train"])
    words = ["bash", SCRIPT, "--dry-run", "--short", "--output", str(tmp_path / "out")]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert not (tmp_path / "out").exists()
    lines = [shlex.split(line) for line in said.splitlines() if line.startswith("python ")]
    commands = [line[3:] for line in lines if line[1:3] == ["-m", "drafttrain.cli"]]
    assert [line[0] for line in commands] == [
        "fetch",
        "serve-target",
        "generate",
        "features",
        "eval",
        "eval",
    ]
    for name, *flags in commands:
        words = [word.replace(".venv-vllm/bin/python", sys.executable) for word in flags]
        parsed([name, *words])
    trained = [line for line in lines if "drafttrain/train.py" in line]
    recipes = [
        setup("configs/quickstart.yaml", line[line.index("configs/quickstart.yaml") + 1 :])[0]
        for line in trained
    ]
    assert [recipe.target_url for recipe in recipes] == ["http://127.0.0.1:8031", ""]
    assert {(recipe.data, recipe.dtype, recipe.trainer["max_steps"]) for recipe in recipes} == {
        (f"{tmp_path}/out/data", "float32", 100)
    }


def test_unknown_options_are_refused():
    done = subprocess.run(["bash", SCRIPT, "--shorter"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(
        "error: unknown option --shorter (known: --short "
    )


@pytest.mark.parametrize(("remote", "status"), [(1.47, 0), (1.4, 1), (1.6, 1)])
def test_the_comparison_says_whether_both_learned_the_same(remote, status, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "eval"))
    compare = importlib.import_module("compare_remote_target")
    trained = {
        "steps": 9,
        "seconds": 1.0,
        "train_loss": 1.0,
        "states_wait": 0.02,
        "target_features": {},
        "processes": 2,
        "memory_gb": 0.9,
    }
    decoded = dict.fromkeys(
        ("acceptance_by_depth", "prompts", "tokens", "target_passes", "identical_outputs"), 1
    )
    for name, length in (("remote", remote), ("local", 1.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "training.json").write_text(
            json.dumps({**trained, "engine": "DeepSpeedEngine"})
        )
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"overall": {**decoded, "accepted_length": length}})
        )
    output = tmp_path / "result.json"
    monkeypatch.setattr(
        sys,
        "argv",
        ["compare", str(tmp_path), "--output", str(output), "--command", "the", "--words"],
    )
    assert compare.main() == status
    result = json.loads(output.read_text())
    assert result["ratio"] == round(remote / 1.5, 3) and result["goal"] == 0.97
    assert result["command"] == ["the", "--words"] and {"device", "threads", "versions"} <= set(
        result
    )
    assert (
        result["sides"]["remote"]["peak_memory_gb"] == 0.9
        and result["sides"]["local"]["states_wait"] == 0.02
    )
