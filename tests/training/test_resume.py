"""Nothing is lost: kill -9 at a random step, SIGTERM, checkpoints, and what a run leaves in its logs."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from drafttrain.cli import main
from drafttrain.training.limits import TimeBudget
from drafttrain.training.order import ByLength
from drafttrain.training.step import MEASURE_EVERY, TrainingStep
from tests.files import load_json
from tests.training.checkpoint_states import same, state_of
from tests.training.runs import ROOT, launch, write_recipe

STEPS = 11
# Everything that could remember something: random depths, an own pool of responses, conversations that share rows.
EAGLE3 = {
    "drafter": {
        "draft_vocab_size": 255,
        "ttt_steps": 2,
        "depth_share": 0.5,
        "later_depths_from": 0.4,
    },
    "feature_rates": True,
}
DRAFT_MODEL = {
    "kind": "draft_model",
    "feature_rates": False,
    "drafter": {"layers": [0, 2]},
    "on_policy": {"share": 0.5, "refresh_steps": 2, "responses": 6, "max_new_tokens": 8},
}
PACKED = {"packing": True, "max_length": 64}
RUNS = {
    "eagle3": EAGLE3,
    "packed eagle3": {**EAGLE3, **PACKED},
    "draft_model": DRAFT_MODEL,
    "packed draft_model": {**DRAFT_MODEL, **PACKED},
}


def recipe(tmp_path: Path, tiny, **extra: object) -> list[str]:
    """A feature cache, accumulation, epochs of few steps, evaluation and decoding on the way."""
    options = {
        "max_steps": STEPS,
        "save_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine",
        "eval_strategy": "steps",
        "eval_steps": 4,
        **EAGLE3,
        **extra,
    }
    return write_recipe(tmp_path, *tiny, **options)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """An uninterrupted run that logs to wandb without a network."""
    folder = tmp_path_factory.mktemp("whole")
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DIR", str(folder))
        assert main(["train", *recipe(folder, tiny, report_to="wandb")]) == 0
        import wandb

        wandb.teardown()  # waits for the process that writes the file
    return folder, said.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_killed_at_a_random_step_and_resumed_equals_uninterrupted(tiny, request, tmp_path, name):
    if name == "eagle3":
        reference = request.getfixturevalue("whole")[0] / "drafter"
    else:
        reference = tmp_path / "whole"
        done = launch([*recipe(tmp_path, tiny, **RUNS[name]), f"output_dir={reference}"])
        assert done.returncode == 0, done.stderr[-3000:]
    words = recipe(tmp_path, tiny, **RUNS[name])
    drafter = tmp_path / "drafter"
    last = random.Random().randint(4, STEPS - 1)
    command = [sys.executable, str(ROOT / "drafttrain" / "train.py"), *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as process:
        for line in process.stdout:
            if line.startswith(f"step {last}/"):
                process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not (drafter / "training.json").exists()
    assert get_last_checkpoint(str(drafter)) is not None
    (drafter / ".partial" / "checkpoint-999").mkdir(
        parents=True, exist_ok=True
    )  # as if it had been saving
    done = launch(words)
    assert done.returncode == 0 and "going on from" in done.stdout, done.stderr[-3000:]
    ours, theirs = (state_of(place / f"checkpoint-{STEPS}") for place in (drafter, reference))
    assert len(ours["losses"]) == STEPS and bool(ours["on_policy"]) == ("draft_model" in name)
    for part in ours:
        assert same(ours[part], theirs[part]), f"{part} differs after a kill at step {last}"
    a, b = (load_file(place / "model.safetensors") for place in (drafter, reference))
    assert same(a, b)


@pytest.mark.thorough
def test_the_best_checkpoint_is_the_one_that_decodes_best(whole):
    folder = whole[0] / "drafter"
    out = whole[1]
    state = load_json(folder / f"checkpoint-{STEPS}" / "trainer_state.json")
    key = "eval_decode_accepted_length"
    decoded = {log["step"]: log[key] for log in state["log_history"] if key in log}
    assert list(decoded) == [3, 6, 9, STEPS] and "decoding held-out prompts: accepted length" in out
    best = max(decoded, key=lambda step: (decoded[step], step))
    assert (
        state["best_global_step"] == best
        and Path(state["best_model_checkpoint"]) == folder / f"checkpoint-{best}"
    )
    kept = {path.name for path in folder.glob("checkpoint-*")}
    assert (
        {f"checkpoint-{best}", f"checkpoint-{STEPS}"} <= kept
        and len(kept) == 2
        and not (folder / ".partial").exists()
    )
    assert same(
        load_file(folder / "model.safetensors"),
        load_file(folder / f"checkpoint-{best}" / "model.safetensors"),
    )
    assert load_json(folder / "training.json")["best"]["step"] == best


@pytest.mark.thorough
def test_epochs_decode_before_their_one_checkpoint(tiny, tmp_path, capsys):
    due = {f"{name}_strategy": "epoch" for name in ("save", "logging", "eval")}
    words = recipe(tmp_path, tiny, max_steps=-1, num_train_epochs=2, save_total_limit=None, **due)
    assert main(["train", *words]) == 0
    said = capsys.readouterr().out
    assert said.count("(best: checkpoint-") == said.count("\nsaved ") == 2
    *_, last = (tmp_path / "drafter").glob("checkpoint-*/trainer_state.json")
    logs = load_json(last)["log_history"]
    for key in ("loss", "eval_loss", "eval_decode_accepted_length"):
        assert sum(key in log for log in logs) == len(logs) / 3, key


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of an offline run's file: LevelDB's log format behind a header of 7 bytes."""
    data = path.read_bytes()
    at = 7
    record = b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for another header in this block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole one, or the last piece
            yield record
            record = b""


