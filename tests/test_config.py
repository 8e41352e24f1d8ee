"""Recipes and overrides: what is read, and what each mistake says."""

from __future__ import annotations

import pytest

from drafttrain.config import load_config, parse_overrides
from drafttrain.errors import UserError

KEYS = ["learning_rate", "max_steps", "per_device_train_batch_size", "seed"]
GOOD = "target: t\ndata: d\noutput_dir: o\n"


def write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return str(path)


def test_overrides_reach_inside_and_read_numbers_as_people_write_them(tmp_path):
    path = write(
        tmp_path, GOOD + "drafter:\n  ttt_steps: 4\n  draft_vocab_size: 8\nlearning_rate: 1e-3\n"
    )
    config = load_config(
        path, ["drafter.ttt_steps=3", "learning_rate=3e-3", "max_steps=7", "max_minutes=2"], KEYS
    )
    assert config.drafter == {"ttt_steps": 3, "draft_vocab_size": 8}
    assert config.trainer == {"learning_rate": 3e-3, "max_steps": 7}
    assert config.max_minutes == 2.0


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (
            GOOD + "learning_rat: 1\n",
            [],
            "unknown config key 'learning_rat'.*did you mean learning_rate",
        ),
        (GOOD, ["knid=eagle3"], "unknown config key 'knid'.*did you mean kind"),
        ("target: t\ndata: d\n", [], "config key 'output_dir' is missing.*output_dir=..."),
        (GOOD, ["max_steps"], "override 'max_steps' is not of the form key=value"),
        (
            GOOD + "max_length: long\n",
            [],
            "max_length='long' must be a whole number from 1 to 2147483647 .tokens used of a conversation.; the default is 2048",
        ),
        (GOOD + "drafter: 3\n", [], "drafter=3 must be key: value pairs"),
        (GOOD, ["max_steps=0"], "max_steps=0 must be -1 or a whole number from 1 "),
        ("a: [1\n", [], "is not valid YAML"),
        ("- a\n", [], "must hold key: value lines, not list"),
    ],
)
def test_each_mistake_is_named(tmp_path, text, overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(write(tmp_path, text), overrides, KEYS)


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(UserError, match="no such file, and no recipe of that name"):
        load_config(str(tmp_path / "none.yaml"), [], KEYS)


def test_override_words():
    assert parse_overrides(["a.b=1", "a.c=x", "d=true", "e="]) == {
        "a": {"b": 1, "c": "x"},
        "d": True,
        "e": "",
    }
