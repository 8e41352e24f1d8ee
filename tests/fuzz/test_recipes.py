"""Recipes: faults of the YAML file, every key with wrong values, overrides as words."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from itertools import pairwise
from random import Random

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.config import TrainConfig, TrainerKeys, load_config
from drafttrain.drafters.registry import kind_class, kinds
from drafttrain.train import setup
from drafttrain.training import arguments
from drafttrain.training.on_policy import OnPolicyOptions
from tests.fuzz import (
    WRONG_VALUES,
    Fault,
    fuzz,
    json_faults,
    outcome,
    seeds,
    text_faults,
    wrong_words,
)

VALID = {
    "kind": "eagle3",
    "target": "t",
    "data": "d",
    "output_dir": "o",
    "loss": "0.9*kl+0.1*ce",
    "drafter": {"ttt_steps": 4, "feature_layers": [1, 2], "depth_share": 0.5},
    "on_policy": {"share": 0.5, "responses": 3},
    "max_length": 64,
    "learning_rate": 1e-3,
    "max_steps": 3,
    "report_to": ["none"],
    "use_cpu": True,
    "lr_scheduler_type": "cosine",
}
OWN = [one.name for one in fields(TrainConfig) if one.name != "trainer"]
EVERY = sorted({*OWN, *arguments.KEYS} - {"output_dir", "push_to_hub", "use_cpu"})
CONFIGS = [of for kind in kinds() if (of := getattr(kind_class(kind), "config_class", None))]
OF_KINDS = {f"drafter.{name}" for of in CONFIGS for name in vars(of()) if not name.startswith("_")}
OPTIONS = sorted(
    {*OF_KINDS, *(f"on_policy.{one.name}" for one in fields(OnPolicyOptions)), "on_policy.x"}
)
RANGED = (*OWN, *TrainerKeys.__dataclass_fields__)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes") / "recipe.yaml"


def assert_sound(config: TrainConfig) -> None:
    numbers = {**vars(config), **config.trainer}
    for name in RANGED:
        value = numbers.get(name)
        assert not isinstance(value, float) or math.isfinite(value), name
    assert 0 <= config.validation < 1 and config.max_length >= 1 and config.max_minutes >= 0


def load(path, words=()):
    assert_sound(load_config(str(path), list(words), arguments.KEYS))


@fuzz(examples=48)
@given(fault=text_faults(), seed=seeds())
def test_files(recipe, fault: Fault, seed):
    recipe.write_bytes(fault.apply(yaml.safe_dump(VALID).encode(), Random(seed)))
    outcome("recipe", fault.name, lambda: load(recipe))


@fuzz(examples=60)
@given(fault=json_faults(), seed=seeds())
def test_values_inside(recipe, fault: Fault, seed):
    recipe.write_text(
        yaml.safe_dump(fault.apply(VALID, Random(seed)), allow_unicode=False),
        errors="surrogatepass",
    )
    outcome("recipe", fault.name, lambda: setup(str(recipe), []))


ODD = {
    "aliases": "a: &a [x,x,x]\n" + "".join(f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in pairwise("abcdefghi")),
    "merge keys": "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i}\n  <<: [*a{i-1}, *a{i-1}]\n" for i in range(1, 26)),
    "recursion": "drafter: &a {x: *a}\n",
    "twice": "kind: eagle3\nkind: medusa\n",
    "twice inside": "drafter: {ttt_steps: 3, ttt_steps: 4}\n",
    "tag": "kind: !!python/object/apply:os.system [ls]\n",
    "unknown tag": "kind: !secret x\n",
    "empty tag": "max_length: !!int ''\n",
    "bool tag": "packing: !!bool maybe\n",
    "time tag": "kind: !!timestamp x\n",
    "date": "drafter: {x: 2024-01-01}\n",
    "impossible date": "kind: 2024-99-99\n",
    "bytes": "kind: !!binary aGk=\n",
    "set": "drafter: !!set {a, b}\n",
    "number as key": "1: 2\n",
    "truth as key": "yes: 2\n",
    "null as key": "null: 2\n",
    "list as key": "? [a]\n: 2\n",
    "digits": "max_length: " + "1" * 5000 + "\n",
    "hexadecimal": "drafter: {x: 0x" + "f" * 5000 + "}\n",
    "levels": "drafter: " + "{a: " * 200 + "1" + "}" * 200 + "\n",
    "documents": "kind: eagle3\n---\nkind: medusa\n",
    "directive": "%YAML 9.9\n---\nkind: eagle3\n",
    "control characters": "kind: \x07\n",
    "not finite inside": "drafter: {x: .nan}\n",
}  # fmt: skip


@pytest.mark.parametrize("fault", ODD)
def test_odd_yaml(recipe, fault):
    recipe.write_text(ODD[fault])
    assert outcome(
        "recipe", "odd YAML", lambda: load(recipe, ["target=t", "data=d", "output_dir=o"])
    )


@fuzz(examples=60)
@given(key=st.sampled_from([*RANGED, *EVERY, *OPTIONS]), word=wrong_words())
def test_overrides(recipe, key, word):
    recipe.write_text(yaml.safe_dump(VALID))
    outcome("recipe key", word[0], lambda: setup(str(recipe), [f"{key}={word[1]}"]))


@pytest.mark.thorough
@pytest.mark.parametrize("key", RANGED)
def test_every_key_with_every_wrong_value(recipe, key):
    for fault, values in WRONG_VALUES.items():
        for value in values:
            content = {"target": "t", "data": "d", "output_dir": "o", key: value}
            recipe.write_text(yaml.safe_dump(content), errors="surrogatepass")
            outcome("recipe key", fault, lambda: load(recipe))


ODD_KEYS = (
    "",
    ".",
    "a.",
    ".a",
    "a..b",
    "kind.x",
    "drafter",
    "drafter.ttt_steps.x",
    "a" * 3000,
    "a." * 5000 + "b",
    "-",
    "trainer",
)


@fuzz(examples=48)
@given(name=st.sampled_from(ODD_KEYS), word=wrong_words())
def test_override_keys(recipe, name, word):
    recipe.write_text(yaml.safe_dump(VALID))
    outcome("override", word[0], lambda: load(recipe, [f"{name}={word[1]}"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["max_minutes=nan"], "max_minutes='nan' must be a number from 0"),
        (["max_steps=abc"], "max_steps='abc' must be -1 or a whole number from 1"),
        (["learning_rate=.nan"], "value=nan must be text, true, false, null or a finite number"),
        (["seed=1180591620717411303424"], "seed=1180591620717411303424 must be"),
        (["packing=maybe"], "packing='maybe' must be true or false"),
        (["dtype=int8"], "dtype='int8' must be one of auto"),
        (["deepspeed=missing.json"], "deepspeed='missing.json' cannot be read"),
        (["report_to=foo"], "report_to='foo' is not one of none, all"),
        (["lr_scheduler_type=foo"], "TrainingArguments: .*change that key"),
        (
            ["gradient_checkpointing_kwargs=abc"],
            "gradient_checkpointing_kwargs='abc' must be key: value pairs",
        ),
        (["lr_scheduler_kwargs=abc"], "lr_scheduler_kwargs='abc' must be key: value pairs"),
        (
            ['activation_checkpointing_kwargs="{\\"use_reentrant\\": true}"'],
            "use_reentrant=true: kind='eagle3' reads keys",
        ),
        (["bf16=perhaps"], "bf16='perhaps' must be true or false"),
        (["max_length.x=1"], "max_length.x is set, but max_length=64 is not a group"),
        (["a=1", "a.b=2"], "a.b is set, but a=1 is not a group"),
        (["drafter.ttt_steps=2.5"], "drafter.ttt_steps=2.5 must be a whole number from 1 to 256"),
        (["decode_tree=fanout:1000x1000"], "is too large"),
        (["loss=nan*kl"], "the weight is 'nan'"),
        (["kind=eagle9"], "kind='eagle9' is not a drafter kind"),
        (['output_dir="a\\nb"'], "output_dir='a.nb' must be a name or path"),
        (["max_steps=[1"], "is not valid YAML"),
        (["max_length=\u0663"], "must be a whole number"),
    ],
)
def test_each_mistake_is_one_line(recipe, words, message):
    recipe.write_text(yaml.safe_dump(VALID))
    found = outcome("recipe key", "named", lambda: setup(str(recipe), words))
    assert re.search(message, found), found
