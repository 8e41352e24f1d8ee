"""The launch itself: a tiny run end to end, and its errors."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from drafttrain.cli import main
from drafttrain.config import TrainConfig
from drafttrain.data.store import Store
from drafttrain.drafters.eagle3.model import Eagle3
from drafttrain.drafters.registry import load_drafter
from drafttrain.target import Target
from drafttrain.train import build_drafter
from drafttrain.training.limits import TimeBudget
from tests.conftest import make_target
from tests.drafters.helpers import make_drafter

ROOT = Path(__file__).resolve().parents[2]


def write_data(folder: Path, target: Target, rows: int = 24, seed: int = 0) -> Path:
    """Sequences whose response continues the prompt by counting, which a drafter can learn."""
    generator = torch.Generator().manual_seed(seed)
    with Store(folder, {"target": target.identity(), "sampling": {"temperature": 0.0}}) as store:
        for i in range(rows):
            start = int(torch.randint(0, 200, (1,), generator=generator))
            prompt = [start, start + 1, start + 2]
            length = int(torch.randint(5, 30, (1,), generator=generator))
            response = [(start + 3 + j) % 250 for j in range(length)]
            tokens = prompt + response
            store.append(
                {
                    "id": f"row{i}",
                    "tokens": tokens,
                    "spans": [[3, len(tokens)]],
                    "finish": ["stop"],
                    "source": "test",
                }
            )
    return folder


def write_recipe(tmp_path: Path, target_dir: Path, data: Path, **extra: object) -> list[str]:
    recipe = tmp_path / "recipe.yaml"
    options = {
        "drafter": {"draft_vocab_size": 255, "ttt_steps": 2},
        "target": str(target_dir),
        "data": str(data),
        "output_dir": str(tmp_path / "drafter"),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "save_steps": 3,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "validation": 0.1,
        "dtype": "float32",
        "decode_prompts": 2,
        "decode_tokens": 12,
        **extra,
    }
    recipe.write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in options.items()))
    return [str(recipe)]


def launch(
    words: list[str], launcher: list[str] | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    command = [*(launcher or [sys.executable]), str(ROOT / "drafttrain" / "train.py"), *words]
    full = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", **env}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=full
    )
    try:
        out, err = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        for rank in psutil.Process(process.pid).children(
            recursive=True
        ):  # a launcher leaves its ranks behind
            rank.kill()
        process.kill()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.thorough
def test_a_run_as_a_script_trains_saves_and_is_not_repeated(tiny, tmp_path, capsys, monkeypatch):
    words = write_recipe(tmp_path, *tiny)
    first = launch(words)
    assert first.returncode == 0, first.stderr[-3000:]
    assert "covers" in first.stdout and "agree by depth" in first.stdout and "left" in first.stdout
    summary = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert (
        summary["steps"] == 6
        and "eval_agree@2" in summary["held_out"]
        and summary["vocabulary"]["size"] == 255
    )
    drafter = load_drafter(str(tmp_path / "drafter"), Target.load(str(tiny[0]), "float32"))
    assert drafter.kind == "eagle3"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert main(["train", *words]) == 0 and "already trained" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_time_budget_ends_the_run(tiny, tmp_path, monkeypatch):
    """A clock that shows a quarter of a second more at each reading: twelve steps are 3 seconds, over several epochs."""
    ticks = itertools.count(1)
    monkeypatch.setattr(TimeBudget, "clock", lambda self: next(ticks) / 4)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert main(["train", *write_recipe(tmp_path, *tiny), "max_minutes=0.05", "max_steps=-1"]) == 0
    summary = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert summary["steps"] == 12
    assert (
        main(
            [
                "train",
                *write_recipe(tmp_path, *tiny),
                "max_minutes=0.05",
                "max_steps=3",
                "resume=false",
            ]
        )
        == 0
    )
    assert (
        json.loads((tmp_path / "drafter" / "training.json").read_text())["steps"] == 3
    )  # the earlier of the two


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["target=/nowhere/model"], r"error: target='/nowhere/model': no model folder"),
        (["data=/nowhere/data"], r"error: data='/nowhere/data' is not a data set"),
        (["drafter.tt_steps=3"], r"error: unknown key drafter.tt_steps; did you mean ttt_steps"),
        (["kind=eagle4"], r"error: kind='eagle4' is not a drafter kind; there are"),
        (["kind=ngram"], r"error: kind='ngram' has no weights to train"),
        (["loss=kld"], r"error: loss='kld': 'kld' is not a valid loss; did you mean kl"),
        (["learning_rate=1e30"], r"error: learning_rate='1e30' must be a number from 0 to 100"),
        (
            ["max_length=4"],
            r"error: no row of the data has two response tokens within max_length=4",
        ),
    ],
)
def test_each_mistake_ends_in_one_clear_line(tiny, tmp_path, words, message, capsys, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert main(["train", *write_recipe(tmp_path, *tiny), *words]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.thorough
def test_a_loss_that_is_not_finite_ends_the_run(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    plain = Eagle3.forward

    def overflowing(self, inputs):
        out = plain(self, inputs)
        return out._replace(loss=out.loss * float("inf"))

    monkeypatch.setattr(Eagle3, "forward", overflowing)
    assert main(["train", *write_recipe(tmp_path, *tiny)]) == 2
    assert re.search(
        r"error: loss=inf at step 0: not finite; lower learning_rate", capsys.readouterr().err
    )


def test_data_of_another_tokenizer_is_refused(tiny, tmp_path, capsys):
    other = make_target(vocab_size=310)
    data = write_data(tmp_path / "data", other, rows=4)
    assert main(["train", *write_recipe(tmp_path, tiny[0], data)]) == 2
    assert "was tokenized for target 'tiny'" in capsys.readouterr().err


def test_a_continued_drafter_takes_the_loss_of_the_recipe(target, tmp_path):
    make_drafter(target, loss="kl").save_pretrained(tmp_path)
    records = [{"tokens": [1, 2, 3, 4], "spans": [[1, 4]]}]
    drafter, _ = build_drafter(TrainConfig(init=str(tmp_path), loss="lk_lambda"), target, records)
    assert drafter.config.loss == "lk_lambda"
