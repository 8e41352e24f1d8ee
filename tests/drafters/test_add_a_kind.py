"""docs/developer/add-a-drafter-kind.md, step by step: its code blocks become a kind that trains, decodes and is exported."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drafttrain import drafters
from tests.conftest import make_target, save_target
from tests.files import ROOT
from tests.training.runs import write_data

PAGE = ROOT / "docs" / "developer" / "add-a-drafter-kind.md"

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from drafttrain.cli import main
from drafttrain.drafters.registry import kind_class, kinds, load_drafter, load_trained
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.shipping import check_expressible, find_drafter, shipping
from drafttrain.errors import UserError
from drafttrain.inference import SamplingParams, generate
from drafttrain.target import Target
from tests.drafters import contract

folder, recipe, where = sys.argv[1:]
assert "bigram" in kinds() and kind_class("bigram").kind == "bigram"
assert main(["train", recipe]) == 0
log = json.loads((Path(folder) / "training.json").read_text())
assert log["steps"] == 30 and log["held_out"]["eval_alpha@1"] > 0.4, log["held_out"]

target = Target.load(where, "float32")
drafter = load_drafter(folder, target)
prompt = [5, 6, 7, 8]
plain = generate(target, None, prompt, max_new_tokens=16, eos_ids=()).tokens
for text in ("chain:3", "fanout:2x2", "dynamic:3,2,6", "paths:0,1,0-0", "chain:4@stop=0.1"):
    assert generate(target, drafter, prompt, max_new_tokens=16, spec=TreeSpec.parse(text), eos_ids=()).tokens == plain, text
hot = SamplingParams(temperature=0.8)
drawn = generate(target, drafter, prompt, max_new_tokens=16, sampling=hot, spec=TreeSpec.parse("chain:3@sample"), eos_ids=())
assert len(drawn.tokens) == 16

trained = find_drafter(folder)
assert trained.kind == "bigram" and load_trained(folder).config.width == 32
assert shipping("bigram").line(trained, "20 k") == "a bigram drafter of width 32, 20 k parameters"
try:
    check_expressible(trained, "vllm")
except UserError as error:
    assert "no vllm format" in str(error)

# The contract's tests, for this kind.
contract.check_overfitting("bigram")
saved = Path(folder).parent / "overfitted"
contract.overfitted("bigram")[0].save_pretrained(saved)
contract.check_depths("bigram", load_drafter(str(saved), contract.the_target(packed=True)))
print("the kind works")
"""


def blocks() -> dict[str, str]:
    """The page's files: blocks that begin with `# PATH`, those of one path joined."""
    files: dict[str, str] = {}
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        path, _, code = text.partition("\n")
        if language in ("python", "yaml"):
            assert path.startswith("# "), f"a {language} block without its file: {path}"
            files[path[2:]] = f"{files[path[2:]]}\n{code}" if path[2:] in files else code
    return files


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kind")
    target = make_target()
    save_target(target, folder / "target")
    data = write_data(folder / "data", target)
    for path, text in blocks().items():
        (folder / "kinds" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "kinds" / path).write_text(text)
    return folder, folder / "target", data


def build(kinds: Path, words: list[str]) -> None:
    """Runs SCRIPT where the kinds in a folder exist too."""
    drafters.__path__.append(str(kinds))
    sys.argv[1:] = words
    exec(SCRIPT, {})


@pytest.mark.thorough
def test_the_page_builds_a_kind(built, capfd):
    """In a child process, so that the kind is gone with it; forked, which saves imports, where CUDA does not forbid it."""
    folder, target, data = built
    recipe = folder / "kinds" / "bigram.yaml"
    out = folder / "out"
    text = recipe.read_text()
    for key, value in {"target": target, "data": data, "output_dir": out, "max_steps": 30}.items():
        text = re.sub(rf"^{key}: .*$", f"{key}: {value}", text, flags=re.M)
    text = text.replace("{width: 64}", "{width: 32}")
    recipe.write_text(
        text
        + "dtype: float32\nuse_cpu: true\nlearning_rate: 0.01\nvalidation: 0.1\ndecode_prompts: 0\n"
    )
    words = [str(out), str(recipe), str(target)]
    way = "spawn" if torch.cuda.is_initialized() else "fork"
    child = multiprocessing.get_context(way).Process(target=build, args=(folder / "kinds", words))
    child.start()
    child.join()
    done = capfd.readouterr()
    assert child.exitcode == 0 and done.out.endswith("the kind works\n"), done.out + done.err


def test_a_name_that_exists_twice_is_an_error(tmp_path):
    (tmp_path / "kinds" / "ngram").mkdir(parents=True)
    (tmp_path / "kinds" / "ngram" / "model.py").write_text("KIND = None\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DRAFTTRAIN_KINDS": str(tmp_path / "kinds"),
    }
    words = [sys.executable, "-c", "from drafttrain.drafters.kinds import kinds; kinds()"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert (
        done.returncode != 0
        and "UserError: DRAFTTRAIN_KINDS: kind 'ngram' exists twice" in done.stderr
    )
