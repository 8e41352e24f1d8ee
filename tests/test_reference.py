"""docs/reference/, --help and the defaults of the trainer's keys."""

from __future__ import annotations

from dataclasses import fields

import pytest
from transformers import TrainingArguments

from drafttrain.config import TrainConfig, TrainerKeys
from drafttrain.values import default_of
from scripts import reference
from tests.files import ROOT

OURS = {
    "logging_steps",
    "save_steps",
    "save_total_limit",
    "max_grad_norm",
    "adam_beta2",
}  # defaults of ours


@pytest.mark.thorough
def test_the_reference_is_up_to_date():
    for name, text in reference.pages().items():
        assert (ROOT / "docs" / "reference" / name).read_text() == text, (
            "run python scripts/reference.py"
        )


def test_every_key_says_what_it_means():
    for settings in (TrainConfig, TrainerKeys):
        assert [one.name for one in fields(settings) if "meaning" not in one.metadata] in (
            [],
            ["trainer"],
        )


def test_defaults_of_the_trainers_keys_are_transformers_own_or_ours():
    theirs = {one.name: one.default for one in fields(TrainingArguments)}
    differing = {one.name for one in fields(TrainerKeys) if default_of(one) != theirs[one.name]}
    assert differing == OURS


@pytest.mark.thorough
def test_every_option_of_a_kind_says_what_it_means():
    lines = [
        line for line in reference.config_page().splitlines() if line.startswith("| `drafter.")
    ]
    assert len(lines) > 100 and not [line for line in lines if line.endswith("|  |")]
    assert any(
        line.startswith("| `drafter.num_attention_heads` |") and "| the target's |" in line
        for line in lines
    )
