"""The same training on one process, on two, under every ZeRO stage, and in accumulated pieces."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.cli import main
from drafttrain.drafters.registry import load_drafter
from drafttrain.target import Target
from tests.files import dump_json, load_json
from tests.training.runs import ROOT, TWO, launch, write_recipe

STEPS = 6
DRAFT_MODEL = {"kind": "draft_model", "drafter": {"layers": [0, 2]}}
DRAFTERS = {
    "eagle3": {},
    "feature_rates": {"feature_rates": True},
    "draft_model": DRAFT_MODEL,
    "lora": {
        "kind": "draft_model",
        "drafter": {"layers": [0, 2], "lora": {"r": 4}},
        "learning_rate": 1e-2,
    },
    "on_policy": {
        **DRAFT_MODEL,
        "on_policy": {"share": 0.5, "refresh_steps": 3, "responses": 6, "max_new_tokens": 8},
    },
    # Nothing is kept in bfloat16 between epochs, as where processes share rows.
    "exact eagle3": {"cache_gb": 0.0},
    "exact dflash": {"cache_gb": 0.0, "kind": "dflash", "drafter": {"block_size": 4}},
    "exact draft_model": {"cache_gb": 0.0, **DRAFT_MODEL},
}


def recipe(folder: Path, tiny, batch: int, pieces: int = 1, **extra: object) -> list[str]:
    """Six steps of four rows in more than an epoch. Adam's epsilon keeps rounding from being divided by nothing."""
    options = {
        "max_steps": STEPS,
        "save_steps": 100,
        "logging_steps": 1,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": pieces,
        "adam_epsilon": 1e-5,
        **extra,
    }
    return write_recipe(folder, *tiny, **options)


def outcome(folder: Path) -> tuple[list[float], dict[str, torch.Tensor], dict]:
    """Losses and gradient norms by step, final weights, training.json."""
    state = load_json(folder / "drafter" / f"checkpoint-{STEPS}" / "trainer_state.json")
    figures = [
        log[key] for log in state["log_history"] if "loss" in log for key in ("loss", "grad_norm")
    ]
    assert len(figures) == 2 * STEPS
    summary = load_json(folder / "drafter" / "training.json")
    return figures, load_file(folder / "drafter" / "model.safetensors"), summary


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """By drafter, what one process makes of all four rows of a step at once."""

    @functools.cache
    def run(name: str = "eagle3"):
        folder = tmp_path_factory.mktemp("alone")
        assert main(["train", *recipe(folder, tiny, 4, **DRAFTERS[name])]) == 0
        return outcome(folder)

    return run


def check(ours, alone) -> None:
    # Losses and norms of gradients by step: sums in another order differ a little more at each.
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(alone[0]), rtol=5e-4, atol=1e-4)
    assert ours[1].keys() == alone[1].keys()
    for name, weight in alone[1].items():
        torch.testing.assert_close(
            ours[1][name], weight, rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert ours[2]["best"]["step"] == STEPS
    assert ours[2]["best"]["accepted_length"] == pytest.approx(alone[2]["best"]["accepted_length"])


@pytest.mark.thorough
def test_accumulated_pieces_equal_the_whole_batch(tiny, alone, tmp_path):
    assert main(["train", *recipe(tmp_path, tiny, 1, 4)]) == 0
    check(outcome(tmp_path), alone())


SHARDED = [
    ("eagle3", 1),
    ("eagle3", 2),
    ("eagle3", 3),
    ("feature_rates", 2),
    ("feature_rates", 3),
    ("draft_model", 2),
    ("draft_model", 3),
    ("lora", 2),
    ("on_policy", 3),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(*case, marks=[] if case == ("eagle3", 2) else pytest.mark.slow)
        for case in SHARDED
    ],
)
def test_two_processes_under_zero_equal_one(tiny, alone, tmp_path, name, stage):
    settings = load_json(ROOT / f"configs/deepspeed/zero{stage}.json")
    if stage == 3:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = (
            0  # else small weights stay whole
        )
    config = tmp_path / "zero.json"
    dump_json(config, settings)
    launcher = [
        *TWO,
        "--use_deepspeed",
        "--deepspeed_config_file",
        str(config),
        "--dynamo_backend",
        "no",
    ]
    script = "tests/training/without_shm.py"
    words = recipe(tmp_path, tiny, 2, **DRAFTERS[name])
    done = launch(words, launcher, script, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-4000:]
    ours = outcome(tmp_path)
    theirs = alone(name)
    assert ours[2]["engine"] == "DeepSpeedEngine" and ours[2]["processes"] == 2
    check(ours, theirs)
    kind = DRAFTERS[name].get("kind", "eagle3")
    assert (
        load_drafter(str(tmp_path / "drafter"), Target.load(str(tiny[0]), "float32")).kind == kind
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "stored"),
    [
        ("exact eagle3", 2, False),
        ("exact eagle3", 3, True),
        ("exact dflash", 2, False),
        ("exact draft_model", 3, False),
    ],
)
def test_two_processes_that_share_rows_equal_one(tiny, alone, tmp_path, name, stage, stored):
    """The same four rows a step, each computed by both; also from features on disk."""
    if stored:
        target, data = tiny
        shutil.copytree(data, tmp_path / "data")
        tiny = target, tmp_path / "data"
        assert (
            main(
                [
                    "features",
                    "--target",
                    str(target),
                    "--data",
                    str(tiny[1]),
                    "--dtype",
                    "float32",
                    "--store-dtype",
                    "float32",
                ]
            )
            == 0
        )
    settings = ROOT / f"configs/deepspeed/zero{stage}.json"
    launcher = [
        *TWO,
        "--use_deepspeed",
        "--deepspeed_config_file",
        str(settings),
        "--dynamo_backend",
        "no",
    ]
    words = [*recipe(tmp_path, tiny, 4, **DRAFTERS[name]), "sequence_parallel=2"]
    done = launch(words, launcher, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-4000:]
    ours = outcome(tmp_path)
    assert ours[2]["engine"] == "DeepSpeedEngine" and ours[2]["processes"] == 2
    assert (ours[2]["target_features"]["stored"] > 0) == stored
    check(ours, alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 2])
