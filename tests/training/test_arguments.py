"""Keys of a recipe that only transformers' Trainer would read are refused, each in one line."""

from __future__ import annotations

import re

import pytest

from drafttrain.config import TrainConfig
from drafttrain.errors import UserError
from drafttrain.training import arguments
from drafttrain.training.acceleration import optimizer_of, schedule_of
from drafttrain.training.arguments import training_arguments
from drafttrain.training.limits import TimeBudget
from tests.drafters.helpers import make_drafter


def config(tmp_path, **keys: object) -> TrainConfig:
    return TrainConfig(
        target="t",
        data="d",
        output_dir=str(tmp_path / "run"),
        trainer={"use_cpu": True, **keys},
    )


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("fsdp", "full_shard", "leave the key out: set deepspeed to a file"),
        ("torch_compile", True, "leave the key out"),
        ("eval_accumulation_steps", 2, "leave the key out"),
        ("length_column_name", "size", "rows are sorted by their tokens"),
        ("resume_from_checkpoint", "/other/checkpoint-3", "the newest checkpoint in output_dir"),
        ("hub_strategy", "end", "leave the key out"),
        ("push_to_hub", True, "publish the trained drafter with drafttrain push"),
        ("auto_find_batch_size", True, "an error names the batch size to set"),
        ("neftune_noise_alpha", 5.0, "leave the key out"),
        ("label_smoothing_factor", 0.1, "leave the key out"),
        ("use_liger_kernel", True, "leave the key out"),
        ("load_best_model_at_end", True, "the checkpoint that decodes held-out prompts best"),
        ("disable_tqdm", False, "drafttrain prints a line per log"),
        ("logging_nan_inf_filter", False, "a loss that is not finite ends the run"),
        ("optim", "galore_adamw_layerwise", "choose another value"),
        ("optim", "lomo", "choose another value"),
        ("lr_scheduler_type", "reduce_lr_on_plateau", "choose another value"),
        ("save_strategy", "best", "choose another value"),
        ("train_sampling_strategy", "batch_rebalance", "choose another value"),
    ],
)
def test_what_only_the_trainer_reads_is_refused(tmp_path, key, value, fix):
    with pytest.raises(UserError) as refused:
        training_arguments(config(tmp_path, **{key: value}))
    said = str(refused.value)
    assert said.startswith(f"{key}=") and "only transformers' Trainer reads it" in said
    assert fix in said and "\n" not in said


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"fsdp": True}, "fsdp=True must be text or null"),
        ({"dataloader_persistent_workers": True}, "set dataloader_num_workers above 0"),
        ({"dataloader_multiprocessing_context": "spawn"}, "set dataloader_num_workers above 0"),
        ({"dataloader_prefetch_factor": 2}, "set dataloader_num_workers above 0"),
        (
            {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "thread"},
            "dataloader_multiprocessing_context='thread' is not one of fork",
        ),
        ({"log_level": "loud"}, "log_level='loud' is not one of detail, debug"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
            "gradient_accumulation_kwargs.num_steps=4 has no effect; set gradient_accumulation_steps",
        ),
    ],
)
def test_values_that_fail_later_are_refused_first(tmp_path, keys, said):
    with pytest.raises(UserError, match=re.escape(said)):
        training_arguments(config(tmp_path, **keys))


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "first"}, "RANK='first' in the environment is not a whole number"),
        ({"WORLD_SIZE": "2x"}, "WORLD_SIZE='2x' in the environment is not a whole number"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' in the environment is not a whole number"),
        ({"RANK": "5"}, "RANK=5 in the environment must be from 0 to WORLD_SIZE - 1 = 0"),
    ],
)
def test_variables_of_a_launcher_are_checked(tmp_path, monkeypatch, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(said)):
        training_arguments(config(tmp_path))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"optim_args": "novalue"}, "optim, optim_args, optim_target_modules: "),
        ({"lr_scheduler_kwargs": {"foo": 1}}, "lr_scheduler_type, lr_scheduler_kwargs: "),
    ],
)
def test_values_that_a_library_refuses_are_one_line(tmp_path, target, keys, said):
    args = training_arguments(config(tmp_path, **keys))
    drafter = make_drafter(target)
    with pytest.raises(UserError, match=f"^{re.escape(said)}.*change that key of the recipe$"):
        schedule_of(optimizer_of(drafter, args, None), args, 10, None)


def test_shares_of_all_steps_under_a_time_budget(tmp_path, target):
    """A warm-up follows the time; there is no number of steps of which checkpoints could be a share."""
    given = config(tmp_path, warmup_steps=0.1, learning_rate=1.0)
    given.max_minutes = 1.0
    args = training_arguments(given)
    budget = TimeBudget(1.0)
    schedule = schedule_of(optimizer_of(make_drafter(target), args, None), args, 100_000, budget)
    rates = []
    for budget.used in (0.0, 3.0, 6.0, 12.0):
        rates.append(schedule.lr_lambdas[0](0))
    assert rates == pytest.approx([0, 0.5, 1, 1], abs=0.01)
    given.trainer["save_steps"] = 0.5
    with pytest.raises(UserError, match=r"save_steps=0.5 is a share of all steps, whose number"):
        training_arguments(given)


def test_fsdp_of_a_launcher_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=re.escape("ACCELERATE_USE_FSDP=true")):
        training_arguments(config(tmp_path))


def test_defaults_of_refused_keys_are_accepted(tmp_path):
    given = {"torch_compile": False, "push_to_hub": False, "disable_tqdm": True, "fsdp": None}
    assert training_arguments(config(tmp_path, **given)).max_steps == -1


def test_the_keys_that_are_read_exist():
    assert set(arguments.KEYS) > arguments.READ
    refused = {*arguments.INSTEAD, *arguments.ANYWAY}
    assert refused <= set(arguments.KEYS) - arguments.READ
    assert arguments.REFUSED.keys() <= arguments.READ