@pytest.mark.thorough
def test_wandb_has_the_values(whole):
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = whole[0].glob("wandb/offline-run-*/run-*.wandb")
    rows: dict[str, list[float]] = {}
    for data in wandb_records(file):
        for item in Record.FromString(data).history.item:
            rows.setdefault("/".join(item.nested_key) or item.key, []).append(
                json.loads(item.value_json)
            )
    for key in ("train/loss", "train/grad_norm", "train/tokens_per_second", "train/memory_gb"):
        assert len(rows[key]) == STEPS, key
    assert all(x > 0 for x in rows["train/memory_gb"])
    assert len(rows["train/agree@1"]) == len(range(0, STEPS, MEASURE_EVERY))
    for key in ("eval/decode_accepted_length", "eval/decode_acceptance@1", "eval/accepted_length"):
        assert rows[key], key


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_saves_first_and_the_run_goes_on(tiny, tmp_path, monkeypatch, capsys, number):
    """From its last step, also if one checkpoint may stay and an earlier one is the best."""
    words = recipe(tmp_path, tiny, decode_steps=1, save_total_limit=1)
    lengths = itertools.chain([2.0], itertools.repeat(1.0))
    monkeypatch.setattr(
        "drafttrain.train.acceptance", lambda *_: {"accepted_length": next(lengths)}
    )
    plain = TrainingStep.compute_loss
    signals = iter([number])
    copied = tmp_path / "drafter" / "checkpoint-1-copied"

    def signalled(self, *args, **kwargs):
        if self.state.global_step == 1 and (number := next(signals, None)):
            shutil.copytree(tmp_path / "drafter" / "checkpoint-1", copied)
            os.kill(os.getpid(), number)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(TrainingStep, "compute_loss", signalled)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped:
        main(["train", *words])
    assert stopped.value.code == 128 + number
    assert f"{number.name}: saved" in (said := capsys.readouterr().err)
    assert "checkpoint-2; the same command continues from there" in said
    assert signal.getsignal(number) == before
    assert main(["train", *words, "max_steps=3"]) == 0
    assert "checkpoint-2" in capsys.readouterr().out
    assert {path.name for path in copied.parent.glob("checkpoint-*")} == {
        "checkpoint-1",
        copied.name,
    }


@pytest.mark.thorough
def test_a_second_ctrl_c_ends_at_once(tiny, tmp_path, monkeypatch, capfd):
    words = recipe(tmp_path, tiny, decode_prompts=0)
    plain = TrainingStep.compute_loss

    def signalled(self, *args, **kwargs):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(TrainingStep, "compute_loss", signalled)
    before = signal.getsignal(signal.SIGINT)
    assert main(["train", *words]) == 130
    said = capfd.readouterr().err
    assert "saving a checkpoint after this step; Ctrl-C again ends at once" in said
    assert said.strip().splitlines()[-1].startswith("interrupted; what was finished is kept")
    assert signal.getsignal(signal.SIGINT) == before and not list(tmp_path.glob("*/checkpoint-*"))


def test_a_time_budget_is_what_a_checkpoint_left_of_it():
    budget = TimeBudget(2.0, used=100.0)
    saved = TrainerState(stateful_callbacks={"TimeBudget": budget.state()})
    assert TimeBudget.after(2.0, TrainerState()).used == 0.0
    resumed = TimeBudget.after(3.0, saved)
    assert (resumed.minutes, resumed.used) == (3.0, 100.0)


def test_rows_of_a_step_are_of_one_length():
    lengths = torch.randint(5, 400, (203,), generator=torch.Generator().manual_seed(0)).tolist()
    first, second = (list(ByLength(lengths, 8, 7, lambda epoch=epoch: epoch)) for epoch in (0, 1))
    assert len(set(first)) == len(first) == 200 and set(first) != set(second)
    spread = [
        max(step) - min(step)
        for step in ([lengths[i] for i in first[at : at + 8]] for at in range(0, 200, 8))
    ]
    assert sum(spread) / len(spread) < 100 and max(lengths[i] for i in first) in [
        lengths[i] for i in first[:8]
    ]
    assert sorted(ByLength(lengths[:5], 8, 7, lambda: 0)) == [0, 1, 2, 3, 4]
