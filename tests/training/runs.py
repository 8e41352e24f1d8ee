"""Data, recipes and launches of tiny training runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import torch

from drafttrain.data.loader import training_rows
from drafttrain.data.store import FeatureStore, Store, load_records
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.evaluation.held_out import acceptance, first_prompts, replayed
from drafttrain.states.origins import Stored
from drafttrain.states.source import TargetSource
from drafttrain.target import Target, TargetShell, load_shell
from tests.files import ROOT


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
        "decode_tokens": 6,
        **extra,
    }
    recipe.write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in options.items()))
    return [str(recipe)]


def launch(
    words: list[str],
    launcher: list[str] | None = None,
    script: str = "drafttrain/train.py",
    **env: str,
) -> subprocess.CompletedProcess[str]:
    command = [*(launcher or [sys.executable]), str(ROOT / script), *words]
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


TWO = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
]


def check_replayed(
    target: Target, data: Path, drafter: TrainableDrafter, trees: list[str], most: int
) -> None:
    """Stored answers of `most` tokens verify, without the target's layers, as the target does."""
    shell = load_shell(target.path, "float32", "cpu", weights=True)
    assert isinstance(shell, TargetShell)
    records = load_records(data)
    rows, _ = training_rows(records, 2048, 0, 0)
    origin = Stored(FeatureStore.open(data, drafter.feature_layers), list(records["id"]))
    source = TargetSource(shell, drafter.feature_layers, drafter.kept_ids, origin)
    for spec in map(TreeSpec.parse, trees):
        drafter.bind(target)
        want = acceptance(target, drafter, first_prompts(rows, 8, None), spec, most)
        drafter.bind(shell)
        assert replayed(drafter, rows, source, spec, 8, most) == want
        assert want["accepted_length"] > 1