def test_two_processes_without_deepspeed_equal_one(tiny, alone, tmp_path, pieces):
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    done = launch(recipe(tmp_path, tiny, 2 // pieces, pieces), launcher)
    assert done.returncode == 0, done.stderr[-4000:]
    ours = outcome(tmp_path)
    assert ours[2]["engine"] == "DistributedDataParallel" and ours[2]["processes"] == 2
    check(ours, alone())


@pytest.mark.slow
def test_a_resumed_zero3_run_equals_an_uninterrupted_one(tiny, alone, tmp_path):
    words = recipe(tmp_path, tiny, 2, save_steps=2)
    launcher = [
        *TWO,
        "--config_file",
        str(ROOT / "configs/accelerate/cpu-2.yaml"),
        "--deepspeed_config_file",
    ]
    launcher.append(str(ROOT / "configs/deepspeed/zero3.json"))
    first = launch(
        [*words, "max_steps=4", "lr_scheduler_type=constant"], launcher, DS_ACCELERATOR="cpu"
    )
    assert first.returncode == 0, first.stderr[-4000:]
    rest = launch([*words, "lr_scheduler_type=constant"], launcher, DS_ACCELERATOR="cpu")
    assert rest.returncode == 0 and "going on from" in rest.stdout, rest.stderr[-4000:]
    whole = tmp_path / "whole"
    whole.mkdir()
    other = launch(
        [*recipe(whole, tiny, 2), "lr_scheduler_type=constant"], launcher, DS_ACCELERATOR="cpu"
    )
    assert other.returncode == 0, other.stderr[-4000:]
    ours, theirs = (
        load_file(place / "drafter" / f"checkpoint-{STEPS}" / "model.safetensors")
        for place in (tmp_path, whole)
    )
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name


@pytest.mark.slow
def test_two_machines_equal_one_process(tiny, alone, tmp_path):
    """The multi-node recipe with its two machines on this one, a process each."""
    words = recipe(tmp_path, tiny, 2)
    fixed = [
        "--config_file",
        str(ROOT / "configs/accelerate/multi-node.yaml"),
        "--main_process_ip",
        "127.0.0.1",
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        fixed += ["--num_processes", "2", "--main_process_port", str(free.getsockname()[1])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    machines = [
        subprocess.Popen(
            [
                *TWO[:3],
                *fixed,
                "--machine_rank",
                str(rank),
                str(ROOT / "drafttrain/train.py"),
                *words,
            ],
            cwd=ROOT,
            env=env,
        )
        for rank in range(2)
    ]
    assert [machine.wait(timeout=400) for machine in machines] == [0, 0]
    check(outcome(tmp_path), alone())
