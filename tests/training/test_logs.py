"""Lines of a training run: figures by depth, phases, and the time that a budget leaves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerState

from drafttrain.training.acceleration import OneProcess
from drafttrain.training.limits import TimeBudget
from drafttrain.training.logs import Logs


def logs(budget: TimeBudget | None = None, joins: float = 0.0) -> Logs:
    drafter = SimpleNamespace(progress=0.0, later_depths_from=joins)
    step = SimpleNamespace(drafter=drafter, depths=3)
    args = SimpleNamespace(
        report_to=[],
        device=torch.device("cpu"),
        output_dir="run",
        per_device_train_batch_size=8,
    )
    state = TrainerState(max_steps=20)
    state.is_world_process_zero = True
    made = Logs(args, state, OneProcess(), step, 1, budget)
    made.begin()
    return made


def test_depths_without_a_figure_are_dashes(capsys):
    made = logs()
    made.state.global_step = 4
    made.write({"loss": 2.0, "tokens_per_second": 7.0})
    made.write({"loss": 2.0, "tokens_per_second": 7.0, "agree@1": 0.5, "accepted_length": 1.5})
    said = capsys.readouterr().out
    assert "step 4/20  loss 2.000  agree by depth - - -  accepted length -  7 tok/s" in said
    assert "agree by depth 0.50 - -  accepted length 1.50" in said


def test_phases_are_announced_once(capsys):
    made = logs(joins=0.5)
    rates = [1, 2, 3, 3, 2, 1]  # of a warm-up, a constant part and a decay
    for number, rate in enumerate(rates):
        made.state.global_step = number + 1
        made.step.drafter.progress = number / len(rates)
        made.add([torch.tensor(1.0)], 0.1, rate)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "step 4/20  later depths join: they are trained from here on",
        "step 5/20  rate falls: the learning rate was 3 until here",
    ]


def test_a_budget_shows_time_instead_of_steps_that_wander(capsys):
    budget = TimeBudget(1.5, used=45.0)
    made = logs(budget)
    for step, wandering in ((7, 14), (8, 19)):
        made.state.global_step = step
        made.state.max_steps = wandering
        made.write({"loss": 2.0, "tokens_per_second": 7.0})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 7, 50 % of 1.5 min",
        "step 8, 50 % of 1.5 min",
    ]


@pytest.mark.parametrize(("seconds", "warned"), [(198.0, True), (2.0, False)])
def test_a_step_that_is_long_for_its_budget_is_named(capsys, seconds, warned):
    made = logs(TimeBudget(1.5, used=seconds))
    for number in (1, 2):
        made.state.global_step = number
        made.add([torch.tensor(1.0)], seconds, 1.0)
    said = capsys.readouterr().out
    assert said.count("note: this step took 198 s, 220 % of max_minutes=1.5") == warned
    assert warned == bool(said)


def test_samples_are_those_of_the_steps_taken():
    """Also where the time ends a run whose schedule has no end."""
    made = logs(TimeBudget(1.0))
    vars(made.args).update(train_batch_size=8, gradient_accumulation_steps=2, world_size=3)
    made.step.sharing = 1
    made.accelerator = SimpleNamespace(gather=lambda value: value, num_processes=1)
    made.state.global_step = made.state.max_steps = 5
    made.start -= 24 * 60
    made.end()
    assert made.state.log_history[-1]["train_samples_per_second"] == pytest.approx(1 / 6, abs=1e-2)
