"""The files of ours that one training step passes through: as few as a reader can hold, and listed in docs/architecture.md."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerState, TrainingArguments

from drafttrain.data.loader import collate, training_rows
from drafttrain.data.store import load_records
from drafttrain.states.source import TargetSource
from drafttrain.training.acceleration import OneProcess
from drafttrain.training.step import TrainingStep
from tests.drafters.helpers import make_drafter
from tests.path_files import files_run, listed_files
from tests.training.runs import write_data

MOST_FILES = 10


def files_of_a_step(target, tmp_path) -> list[str]:
    """Files below drafttrain/ whose functions run in one step with eagle3 and the target online, in order of first use."""
    records = load_records(str(write_data(tmp_path / "data", target, rows=4)))
    rows, _ = training_rows(records, 64, 0.0, 0)
    drafter = make_drafter(target, torch.arange(0, 300, 2)).train()
    args = TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to=[])
    source = TargetSource(target, drafter.feature_layers, drafter.kept_ids)
    step = TrainingStep(drafter, target, source, args, TrainerState(), OneProcess())
    inputs = collate(list(rows))

    def compute() -> None:
        step.compute_loss(drafter, inputs, torch.tensor(8)).backward()

    compute()  # fills caches
    files = files_run(compute)
    assert all(p.grad is not None for p in drafter.parameters() if p.requires_grad)
    return files


@pytest.mark.thorough
def test_a_step_crosses_few_files_and_the_docs_list_them(target, tmp_path):
    files = files_of_a_step(target, tmp_path)
    assert len(files) <= MOST_FILES, files
    assert files == listed_files("Files of a training step")
