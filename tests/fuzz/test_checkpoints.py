"""Checkpoints: which one a run resumes from."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from transformers import TrainerState, TrainingArguments

from drafttrain.config import TrainConfig
from drafttrain.errors import UserError
from drafttrain.train import check_goes_on
from drafttrain.training.checkpoint import find_checkpoint
from drafttrain.training.limits import TimeBudget
from tests.files import FIXTURES, load_json
from tests.fuzz import file_faults, fuzz, json_faults, outcome, seeds

RUN = FIXTURES / "run"
FILES = ("trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "run"


def restored(run: Path) -> Path:
    shutil.rmtree(run, ignore_errors=True)
    for name in ("checkpoint-2", "checkpoint-4"):
        shutil.copytree(RUN / name, run / name)
    return run


@functools.cache
def arguments(output_dir: str) -> TrainingArguments:
    return TrainingArguments(output_dir=output_dir, use_cpu=True, report_to=[])


def find(run: Path) -> str | None:
    found = find_checkpoint(arguments(str(run)), resume=True)
    if found is not None:  # what transformers then reads
        state = TrainerState.load_from_json(f"{found}/trainer_state.json")
        assert state.global_step == int(found.rpartition("-")[2])
        TimeBudget.after(1.0, state)
        for name in ("optimizer.pt", "scheduler.pt"):
            torch.load(Path(found, name), weights_only=True)
    return found


@fuzz(examples=24)
@given(fault=file_faults(), seed=seeds())
def test_a_damaged_checkpoint_gives_way_to_the_one_before(run, fault, seed):
    random = Random(seed)
    path = restored(run) / "checkpoint-4" / random.choice(FILES)
    path.write_bytes(fault.apply(path.read_bytes(), random))

    def call():
        assert find(run) in (str(run / "checkpoint-2"), str(run / "checkpoint-4"))

    assert outcome("checkpoint", fault.name, call) == ""


@fuzz(examples=15)
@given(fault=json_faults(), seed=seeds())
def test_values_of_the_trainers_state(run, fault, seed):
    path = restored(run) / "checkpoint-4" / "trainer_state.json"
    path.write_text(json.dumps(fault.apply(load_json(path), Random(seed))))
    outcome("checkpoint", fault.name, lambda: find(run))


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b"\x80"])
def test_changed_keys_are_checked_behind_the_last_sound_checkpoint(run, content):
    config = TrainConfig(output_dir=str(restored(run)))
    finished = replace(arguments(str(run)), max_steps=4)
    with pytest.raises(UserError, match="is trained already, so seed=1 cannot take effect"):
        check_goes_on(config, finished, ["seed=1"])
    (run / "checkpoint-4" / "trainer_state.json").write_bytes(content)
    check_goes_on(config, finished, ["seed=1"])  # goes on behind step 2


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_without_a_file_is_not_used(run, name, capsys):
    (restored(run) / "checkpoint-4" / name).unlink()
    assert find(run) == str(run / "checkpoint-2")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "checkpoint-4 is damaged and not used" in said
    assert name.partition(".")[0][:9] in said or "safetensors" in said
    (run / "checkpoint-2" / "optimizer.pt").write_bytes(b"")
    with pytest.raises(
        UserError, match="all checkpoints are damaged; start again with resume=false"
    ):
        find(run)
    assert (run / "checkpoint-2").is_dir() and (run / "checkpoint-4").is_dir()
