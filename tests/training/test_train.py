"""The launch itself: a tiny run end to end, and its errors."""

from __future__ import annotations

import itertools
import re

import pytest

from drafttrain.cli import main
from drafttrain.config import TrainConfig
from drafttrain.drafters.eagle3.model import Eagle3
from drafttrain.drafters.registry import load_drafter
from drafttrain.target import Target
from drafttrain.train import build_drafter
from drafttrain.training.limits import TimeBudget
from tests.conftest import make_target
from tests.drafters.helpers import make_drafter
from tests.files import load_json
from tests.training.runs import write_data, write_recipe


@pytest.mark.thorough
def test_a_run_trains_saves_and_is_not_repeated(tiny, tmp_path, capsys, monkeypatch):
    words = write_recipe(tmp_path, *tiny)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert main(["train", *words]) == 0
    said = capsys.readouterr().out
    assert "covers" in said and "agree by depth" in said and "left" in said
    summary = load_json(tmp_path / "drafter" / "training.json")
    assert (
        summary["steps"] == 6
        and "eval_agree@2" in summary["held_out"]
        and summary["vocabulary"]["size"] == 255
    )
    drafter = load_drafter(str(tmp_path / "drafter"), Target.load(str(tiny[0]), "float32"))
    assert drafter.kind == "eagle3"
    assert not list((tmp_path / "drafter").rglob("*.bin")), "a pickle that keeps arguments"
    again = [*words, "gradient_checkpointing=true"]  # which changes memory alone
    assert main(["train", *again]) == 0 and "already trained" in capsys.readouterr().out

    # A changed key that no step would see is refused; the record stays true.
    record = (tmp_path / "drafter" / "training.json").read_text()
    assert main(["train", *words, "learning_rate=0.5", "seed=7"]) == 2
    said = capsys.readouterr().err
    assert "learning_rate=0.5 (was 0.001), seed=7 (was None) cannot take effect" in said
    assert "resume=false" in said and said.count("\n") == 1
    assert (tmp_path / "drafter" / "training.json").read_text() == record
    (old,) = (tmp_path / "drafter").glob("checkpoint-6")
    (old / "training_args.bin").write_bytes(b"of an earlier version")
    assert main(["train", *words, "learning_rate=0.002", "max_steps=8"]) == 0
    assert "goes on behind step 6 with learning_rate=0.002" in capsys.readouterr().out
    summary = load_json(tmp_path / "drafter" / "training.json")
    assert summary["steps"] == 8 and summary["config"]["trainer"]["learning_rate"] == 0.002


@pytest.mark.thorough
def test_a_time_budget_ends_the_run(tiny, tmp_path, monkeypatch):
    """A first step that compiles for 1.75 seconds, and then a quarter each: nine steps are 3.75, over several epochs."""
    ticks = itertools.chain([0.25], itertools.count(2.0, 0.25))
    monkeypatch.setattr(TimeBudget, "clock", lambda self: next(ticks))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    words = [*write_recipe(tmp_path, *tiny), "max_minutes=0.0625"]
    assert main(["train", *words, "max_steps=-1"]) == 0
    summary = load_json(tmp_path / "drafter" / "training.json")
    assert summary["steps"] == 9
    assert main(["train", *words, "max_steps=3", "resume=false"]) == 0
    assert load_json(tmp_path / "drafter" / "training.json")["steps"] == 3  # the earlier of the two


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
