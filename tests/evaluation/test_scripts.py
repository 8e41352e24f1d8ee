"""Every script of eval/ is read and builds its flags; those that fit into a moment run whole, on a tiny target."""

from __future__ import annotations

import contextlib
import runpy
import sys
from unittest import mock

import pytest
import torch

from tests.conftest import loaded_target
from tests.drafters.helpers import make_drafter
from tests.files import ROOT, load_json
from tests.training.runs import write_data, write_recipe

EVAL = ROOT / "eval"
COMMANDS = sorted(path.stem for path in EVAL.glob("*.py") if "ArgumentParser(" in path.read_text())
# Packages of scripts that run beside drafttrain, or of a run that it does not need.
ABSENT = {"easy_vqa", "speculators", "trl", "xllamacpp"}
# Smallest sizes; {target}, {head} and {data} are tiny ones.
RUNS = """
bench_adapt --target {target} --drafter {head} --stream {data}/stream.jsonl \
  --before 3 --after 4 --window 2 --max-new-tokens 4 --setting=--every=2
bench_adaptive --target {target} --drafter {head} --tokens 6 --prompts 1 --repeats 1 --dtype float32
bench_context --target {target} --lengths 8 --repeats 1 --dtype float32
bench_decode --target {target} --tokens 4 --prompts 1 --repeats 1 --dtype float32
bench_draft --target {target} --kinds eagle3 dflash medusa --tree chain:2 --batch 1 --vocabulary 64 --repeats 1 --flush 1
bench_generate --target {target} --count 2 --max-new-tokens 3 --slots 2 --batch-size 2 --repeats 1
bench_gpu decode --shape tiny --words 64 --prompt 8 --tokens 4 --repeats 1 --dtype float32
bench_gpu generate --shape tiny --words 64 --prompt 8 --tokens 4 --repeats 1 --dtype float32
bench_gpu train --shape tiny --words 64 --prompt 8 --length 24 --repeats 1 --dtype float32
bench_linear --shapes 64x64 --rows 1 --repeats 1
bench_plan --measure {recipe}
bench_suffix --target {target} --suites drafttrain --limit 1 --drafters ngram suffix --trees chain:2 \
  --max-new-tokens 4 --timed 1 --repeats 1
bench_tree_attention --prefix 16 --nodes 4 --heads 4 --kv-heads 2 --head-dim 16 --layers 1 --repeats 1 --dtype float32
bench_turns --target {target} --drafter {head} --tree chain:2 --max-new-tokens 3 --repeats 1
bench_vocabulary --target {target} --drafter {head} --tree chain:2 --limit 1 --max-new-tokens 4 --dtype float32
bench_vocabulary --train 64 --target {target} --data {data} --rows 1 --repeats 1 --dtype float32
plan_long_rows --tokens 64 --processes 2 --sequence-parallel 2
profile_round --target {target} --drafter {head} --tree chain:2 --tokens 4 --prompts 1 --dtype float32
"""
# In processes of their own, which take seconds to start.
APART = """
bench_loss --tokens 8 --vocabulary 64 --hidden 16 --repeats 1
bench_rounds --against {root} --target {target} --prompts 1 --tokens 4 --repeats 1 --dtype float32 --vocabulary 64
bench_shell_memory --tokenizer {target} --hidden 128 --vocab 300 --draft-vocab 64 --length 12 --rows 2 --depths 1 --mlp 16
bench_states_ahead --tokenizer {target} --hidden 32 --draft-vocab 64 --length 12 --rows 4 \
  --depths 1 --steps 2 --repeats 1 --delay 0.01
"""


def run(name: str, *words: object) -> None:
    """Runs a script as a shell does."""
    sys.argv = [f"{name}.py", *map(str, words)]
    runpy.run_path(str(EVAL / f"{name}.py"), run_name="__main__")


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    """Scripts import what lies beside them; arguments, seeds and threads are as before afterwards."""
    monkeypatch.syspath_prepend(EVAL)
    monkeypatch.setattr(sys, "argv", [])
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.thorough
@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_can_be_read_and_says_its_flags(name, capsys):
    try:
        with pytest.raises(SystemExit) as ended:
            run(name, "--help")
    except ModuleNotFoundError as error:
        if error.name not in ABSENT:
            raise
        pytest.skip(f"needs {error.name}")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folders of a tiny target, an untrained head of it, and data."""
    folder = tmp_path_factory.mktemp("tiny")
    target = loaded_target(folder / "target")
    make_drafter(target, torch.arange(200), ttt_steps=2).save_pretrained(folder / "head")
    write_data(folder / "data", target)
    found = {name: folder / name for name in ("target", "head", "data")}
    recipe = write_recipe(folder, found["target"], found["data"], max_steps=2, validation=0)[0]
    return {**found, "recipe": recipe}


def commands(text):
    return [pytest.param(line, id=line.split(" --")[0]) for line in text.strip().split("\n")]


def check(command, tiny, tmp_path):
    """Asserts that a script writes its result."""
    output = tmp_path / "result.json"
    with contextlib.suppress(SystemExit):
        run(*command.format(**tiny, root=ROOT).split(), "--output", output)
    assert load_json(output)


@pytest.mark.thorough
@pytest.mark.parametrize("command", commands(RUNS))
def test_a_script_runs_at_its_smallest_sizes(command, tiny, tmp_path):
    check(command, tiny, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(APART))
def test_a_script_of_several_processes_runs(command, tiny, tmp_path):
    check(command, tiny, tmp_path)


class Here:
    """A side of bench_train.py in this process."""

    def __init__(self, command):
        _, script, _, job, name = command
        with mock.patch("side.serve") as serve:
            runpy.run_path(script)["work"](job, name)
        self.loss_of = serve.call_args.args[0]

    def step(self, number):
        loss = self.loss_of(number)
        loss.backward()
        return {"seconds": 1.0, "loss": loss.item(), "at_rest_mb": 1.0, "peak_mb": 2.0}

    def close(self):
        pass


@pytest.mark.thorough
def test_both_sides_of_a_training_have_one_loss(tiny, tmp_path):
    command = "bench_train --target {target} --data {data} --sequence 48 --batches 1 --repeats 1 --draft-vocab-size 64"
    with mock.patch("side.Side", Here):
        check(command, tiny, tmp_path)
