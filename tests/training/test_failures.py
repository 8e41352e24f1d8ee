"""What goes wrong in the middle of a run ends in one clear error, and the last good checkpoint stays."""

from __future__ import annotations

import errno
import shutil

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.cli import main
from drafttrain.data import loader
from drafttrain.drafters.registry import default_tree
from drafttrain.training.checkpoint import Checkpoints
from drafttrain.training.step import TrainingStep
from tests.files import dump_json, load_json
from tests.training.checkpoint_states import same
from tests.training.runs import write_recipe


@pytest.fixture(scope="module")
def begun(tiny, tmp_path_factory):
    """A run with a checkpoint at step 2, and the words that go on to step 4."""
    folder = tmp_path_factory.mktemp("begun")
    words = write_recipe(folder, *tiny, save_steps=2, max_steps=4, decode_prompts=0, validation=0)
    assert main(["train", *words, "max_steps=2"]) == 0
    return folder / "drafter", words


def no_memory(step, loss):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def no_memory_on_a_cpu(step, loss):
    torch.empty(1 << 60)  # what torch says for real


def infinite_gradients(step, loss):
    return loss * 3e38


def infinite_loss(step, loss):
    step.check_finite("loss", loss * float("inf"))


STEP = [
    (no_memory, r"error: out of memory on cpu \(CUDA out of memory.*per_device_train_batch_size=2 gradient_accum.*=2 \(now 4"),
    (no_memory_on_a_cpu, r"error: out of memory on cpu \(.*can't allocate memory.*per_device_train_batch_size=2"),
    (infinite_gradients, r"error: grad_norm=inf at step 2: not finite; lower learning_rate \(0.001\)"),
    (infinite_loss, r"error: loss=inf at step 2: not finite; lower learning_rate \(0.001\)"),
]  # fmt: skip


def fails(begun, tmp_path, capsys, message: str) -> None:
    """The run ends in that one line with checkpoint-2 whole, and nothing else, behind it."""
    import re

    run = tmp_path / "run"
    shutil.copytree(begun[0], run)
    before = {path: path.read_bytes() for path in (run / "checkpoint-2").iterdir()}
    assert main(["train", *begun[1], f"output_dir={run}"]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and "checkpoint" in said, said[-2000:]
    assert {path: path.read_bytes() for path in (run / "checkpoint-2").iterdir()} == before
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-2"] and not (
        run / ".partial"
    ).exists()


@pytest.mark.thorough
@pytest.mark.parametrize(("fault", "message"), STEP, ids=[fault.__name__ for fault, _ in STEP])
def test_a_step_that_fails(begun, tmp_path, monkeypatch, capsys, fault, message):
    plain = TrainingStep.compute_loss

    def faulty(self, *args, **kwargs):
        loss = plain(self, *args, **kwargs)
        return loss if self.state.global_step < 2 else fault(self, loss)

    monkeypatch.setattr(TrainingStep, "compute_loss", faulty)
    fails(begun, tmp_path, capsys, message)


@pytest.mark.thorough
def test_no_memory_before_the_first_step(begun, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "drafttrain.train.begin_from_least_squares", lambda *_: torch.empty(1 << 60)
    )
    (tmp_path / "training.json").write_text('{"config": {}}')
    words = ["train", *begun[1], f"output_dir={tmp_path}", "per_device_train_batch_size=1"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "error: out of memory on cpu (" in said and "no checkpoint was written before" in said
    assert "set drafter.ttt_steps lower, or max_length or cache_gb lower;" in said


@pytest.mark.thorough
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError(
            "[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/0"
        ),
    ],
)
def test_a_disk_that_fills_while_saving(begun, tmp_path, monkeypatch, capsys, error):
    def full(self, output_dir):
        assert output_dir.endswith("/.partial/checkpoint-4")
        raise error

    monkeypatch.setattr(Checkpoints, "save_random_numbers", full)
    fails(
        begun,
        tmp_path,
        capsys,
        r"error: output_dir=.*no space left.*save_total_limit lower.*checkpoint-2 is kept, the same",
    )


