"""Printed commands: every word that comes from a file or a flag stays one word, whatever is in it."""

from __future__ import annotations

import ast
import json
import shlex
from typing import Any

import pytest
import yaml

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.shipping import find_drafter
from drafttrain.export.batch_schedule import Entry
from drafttrain.export.engine_runs import RUNS, Serving
from drafttrain.export.serving_recipes import own_drafting, recipes
from tests.conftest import make_target
from tests.drafters.eagle3_files import make_head

HOSTILE = 'a/b\'; touch x #\n`y` $(z) "q" EOF\nEOF\nrm -rf ~'
DRAFTER = f"{HOSTILE}/d"
OPTIONS: dict[str, dict[str, Any]] = {
    "vLLM": {"method": "eagle3"},
    "SGLang": {"speculative-algorithm": "EAGLE3"},
    "TensorRT-LLM, Triton": {"decoding_type": "Eagle3"},
    "llama.cpp": {"spec-type": "draft-eagle3"},
    "transformers": {},
}


def words(command: str) -> list[str]:
    return shlex.split(command.replace(" \\\n  ", " "), comments=True)


def command(engine: str, **more: Any) -> str:
    tree = TreeSpec.parse("chain:3")
    return RUNS[engine].command(Serving(HOSTILE, DRAFTER, tree, OPTIONS[engine], **more))


@pytest.mark.parametrize("engine", ["vLLM", "SGLang", "llama.cpp"])
@pytest.mark.parametrize("schedule", [None, [Entry(1, 8, 3), Entry(9, 4096, 0)]])
def test_a_shell_takes_names_as_words(engine, schedule):
    found = words(command(engine, schedule=schedule))
    assert "touch" not in found and "rm" not in found
    if engine == "llama.cpp":
        assert found[found.index("--spec-draft-model") + 1] == f"{DRAFTER}/draft.gguf"
        assert "--spec-draft-p-min" in found
    else:
        assert HOSTILE in found
        assert any(DRAFTER in word or json.dumps(DRAFTER) in word for word in found)


def test_yaml_and_python_take_names_as_strings():
    printed = command("TensorRT-LLM, Triton").partition("<<'EOF'\n")[2]
    keys, _, rest = printed.partition("\nEOF\n")
    assert yaml.safe_load(keys)["speculative_config"]["speculative_model"] == DRAFTER
    assert words(rest) == ["trtllm-serve", HOSTILE, "--config", "speculative.yaml"]
    code = ast.parse(command("transformers"))
    strings = {node.value for node in ast.walk(code) if isinstance(node, ast.Constant)}
    assert {HOSTILE, DRAFTER} <= strings
    imported = code.body[0]
    assert isinstance(imported, ast.ImportFrom)
    used = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}
    assert {name for name in used if name.startswith("Auto")} <= {
        each.name for each in imported.names
    }


def test_what_a_card_prints_of_a_repository(tmp_path):
    make_head(make_target(layers=8)).save_pretrained(tmp_path / "drafter")
    trained = find_drafter(str(tmp_path / "drafter"))
    for recipe in recipes(trained, DRAFTER, HOSTILE, published=True):
        if recipe.reasons:
            continue
        if recipe.engine == "drafttrain":
            ast.parse(recipe.commands)
        elif not recipe.engine.startswith("TensorRT"):
            assert not {"touch", "rm"} & set(words(recipe.commands)), recipe
    for recipe in own_drafting("ngram", HOSTILE, 5):
        if recipe.engine.startswith("vLLM"):
            assert not {"touch", "rm"} & set(words(recipe.commands)), recipe


def test_a_schedule_says_what_vllm_loses_by_it():
    plain = command("vLLM")
    scheduled = command("vLLM", schedule=[Entry(1, 8, 3), Entry(9, 4096, 0)])
    assert "#49548" in scheduled and "data parallelism" in scheduled and "#16637" in scheduled
    assert "#49548" not in plain and plain.startswith("vllm serve ")


def test_llama_cpp_says_that_drafting_may_lose():
    assert "On CPUs drafting often costs more than it gains" in command("llama.cpp")
