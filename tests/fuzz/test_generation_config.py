"""generation_config.json of a target: whatever it holds, the target loads and decodes, or one line says what is wrong."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from random import Random

import pytest
from hypothesis import given

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.errors import UserError
from drafttrain.inference import SamplingParams, generate
from drafttrain.target import Target, load_shell
from tests.files import FIXTURES, dump_json, load_json
from tests.fuzz import file_faults, fuzz, json_faults, outcome, seeds, text_faults

FIXTURE = FIXTURES / "target"
VALID = load_json(FIXTURE / "generation_config.json") | {
    "eos_token_id": [261, 262],
    "repetition_penalty": 1.2,
    "encoder_repetition_penalty": 1.1,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 9,
    "bad_words_ids": [[5], [6, 7]],
    "sequence_bias": [[[8], -2.0], [[9, 10], 1.5]],
    "min_length": 2,
    "min_new_tokens": 2,
    "forced_eos_token_id": [261],
    "suppress_tokens": [11, 12],
    "begin_suppress_tokens": [13],
    "exponential_decay_length_penalty": [2, 1.1],
    "remove_invalid_values": False,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "max_length": 50,
    "num_beams": 1,
    "early_stopping": False,
    "custom": {"key": [1]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(shutil.copytree(FIXTURE, tmp_path_factory.mktemp("faults") / "target"))


@pytest.fixture(scope="module")
def loaded(folder):
    return Target.load(str(folder), "float32", "cpu")


def decode(target: Target) -> None:
    for sampling in (SamplingParams(), SamplingParams(1.0)):
        spec = TreeSpec.parse("chain:3")
        generate(
            target, NgramDrafter(), [3, 4, 3, 4, 3], max_new_tokens=5, spec=spec, sampling=sampling
        )


def load(folder: Path, target: Target) -> None:
    """Loads the folder without weights, and decodes with weights by its generation_config."""
    target.model.generation_config = copy.deepcopy(load_shell(str(folder)).model.generation_config)
    decode(target)


@pytest.mark.thorough
@fuzz(examples=24)
@given(fault=json_faults(), seed=seeds())
def test_values(fault, seed, folder, loaded):
    random = Random(seed)
    content = VALID
    for _ in range(random.choice((1, 1, 3))):
        content = fault.apply(content, random)
    dump_json(folder / "generation_config.json", content)
    outcome("target: generation_config.json", fault.name, lambda: load(folder, loaded))


@fuzz(examples=24)
@given(fault=text_faults() | file_faults(), seed=seeds())
def test_bytes(fault, seed, folder, loaded):
    (folder / "generation_config.json").write_bytes(
        fault.apply(json.dumps(VALID).encode(), Random(seed))
    )
    outcome("target: generation_config.json", fault.name, lambda: load(folder, loaded))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suppress_tokens", [100_000]),
        ("begin_suppress_tokens", [-1]),
        ("bad_words_ids", [[3, 100_000]]),
        ("sequence_bias", [[[100_000], 1.0]]),
        ("forced_bos_token_id", 100_000),
        ("forced_eos_token_id", [261, 100_000]),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(key, value, folder):
    dump_json(folder / "generation_config.json", {"eos_token_id": 261, key: value})
    for load_target in (load_shell, lambda name: Target.load(name, "float32", "cpu")):
        said = outcome(
            "target: generation_config.json",
            "token id",
            lambda load_target=load_target: load_target(str(folder)),
        )
        assert key in said and ("100000" in said or "-1" in said)


def test_a_readable_file_is_applied_and_a_damaged_one_is_not_replaced_by_defaults(folder):
    """transformers takes any file that it cannot read for a missing one."""
    path = folder / "generation_config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"suppress_tokens": [7]}).encode())
    for load_target in (load_shell, lambda name: Target.load(name, "float32", "cpu")):
        assert load_target(str(folder)).generation.rules.settings == {"suppress_tokens": [7]}
    path.write_text('{"suppress_tokens": [7]')
    for load_target in (load_shell, lambda name: Target.load(name, "float32", "cpu")):
        with pytest.raises(UserError, match=r"generation_config.json' is not JSON"):
            load_target(str(folder))
