"""eval/gpu_suite.sh under a pretend GPU, and the tests of real GPUs under one: so that their first real day finds them whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.files import load_json
from tests.inference import captured

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "eval"))


def suite(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "eval" / "gpu_suite.sh"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_suite_runs_whole_and_goes_on(tmp_path):
    done = suite(str(tmp_path), "--pretend")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "every step runs; nothing was measured" in done.stdout
    page = (tmp_path / "suite.md").read_text()
    assert "pretend" in page.splitlines()[0] and "MISSED" not in page and "met |" not in page
    steps = load_json(tmp_path / "suite.json")["steps"]
    assert {outcome["status"] for outcome in steps.values()} <= {"done", "skipped"}
    again = suite(str(tmp_path), "--pretend", "--step", "loss")
    assert "loss: kept" in again.stdout


def test_without_a_gpu_the_suite_says_so(monkeypatch):
    from gpu_suite import free_gigabytes

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        SystemExit, match=r"torch sees no GPU here; bash eval/gpu_suite\.sh --pretend"
    ):
        free_gigabytes(pretend=False)


def test_goals_are_judged_from_both_sides():
    from gpu_suite import Goal, Step, judged

    step = Step(1, "x", "", "", (Goal("a/b", 2.0), Goal("c", 0.1, at_least=False), Goal("d", 1.0)))
    rows = list(judged(step, {"status": "done", "result": {"a": {"b": 1.5}, "c": 0.05, "d": None}}))
    assert [row[1:] for row in rows] == [
        ("a/b 1.5", ">= 2", "MISSED"),
        ("c 0.05", "<= 0.1", "met"),
        ("d", ">= 1", "not measured"),
    ]
    assert list(judged(step, {"status": "skipped", "why": "no room"})) == [
        ("x", "", "", "skipped: no room")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_gpu_tests_of_captured_graphs_pass(gpu, name):
    captured.check_captured_graphs(name, 0.0)


@pytest.mark.slow
def test_the_gpu_tests_of_failing_captures_and_memory_pass(gpu, capsys):
    captured.check_waiting_forwards(capsys)
    assert gpu.replays == 0
