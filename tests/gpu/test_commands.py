"""The commands on a GPU, one after the other: answers, states, training with its decoding, evaluation, tuning."""

from __future__ import annotations

import json

import pytest

from drafttrain import cli
from drafttrain.data.store import load_records
from tests.conftest import make_target, save_target
from tests.files import load_json
from tests.gpu.pretend import PretendGpu
from tests.training.runs import write_recipe


def run(*words) -> None:
    assert cli.main([str(word) for word in words]) == 0


@pytest.mark.slow
@pytest.mark.any_gpu
def test_the_commands_run_on_a_gpu(any_gpu, tmp_path, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR")  # transformers would choose the CPU
    counted = isinstance(any_gpu, PretendGpu)
    target_dir = tmp_path / "target"
    target = make_target(hidden=64)  # FlexAttention needs heads of 16 numbers
    save_target(target, target_dir)
    prompts = tmp_path / "prompts.jsonl"
    answers = tmp_path / "data"
    prompts.write_text(
        "".join(
            json.dumps({"id": f"t{i}", "text": "once upon " * (i + 1)}) + "\n" for i in range(8)
        )
    )
    suite = tmp_path / "suite.jsonl"
    suite.write_text(json.dumps({"id": 0, "category": "x", "turns": ["say something"]}) + "\n")
    given = ("--target", target_dir, "--device", "cuda", "--dtype", "float32")

    run(
        "generate",
        *given,
        "--prompts",
        prompts,
        "--output",
        answers,
        "--max-new-tokens",
        24,
        "--max-length",
        200,
    )
    on_gpu = [row["tokens"] for row in load_records(answers)]
    with_cpu = tmp_path / "on_cpu"
    words = (
        "--prompts",
        prompts,
        "--output",
        with_cpu,
        "--max-new-tokens",
        24,
        "--max-length",
        200,
    )
    run("generate", *given[:3], "cpu", *given[4:], *words)
    assert on_gpu == [row["tokens"] for row in load_records(with_cpu)] and len(on_gpu) == 8

    run("features", *given, "--data", answers, "--layers", "1,2,3")
    for options in ({}, {"bf16": True, "output_dir": str(tmp_path / "bf16")}):
        if counted:
            any_gpu.reset()
        recipe = write_recipe(
            tmp_path, target_dir, answers, **{"use_cpu": False, "max_steps": 3, **options}
        )
        run("train", *recipe)
        if counted:
            assert any("training/step.py" in line or "losses/" in line for line in any_gpu.calls), (
                "trained on another device"
            )
    if counted:
        any_gpu.reset()
    drafter = ("--drafter", tmp_path / "drafter")
    run(
        "eval",
        *given,
        *drafter,
        "--suite",
        suite,
        "--max-new-tokens",
        8,
        "--output",
        tmp_path / "results.json",
    )
    results = load_json(tmp_path / "results.json")
    assert results["overall"]["identical_outputs"] == 1
    assert ("pretend GPU" in results["device"]) == counted
    assert any_gpu.replays
    few = (
        "--prompts",
        2,
        "--max-new-tokens",
        16,
        "--repeats",
        1,
        "--output",
        tmp_path / "tune.json",
    )
    run("tune", *given, *drafter, "--calibrate", prompts, *few)
    assert (tmp_path / "drafter" / "decoding.json").exists()