@pytest.mark.thorough
def test_an_empty_mask(begun, tmp_path, monkeypatch, capsys):
    plain = loader.collate

    def empty(rows):
        batch = plain(rows)
        return {**batch, "shift_labels": torch.full_like(batch["shift_labels"], -100)}

    monkeypatch.setattr("drafttrain.training.order.collate", empty)
    assert main(["train", *begun[1], f"output_dir={tmp_path}"]) == 2
    assert "the loss mask of all rows is empty" in capsys.readouterr().err


@pytest.mark.thorough
def test_other_errors_stay_what_they_are(begun, tmp_path, monkeypatch):
    def broken(self, *args, **kwargs):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(TrainingStep, "compute_loss", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        main(["train", *begun[1], f"output_dir={tmp_path}"])


@pytest.mark.thorough
def test_resume_false_begins_anew_and_only_then_are_an_old_drafters_settings_forgotten(
    begun, tmp_path, capsys
):
    run = tmp_path / "run"
    shutil.copytree(begun[0], run)
    (run / "decoding.json").write_text('{"tree": "chain:7"}')
    (run / "adapter").mkdir()
    (run / "adapter" / "mine.txt").write_text("not written by a training")
    assert main(["train", *begun[1], f"output_dir={run}"]) == 0
    assert "going on" in capsys.readouterr().out and default_tree(str(run)) == "chain:7"
    again = ["train", *begun[1], f"output_dir={run}", "resume=false", "max_steps=2"]
    assert main(again) == 0
    assert "going on" not in capsys.readouterr().out
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-2"}
    assert default_tree(str(run)) is None and (run / "adapter" / "mine.txt").exists()


@pytest.mark.thorough
def test_resume_false_refuses_a_checkpoint_that_it_did_not_write(begun, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(begun[0], run)
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-900")
    assert main(["train", *begun[1], f"output_dir={run}", "resume=false"]) == 2
    assert "contains checkpoint-900, which no run of drafttrain wrote" in capsys.readouterr().err
    assert (run / "checkpoint-900").is_dir() and (run / "checkpoint-2").is_dir()
    shutil.rmtree(run / "checkpoint-900")
    (run / "checkpoint-2" / "notes.txt").write_text("mine")
    assert main(["train", *begun[1], f"output_dir={run}", "resume=false"]) == 2
    error = capsys.readouterr().err
    assert "contains checkpoint-2/notes.txt, which no run of drafttrain wrote there" in error
    assert (run / "checkpoint-2" / "model.safetensors").is_file()


@pytest.mark.thorough
def test_a_run_that_died_behind_its_last_checkpoint_takes_no_further_step(begun, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(begun[0], run)
    (run / "training.json").unlink()
    (run / "model.safetensors").unlink()
    assert main(["train", *begun[1], f"output_dir={run}", "max_steps=2"]) == 0
    assert "going on from" in capsys.readouterr().out
    summary = load_json(run / "training.json")
    assert summary["steps"] == 2 and (run / "model.safetensors").is_file()
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.thorough
def test_the_best_checkpoint_is_found_after_its_run_has_moved(begun, tmp_path):
    words = ["train", *begun[1], "save_total_limit=1"]
    first = tmp_path / "first"
    shutil.copytree(begun[0], first)
    assert main([*words, f"output_dir={first}"]) == 0
    shutil.copytree(begun[0] / "checkpoint-2", first / "checkpoint-2", dirs_exist_ok=True)
    state = load_json(first / "checkpoint-4" / "trainer_state.json")
    best = str(first / "checkpoint-2")
    state |= {"best_global_step": 2, "best_metric": 9.0, "best_model_checkpoint": best}
    dump_json(first / "checkpoint-4" / "trainer_state.json", state)
    (first / "training.json").unlink()
    run = first.rename(tmp_path / "moved")
    assert main([*words, f"output_dir={run}"]) == 0
    best, saved = (load_file(run / name / "model.safetensors") for name in ("checkpoint-2", "."))
    assert same(best, saved) and load_json(run / "training.json")["best"]["step"] == 2
